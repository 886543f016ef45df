// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The short convolution over whole sequences.
//
// Channels lie in the lanes of vectors. A task takes a block of channels of some runs of tokens: a
// tile of tokens after the other, and in a tile a vector of channels after the other, which slides
// its window over the tokens. No run waits for another: what is before it is in x.

#include "cpu/convolution/kernels.h"
#include "cpu/convolution/tokens.h"

namespace hfla::HFLA_ISA {
namespace {

template <class Scalar>
struct ForwardScratch {
  using Acc = AccOf<Scalar>;
  Acc *weight, *bias;  // (k, kBlockChannels), (kBlockChannels,)
  Scalar* zeros;       // a row
  TileRows<Scalar> x;

  template <class Plan>
  ForwardScratch(Carver& carver, const Plan& plan)
      : weight(carver.take<Acc>(plan.p.kernel_size * kBlockChannels)),
        bias(carver.take<Acc>(kBlockChannels)),
        zeros(carver.take<Scalar>(kBlockChannels)),
        x(carver, plan.p.kernel_size) {}
};

struct ForwardPlan {
  const ConvolutionProblem& p;
  int64_t workers;
};

template <class Scalar>
class Forward {
  using Acc = AccOf<Scalar>;
  using Scratch = ForwardScratch<Scalar>;
  static constexpr int64_t W = kLanes<Acc>;

 public:
  Forward(const ConvolutionProblem& p, const ConvolutionResult& result, const Threads& threads)
      : p_(p),
        result_(result),
        runs_(p),
        plan_{p, workers_for(threads, p.B * p.T * p.C)},
        workers_(threads, plan_) {}

  Status run() {
    if (runs_.out_of_memory() || workers_.out_of_memory()) return Status::out_of_memory;
    const int64_t blocks = channel_blocks(p_.C);
    workers_.run(runs_.groups() * blocks, [&](Scratch& s, int64_t i) {
      const Channels channels = channel_block(p_.C, i % blocks);
      stage_weights(p_.weight, p_.kernel_size, channels, s.weight);
      stage_weights(p_.bias, 1, channels, s.bias);
      __builtin_memset(s.zeros, 0, sizeof(Scalar) * kBlockChannels);
      runs_.for_each(i / blocks, [&](const Run& run) { forward(s, run, channels); });
    });
    return Status::ok;
  }

 private:
  void forward(Scratch& s, const Run& run, Channels channels) const {
    const auto before = [&](int64_t row) -> const Scalar* {
      if (!p_.initial_state) return s.zeros;
      return state_row<const Scalar>(const_cast<void*>(p_.initial_state), p_, run, p_.S + row,
                                     channels);
    };
    const int64_t past = p_.kernel_size - 1;
    for (int64_t token = run.first; token < run.last; token += kTileTokens) {
      const int64_t tokens = min(kTileTokens, run.last - token);
      walk(s, s.x.find(p_.x, run, channels, token - past, past + tokens, before), run, token,
           tokens, channels);
    }
    clear_padding<Scalar>(result_.y, p_, run, channels);
    if (run.last == run.count) write_state(s, run, channels, before);
  }

  // A tile: tokens [token, token + tokens), of which rows[past] is the first.
  void walk(const Scratch& s, const Scalar* const* rows, const Run& run, int64_t token,
            int64_t tokens, Channels channels) const {
    Scalar* out[kTileTokens];
    for (int64_t i = 0; i < tokens; ++i) {
      out[i] = token_row<Scalar>(result_.y, p_, run, run.time(token + i), channels);
    }
    const int64_t whole = whole_vectors<Acc>(channels);
    with_kernel_size(p_.kernel_size, [&](auto k) {
      for (int64_t c = 0; c < whole; c += W) slide<k.kValue>(s, rows, out, tokens, c, W);
    });
    if (whole < channels.count) slide<0>(s, rows, out, tokens, whole, channels.count - whole);
  }

  // The windows of a vector of channels, of which the first `count` are there.
  template <int K>
  HFLA_INLINE void slide(const Scratch& s, const Scalar* const* rows, Scalar* const* out,
                         int64_t tokens, int64_t c, int64_t count) const {
    const bool silu = p_.silu;
    Window<Scalar, K> window(rows, p_.kernel_size, c, count);
    for (int64_t i = 0; i < tokens; ++i) {
      window.move_to(i);
      store_vector(out[i], 1, c, count, activation(silu, window.convolve(s.weight, s.bias)));
    }
  }

  template <class Before>
  void write_state(Scratch& s, const Run& run, Channels channels, Before before) const {
    for (int64_t i = 0; i < p_.S; ++i) {
      const Scalar* const row = *s.x.find(p_.x, run, channels, run.count - p_.S + i, 1, before);
      __builtin_memcpy(state_row<Scalar>(result_.state, p_, run, i, channels), row,
                       sizeof(Scalar) * static_cast<size_t>(channels.count));
    }
  }

  const ConvolutionProblem& p_;
  const ConvolutionResult& result_;
  const Runs runs_;
  const ForwardPlan plan_;
  Workers<Scratch, ForwardPlan> workers_;
};

}  // namespace

Status convolution_forward(const ConvolutionProblem& problem, const ConvolutionResult& result,
                           const Threads& threads) {
  return with_dtype(problem.dtype, [&](auto scalar) {
    return Forward<decltype(scalar)>(problem, result, threads).run();
  });
}

}  // namespace hfla::HFLA_ISA
