// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The elementwise scan and the RG-LRU over whole sequences.

#include "cpu/elementwise_scan/inputs.h"
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
  AccOf<Scalar>*state, *rest;  // of a block, zeros up to a whole vector

  ForwardScratch(Carver& carver, const ForwardPlan& plan)
      : state(carver.take<AccOf<Scalar>>(plan.blocks.size)),
        rest(carver.take<AccOf<Scalar>>(plan.blocks.size)) {}
};

template <class Scalar, class Inputs>
class Forward {
  using Acc = AccOf<Scalar>;
  using Scratch = ForwardScratch<Scalar>;
  using Problem = typename Inputs::Problem;

 public:
  Forward(const Problem& p, const ElementwiseScanResult& result, const Threads& threads)
      : p_(p),
        result_(result),
        plan_{Blocks(p.num_sequences, p.C, Inputs::head_size(p), threads.count),
              workers_for(threads, p.B * p.T * p.C * Inputs::kWork)},
        workers_(for_decays(threads, true), plan_) {}

  Status run() {
    if (workers_.out_of_memory()) return Status::out_of_memory;
    const Blocks& blocks = plan_.blocks;
    workers_.run(p_.num_sequences * blocks.count, [&](Scratch& s, int64_t i) {
      const Span span = span_of(p_, i / blocks.count);
      with_length(span, [&](auto is_long) {
        forward<decltype(is_long)::value>(s, span, blocks[i % blocks.count]);
      });
    });
    return positive_log_decay_ ? Status::positive_log_decay : Status::ok;
  }

 private:
  template <bool is_long>
  void forward(Scratch& s, const Span& span, Channels channels) {
    stage_state(p_.initial_state, p_, span, channels, s.state);
    clear(s.rest, channels.padded<Acc>());
    Vec<Acc> largest{};
    for (int64_t time = span.begin; time < span.end; ++time) {
      Scalar* const y = token_of<Scalar>(result_.y, p_, span.batch, time, channels);
      if (is_padding(p_, span.batch, time)) {
        clear(y, channels.count);
      } else {
        advance<is_long>(s, Inputs(p_, span.batch, time, channels), channels, y, largest);
      }
    }
    if (sum<Acc>(largest) > 0) __atomic_store_n(&positive_log_decay_, true, __ATOMIC_RELAXED);
    write_state(s.state, p_, span, channels, result_.state);
  }

  template <bool is_long>
  HFLA_INLINE void advance(Scratch& s, const Inputs& inputs, Channels channels, Scalar* y,
                           Vec<Acc>& largest) const {
    if (inputs.begins()) {
      clear(s.state, channels.padded<Acc>());
      clear(s.rest, channels.padded<Acc>());
    }
    for_each_vector<Acc>(0, channels.count, [&](int64_t c, int64_t count) HFLA_INLINE_LAMBDA {
      const auto input = inputs(c, count);
      const Vec<Acc> h = add_to_sums<is_long>(input, s.state + c, s.rest + c);
      largest = select(input.log_decay > largest, input.log_decay, largest);
      store_vector(y, 1, c, count, h);
    });
  }

  const Problem& p_;
  const ElementwiseScanResult& result_;
  const ForwardPlan plan_;
  Workers<Scratch, ForwardPlan> workers_;
  bool positive_log_decay_ = false;
};

template <template <class> class Inputs, class Problem>
Status forward(const Problem& problem, const ElementwiseScanResult& result,
               const Threads& threads) {
  return with_dtype(problem.dtype, [&](auto scalar) {
    using Scalar = decltype(scalar);
    return Forward<Scalar, Inputs<Scalar>>(problem, result, threads).run();
  });
}

}  // namespace

Status elementwise_scan_forward(const ElementwiseScanProblem& problem,
                                const ElementwiseScanResult& result, const Threads& threads) {
  return forward<GivenInputs>(problem, result, threads);
}

Status rg_lru_forward(const RgLruProblem& problem, const ElementwiseScanResult& result,
                      const Threads& threads) {
  return forward<RgLruInputs>(problem, result, threads);
}

}  // namespace hfla::HFLA_ISA
