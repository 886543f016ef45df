// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The gradients of q and k from those of what heads of the state made of them: summed over the
// heads that share one, and through the norm. With r = 1 / |x| and x' = r x,
//
//     d(scale x') = dx',    dx = scale r (dx' - ⟨dx', x'⟩ x')
//
// A warp has a token and a head.
#pragma once

#include "cuda/delta_rule/chunk.cuh"

namespace hfla::cuda {

constexpr int kFinishThreads = 128;

struct FinishRows {
  View x, dx;       // (B, T, heads, K)
  const float* dy;  // (B, T, Hv, K)
  const bool* key_mask;
  int64_t T, K, Hv, heads, rows;  // rows: B T heads
  float scale;
  bool normalize;
};

template <class Scalar>
KERNEL LAUNCH_BOUNDS(kFinishThreads, 8) delta_finish_kernel(const GRID_CONSTANT FinishRows p) {
  const int lane = thread_index() % 32;
  const int64_t row = block_index() * (kFinishThreads / 32) + thread_index() / 32;
  if (row >= p.rows) return;
  const int64_t head = row % p.heads, t = row / p.heads % p.T, b = row / p.heads / p.T;
  const int64_t group = p.Hv / p.heads;
  const float* const dy = p.dy + ((b * p.T + t) * p.Hv + head * group) * p.K;
  const Scalar* const x =
      static_cast<const Scalar*>(p.x.data) + b * p.x.batch + t * p.x.time + head * p.x.head;
  Scalar* const dx =
      static_cast<Scalar*>(p.dx.data) + b * p.dx.batch + t * p.dx.time + head * p.dx.head;
  const bool present = !p.key_mask || p.key_mask[b * p.T + t];
  const auto sum_of_heads = [&](int64_t c) {
    float sum = 0;
    for (int64_t h = 0; h < group; ++h) sum += dy[h * p.K + c];
    return sum;
  };
  float squares = 0, dot = 0;
  for (int64_t c = lane; present && p.normalize && c < p.K; c += 32) {
    const float of_x = to_float(x[c * p.x.dim]);
    squares += of_x * of_x, dot += of_x * sum_of_heads(c);
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    squares += shuffle_xor(squares, lanes);
    dot += shuffle_xor(dot, lanes);
  }
  const float r = p.normalize ? 1 / sqrtf(squares + float(kNormEps)) : 1;
  for (int64_t c = lane; c < p.K; c += 32) {
    float result = 0;
    if (present) {
      result = sum_of_heads(c);
      if (p.normalize) result -= r * r * dot * to_float(x[c * p.x.dim]);
    }
    dx[c * p.dx.dim] = from_float<Scalar>(p.scale * r * result);
  }
}

}  // namespace hfla::cuda
