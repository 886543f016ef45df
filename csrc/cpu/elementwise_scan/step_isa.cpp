// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// One token of the elementwise scan, with the state updated in place.

#include "cpu/elementwise_scan/blocks.h"
#include "cpu/elementwise_scan/kernels.h"

namespace hfla::HFLA_ISA {
namespace {

template <class Scalar>
class Step {
  using Acc = AccOf<Scalar>;

 public:
  Step(const ElementwiseScanStep& p, const Threads& threads)
      : p_(p), threads_(for_decays(threads, true)), blocks_(p.B, p.C, p.C, threads.count) {}

  Status run() const {
    if (has_positive_log_decay<Acc>(p_, threads_, 1, p_.C)) return Status::positive_log_decay;
    const int64_t workers = workers_for(threads_, p_.B * p_.C);
    run_tasks(threads_, workers, p_.B * blocks_.count,
              [&](int64_t, int64_t i) { step(i / blocks_.count, blocks_[i % blocks_.count]); });
    return Status::ok;
  }

 private:
  void step(int64_t b, Channels channels) const {
    Scalar* const y = static_cast<Scalar*>(p_.y) + b * p_.C + channels.begin;
    const int64_t slot = slot_of(p_, b);
    if (slot < 0) return clear(y, channels.count);
    const Scalar* const x = token_of<Scalar>(p_.x, b, 0, channels);
    const Acc* const log_decay = token_of<Acc>(p_.log_decay, b, 0, channels);
    Acc* const state =
        static_cast<Acc*>(p_.state.data) + slot * p_.state.batch + channels.begin * p_.state.dim;
    for_each_vector<Acc>(0, channels.count, [&](int64_t c, int64_t count) HFLA_INLINE_LAMBDA {
      const Vec<Acc> decay = decay_of(load_vector(log_decay, p_.log_decay.dim, c, count));
      const Vec<Acc> before = load_vector(state, p_.state.dim, c, count);
      const Vec<Acc> h = decay * before + load_vector(x, p_.x.dim, c, count);
      store_vector(state, p_.state.dim, c, count, h);
      store_vector(y, 1, c, count, h);
    });
  }

  const ElementwiseScanStep& p_;
  const Threads threads_;
  const Blocks blocks_;
};

}  // namespace

Status elementwise_scan_step(const ElementwiseScanStep& problem, const Threads& threads) {
  return with_dtype(problem.dtype,
                    [&](auto scalar) { return Step<decltype(scalar)>(problem, threads).run(); });
}

}  // namespace hfla::HFLA_ISA
