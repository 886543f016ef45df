// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// What a task of the elementwise scan works on: a block of channels of one sequence, one token
// after the other, with the block's sums in the first-level cache. No channel knows of others, so
// that results do not depend on the blocks.
#pragma once

#include "cpu/sequences/channels.h"
#include "cpu/sequences/step.h"
#include "kernels/elementwise_scan.h"

namespace hfla::HFLA_ISA {
namespace {

// Rows of fewer bytes are not read at the memory's speed.
constexpr int64_t kMinBlock = 64, kMaxBlock = 512;  // channels
constexpr int64_t kTasksPerThread = 4;

// None has channels of several heads of P.
struct Blocks {
  int64_t P, size, of_a_head, count;

  // Of so many rows' channels, for so many threads.
  Blocks(int64_t rows, int64_t C, int64_t P, int64_t threads)
      : P(P),
        size(min(kMaxBlock, max(kMinBlock, round_up(rows * C / (kTasksPerThread * threads), 64)))),
        of_a_head(ceil_div(P, size)),
        count(C / P * of_a_head) {}

  Channels operator[](int64_t block) const {
    const int64_t in_head = block % of_a_head * size;
    return {block / of_a_head * P + in_head, min(size, P - in_head)};
  }
};

// The block's channels of a token, in a tensor (B, T, C).
template <class T>
HFLA_INLINE const T* token_of(const View& view, int64_t batch, int64_t time, Channels channels) {
  return static_cast<const T*>(view.data) + batch * view.batch + time * view.time +
         channels.begin * view.dim;
}

// The same, to write, in a contiguous one.
template <class T>
HFLA_INLINE T* token_of(void* data, const ChannelSumsProblem& p, int64_t batch, int64_t time,
                        Channels channels) {
  return static_cast<T*>(data) + (batch * p.T + time) * p.C + channels.begin;
}

template <class T>
HFLA_INLINE void clear(T* to, int64_t count) {
  __builtin_memset(to, 0, sizeof(T) * static_cast<size_t>(count));
}

// A sequence's row of states (rows, C), to or from the block's sums; of no states, zeros.
template <class Acc>
void stage_state(const void* states, const ChannelSumsProblem& p, const Span& span,
                 Channels channels, Acc* to) {
  clear(to, channels.padded<Acc>());
  if (!states) return;
  const Acc* const from = static_cast<const Acc*>(states) + span.sequence * p.C + channels.begin;
  __builtin_memcpy(to, from, sizeof(Acc) * static_cast<size_t>(channels.count));
}

template <class Acc>
void write_state(const Acc* from, const ChannelSumsProblem& p, const Span& span, Channels channels,
                 void* states) {
  Acc* const to = static_cast<Acc*>(states) + span.sequence * p.C + channels.begin;
  __builtin_memcpy(to, from, sizeof(Acc) * static_cast<size_t>(channels.count));
}

HFLA_INLINE bool is_padding(const ChannelSumsProblem& p, int64_t batch, int64_t time) {
  return p.key_mask && !p.key_mask[batch * p.T + time];
}

}  // namespace
}  // namespace hfla::HFLA_ISA
