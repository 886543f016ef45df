// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The short convolution of one token, with the state updated in place: its oldest token goes.

#include "cpu/common/memory.h"
#include "cpu/common/tasks.h"
#include "cpu/convolution/kernels.h"
#include "cpu/convolution/weights.h"
#include "cpu/sequences/step.h"

namespace hfla::HFLA_ISA {
namespace {

constexpr int64_t kStepRows = 16;  // of the batch, which a task takes with the same weights

template <class Scalar>
class Step {
  using Acc = AccOf<Scalar>;

 public:
  Step(const ConvolutionStep& p, const Threads& threads) : p_(p), threads_(threads) {}

  Status run() const {
    const int64_t blocks = channel_blocks(p_.C);
    const int64_t tasks = blocks * ceil_div(p_.B, kStepRows);
    const int64_t work = p_.B * p_.C * (p_.S + 1);
    const int64_t workers = min(tasks, workers_for(threads_, work));
    const int64_t numbers = (p_.kernel_size + 1) * kBlockChannels;
    const Buffer buffer(workers * numbers * static_cast<int64_t>(sizeof(Acc)));
    if (!buffer.data()) return Status::out_of_memory;
    run_tasks(threads_, workers, tasks, [&](int64_t worker, int64_t i) {
      Acc* const weight = reinterpret_cast<Acc*>(buffer.data()) + worker * numbers;
      Acc* const bias = weight + p_.kernel_size * kBlockChannels;
      const Channels channels = channel_block(p_.C, i % blocks);
      stage_weights(p_.weight, p_.kernel_size, channels, weight);
      stage_weights(p_.bias, 1, channels, bias);
      const int64_t first = i / blocks * kStepRows;
      for (int64_t b = first; b < min(p_.B, first + kStepRows); ++b)
        step(b, channels, weight, bias);
    });
    return Status::ok;
  }

 private:
  void step(int64_t b, Channels channels, const Acc* weight, const Acc* bias) const {
    Scalar* const y = static_cast<Scalar*>(p_.y) + b * p_.C + channels.begin;
    const int64_t slot = slot_of(p_, b);
    if (slot < 0) {
      __builtin_memset(y, 0, sizeof(Scalar) * static_cast<size_t>(channels.count));
      return;
    }
    const View &x = p_.x, &state = p_.state;
    const Scalar* const token =
        static_cast<const Scalar*>(x.data) + b * x.batch + channels.begin * x.dim;
    Scalar* const rows =
        static_cast<Scalar*>(state.data) + slot * state.batch + channels.begin * state.dim;
    const int64_t S = p_.S, unread = S + 1 - p_.kernel_size;  // rows too old for the window
    for_each_vector<Acc>(0, channels.count, [&](int64_t c, int64_t count) HFLA_INLINE_LAMBDA {
      Vec<Acc> u = load(bias + c);
      for (int64_t s = 0; s <= S; ++s) {
        const Vec<Acc> row = s < S ? load_vector(rows + s * state.time, state.dim, c, count)
                                   : load_vector(token, x.dim, c, count);
        if (s >= unread) u += load(weight + (s - unread) * kBlockChannels + c) * row;
        if (s > 0) store_vector(rows + (s - 1) * state.time, state.dim, c, count, row);
      }
      store_vector(y, 1, c, count, activation(p_.silu, u));
    });
  }

  const ConvolutionStep& p_;
  const Threads& threads_;
};

}  // namespace

Status convolution_step(const ConvolutionStep& problem, const Threads& threads) {
  return with_dtype(problem.dtype,
                    [&](auto scalar) { return Step<decltype(scalar)>(problem, threads).run(); });
}

}  // namespace hfla::HFLA_ISA
