// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The two parts of backward that are no recurrence: before the walks, the gradient of the
// normaliser; after them, that of the decay.
#pragma once

#include "cuda/linear_attention/walk.cuh"

namespace hfla::cuda {

constexpr int kRowThreads = 128;

// y = num / den, so den's gradient is -⟨dy, y⟩ / den. The walks take it divided by nothing more:
// beside dn = dy / den stands -⟨dn, y⟩. One warp per token and query head.
struct NormalizerGradient : Sequences {
  View dy, y;
  const float* den;
  float* den_grad;  // (B, T, Hq)
};

template <class Scalar>
KERNEL LAUNCH_BOUNDS(kRowThreads, 8)
    normalizer_gradient_kernel(const GRID_CONSTANT NormalizerGradient p) {
  const int64_t row = block_index() * (kRowThreads / 32) + thread_index() / 32;
  if (row >= p.B * p.T * p.Hq) return;
  const int64_t head = row % p.Hq, t = row / p.Hq % p.T, b = row / p.Hq / p.T;
  const Scalar* const dy =
      static_cast<const Scalar*>(p.dy.data) + b * p.dy.batch + t * p.dy.time + head * p.dy.head;
  const Scalar* const y =
      static_cast<const Scalar*>(p.y.data) + b * p.y.batch + t * p.y.time + head * p.y.head;
  float dot = 0;
  for (int64_t c = thread_index() % 32; c < p.V; c += 32) {
    dot += to_float(dy[c * p.dy.dim]) * to_float(y[c * p.y.dim]);
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) dot += shuffle_xor(dot, lanes);
  if (thread_index() % 32 == 0) p.den_grad[row] = -dot / p.den[row];
}

// The gradient of the log decay, e^{g_t} ⟨[S, z]_{t-1}, its gradient⟩, as the recurrences make it:
//
//     dg_t = dg_{t+1} + ⟨φ(q_t), dφ(q)_t⟩ - ⟨φ(k_t), dφ(k)_t⟩,    dg_T = ⟨[S, z]_T, its gradient⟩
//
// summed in double because much of it cancels. Where e^{g_t} is 0 so is dg_t, exactly, and the sum
// starts afresh. One warp per sequence and head, 32 tokens at a time, from the last to the first.
struct DecayGradient : Sequences {
  Pieces pieces;
  int64_t num_tokens;  // B T
  int64_t column_blocks;
  View log_decay, dlog_decay;
  const float *q_dots, *k_dots;  // (column_blocks, B T, heads)
  States state, gradient;        // the last ones; per sequence
};

DEV double dot_of_states(const float* a, const float* b, int64_t count) {
  double dot = 0;
  if (!a || !b) return dot;
  for (int64_t e = thread_index(); e < count; e += 32) dot += double(a[e]) * b[e];
  for (int lanes = 16; lanes > 0; lanes /= 2) dot += shuffle_xor(dot, lanes);
  return dot;
}

KERNEL LAUNCH_BOUNDS(32, 16) decay_gradient_kernel(const GRID_CONSTANT DecayGradient p) {
  const int64_t head = block_index() % p.Hkv, n = block_index() / p.Hkv;
  const int64_t begin = p.pieces.sequence_begin(n), end = p.pieces.sequence_end(n);
  const int64_t batch = p.pieces.cu_seqlens ? 0 : n, group = p.Hq / p.Hkv;
  const int lane = thread_index();

  const auto of_head = [&](const float* states, int64_t size) {
    return states ? states + (n * p.Hkv + head) * size : nullptr;
  };
  double carry =
      dot_of_states(of_head(p.state.kv, p.K * p.V), of_head(p.gradient.kv, p.K * p.V), p.K * p.V) +
      dot_of_states(of_head(p.state.z, p.K), of_head(p.gradient.z, p.K), p.K);

  for (int64_t offset = 0; offset < end - begin; offset += 32) {
    const int64_t t = end - 1 - offset - lane;
    const bool present = t >= begin && (!p.key_mask || p.key_mask[batch * p.T + t]);
    double sum = 0;
    int reset = 0;
    if (present) {
      const float g = static_cast<const float*>(
          p.log_decay
              .data)[batch * p.log_decay.batch + t * p.log_decay.time + head * p.log_decay.head];
      reset = g <= kForgetsAll;
      for (int64_t c = 0; !reset && c < p.column_blocks; ++c) {
        const int64_t row = c * p.num_tokens + batch * p.T + t;
        for (int64_t h = 0; h < group; ++h) sum += p.q_dots[row * p.Hq + head * group + h];
        sum -= p.k_dots[row * p.Hkv + head];
      }
    }
    const bool forgets = reset;
    // Sums of the lanes up to this one, from the last reset on.
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const double more = shuffle_up(sum, lanes);
      const int earlier_reset = shuffle_up(reset, lanes);
      if (lane < lanes) continue;
      if (!reset) sum += more;
      reset |= earlier_reset;
    }
    if (!reset) sum += carry;
    if (t >= begin) {
      static_cast<float*>(p.dlog_decay.data)[batch * p.dlog_decay.batch + t * p.dlog_decay.time +
                                             head * p.dlog_decay.head] =
          present && !forgets ? float(sum) : 0;
    }
    carry = shuffle(sum, 31);
  }
}

}  // namespace hfla::cuda
