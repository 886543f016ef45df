// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The elementwise scan over whole sequences.

#include "cpu/elementwise_scan/blocks.h"
#include "cpu/elementwise_scan/kernels.h"
#include "cpu/sequences/plan.h"

namespace hfla::HFLA_ISA {
namespace {

struct ForwardPlan {
  Blocks blocks;
  int64_t workers;
};

template <class Scalar>
struct ForwardScratch {
  AccOf<Scalar>* state;  // of a block, zeros up to a whole vector

  ForwardScratch(Carver& carver, const ForwardPlan& plan)
      : state(carver.take<AccOf<Scalar>>(plan.blocks.size)) {}
};

template <class Scalar>
class Forward {
  using Acc = AccOf<Scalar>;
  using Scratch = ForwardScratch<Scalar>;

 public:
  Forward(const ElementwiseScanProblem& p, const ElementwiseScanResult& result,
          const Threads& threads)
      : p_(p),
        result_(result),
        plan_{Blocks(p.num_sequences, p.C, threads.count), threads_for(p.B * p.T * p.C, threads)},
        workers_(for_decays(threads, true), plan_) {}

  Status run() {
    if (workers_.out_of_memory()) return Status::out_of_memory;
    const Blocks& blocks = plan_.blocks;
    workers_.run(p_.num_sequences * blocks.count, [&](Scratch& s, int64_t i) {
      forward(s.state, span_of(p_, i / blocks.count), blocks[i % blocks.count]);
    });
    return positive_log_decay_ ? Status::positive_log_decay : Status::ok;
  }

 private:
  void forward(Acc* state, const Span& span, Channels channels) {
    stage_state(p_.initial_state, p_, span, channels, state);
    Vec<Acc> largest{};
    for (int64_t time = span.begin; time < span.end; ++time) {
      Scalar* const y = token_of<Scalar>(result_.y, p_, span.batch, time, channels);
      if (is_padding(p_, span.batch, time)) {
        clear(y, channels.count);
      } else {
        advance(state, span.batch, time, channels, y, largest);
      }
    }
    if (sum<Acc>(largest) > 0) __atomic_store_n(&positive_log_decay_, true, __ATOMIC_RELAXED);
    write_state(state, p_, span, channels, result_.state);
  }

  HFLA_INLINE void advance(Acc* state, int64_t batch, int64_t time, Channels channels, Scalar* y,
                           Vec<Acc>& largest) const {
    const Scalar* const x = token_of<Scalar>(p_.x, batch, time, channels);
    const Acc* const log_decay = token_of<Acc>(p_.log_decay, batch, time, channels);
    for_each_vector<Acc>(0, channels.count, [&](int64_t c, int64_t count) HFLA_INLINE_LAMBDA {
      const Vec<Acc> g = load_vector(log_decay, p_.log_decay.dim, c, count);
      const Vec<Acc> h = decay_of(g) * load(state + c) + load_vector(x, p_.x.dim, c, count);
      largest = select(g > largest, g, largest);
      store(state + c, h);
      store_vector(y, 1, c, count, h);
    });
  }

  const ElementwiseScanProblem& p_;
  const ElementwiseScanResult& result_;
  const ForwardPlan plan_;
  Workers<Scratch, ForwardPlan> workers_;
  bool positive_log_decay_ = false;
};

}  // namespace

Status elementwise_scan_forward(const ElementwiseScanProblem& problem,
                                const ElementwiseScanResult& result, const Threads& threads) {
  return with_dtype(problem.dtype, [&](auto scalar) {
    return Forward<decltype(scalar)>(problem, result, threads).run();
  });
}

}  // namespace hfla::HFLA_ISA
