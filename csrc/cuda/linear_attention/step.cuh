// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Decoding: one token for every batch row, in one launch, with the state updated in place.
//
// A block has one batch row and one key-value head. Its threads form a grid over the state: along V
// a thread has `width` neighbouring columns, along K every num_rows-th row. So a warp reads whole
// rows, every element of the state is read and written once, and the outputs of a column are
// partial sums of num_rows threads, added up in shared memory, in a fixed order.
//
// Grouped heads: `group` query heads are answered from the rows while these are in registers. If
// there are more, the state is read again for the next ones, by then from the cache.
#pragma once

#include "cuda/linear_attention/feature_maps.cuh"

namespace hfla::cuda {

constexpr int kStepThreads = 128, kStepWarps = kStepThreads / 32;

// Where the threads of a block are; columns beyond num_columns * width are visited in turns.
struct StepShape {
  int num_columns, num_rows;
  BOTH StepShape(int64_t V, int width) {
    num_columns = 1;
    while (num_columns < kStepThreads && num_columns * width < V) num_columns *= 2;
    num_rows = kStepThreads / num_columns;
  }
};

template <int group, int width>
int64_t step_shared_bytes(const LinearAttentionStep& p) {
  const StepShape shape(p.V, width);
  const int64_t partial = int64_t(shape.num_rows) * shape.num_columns * width;
  return int64_t(sizeof(float)) * (p.K + group * p.K + group * partial + group * kStepWarps);
}

template <int width>
struct alignas(width * sizeof(float)) Floats {
  float x[width];
};

template <class Scalar, int group, int width>
KERNEL LAUNCH_BOUNDS(kStepThreads, 4) step_kernel(const GRID_CONSTANT LinearAttentionStep p) {
  const StepShape shape(p.V, width);
  const int64_t b = block_index() / p.Hkv, head = block_index() % p.Hkv;
  const int64_t heads = p.Hq / p.Hkv;
  const int thread = thread_index();
  const int column = thread % shape.num_columns, row = thread / shape.num_columns;
  const int64_t turn = int64_t(shape.num_columns) * width;  // columns at a time

  float* const phi_k = reinterpret_cast<float*>(shared_memory());  // (K,)
  float* const phi_q = phi_k + p.K;                                // (group, K)
  float* const partial = phi_q + group * p.K;                      // (group, num_rows, turn)
  float* const den = partial + group * shape.num_rows * turn;      // (group, warps), without eps

  const bool keep = !p.key_mask || p.key_mask[b];
  const int64_t slot = p.slots.state_indices ? p.slots.state_indices[b] : b;
  const Scalar* const q = static_cast<const Scalar*>(p.q.data) + b * p.q.batch;
  const Scalar* const k = static_cast<const Scalar*>(p.k.data) + b * p.k.batch + head * p.k.head;
  const Scalar* const v = static_cast<const Scalar*>(p.v.data) + b * p.v.batch + head * p.v.head;
  Scalar* const y = static_cast<Scalar*>(p.y.data) + b * p.y.batch;
  if (!keep || slot < 0 || slot >= p.slots.count) {  // neither writes nor forgets nor reads
    // Nobody has checked indices, since that would wait for the device: a wrong one gives NaN.
    const float nothing = !keep || slot == -1 ? 0 : NAN;
    for (int64_t i = thread; i < heads * p.V; i += kStepThreads) {
      y[(head * heads + i / p.V) * p.y.head + i % p.V * p.y.dim] = from_float<Scalar>(nothing);
    }
    return;
  }
  const float* const g = static_cast<const float*>(p.log_decay.data);
  const float decay = g ? expf(g[b * p.log_decay.batch + head * p.log_decay.head]) : 1;
  float* const kv = static_cast<float*>(p.kv) + slot * p.kv_slot + head * p.K * p.V;
  float* const z = p.normalize ? static_cast<float*>(p.z) + slot * p.z_slot + head * p.K : nullptr;

  for (int64_t i = thread; i < p.K; i += kStepThreads) {
    phi_k[i] = apply<Scalar>(p.feature_map, to_float(k[i * p.k.dim]));
  }
  for (int64_t first = 0; first < heads; first += group) {
    const bool update = first == 0;
    // φ(q), and its product with z, of which every thread has a part.
    float dot[group] = {};
    for (int64_t i = thread; i < p.K; i += kStepThreads) {
      float normalizer = 0;
      if (z) {
        normalizer = z[i];
        if (update) z[i] = normalizer = decay * normalizer + phi_k[i];
      }
      UNROLL
      for (int h = 0; h < group; ++h) {
        float phi = 0;
        if (first + h < heads) {
          const int64_t offset = (head * heads + first + h) * p.q.head + i * p.q.dim;
          phi = apply<Scalar>(p.feature_map, to_float(q[offset]));
        }
        phi_q[h * p.K + i] = phi;
        dot[h] += phi * normalizer;
      }
    }
    UNROLL
    for (int h = 0; h < group; ++h) {
      for (int lanes = 16; lanes > 0; lanes /= 2) dot[h] += shuffle_xor(dot[h], lanes);
      if (thread % 32 == 0) den[h * kStepWarps + thread / 32] = dot[h];
    }
    sync_block();

    for (int64_t start = 0; start < p.V; start += turn) {
      const int64_t c = start + column * width;
      Floats<width> sum[group] = {};
      if (c < p.V) {
        Floats<width> value;
        UNROLL
        for (int i = 0; i < width; ++i) value.x[i] = to_float(v[(c + i) * p.v.dim]);
        // Several rows are loaded before the first is used.
        constexpr int kAhead = 4;
        for (int64_t r = row; r < p.K; r += kAhead * shape.num_rows) {
          Floats<width> state[kAhead];
          UNROLL
          for (int a = 0; a < kAhead; ++a) {
            const int64_t i = r + a * shape.num_rows;
            if (i < p.K) state[a] = *reinterpret_cast<const Floats<width>*>(kv + i * p.V + c);
          }
          UNROLL
          for (int a = 0; a < kAhead; ++a) {
            const int64_t i = r + a * shape.num_rows;
            if (i >= p.K) continue;
            UNROLL
            for (int j = 0; j < width; ++j) {
              if (update) state[a].x[j] = decay * state[a].x[j] + phi_k[i] * value.x[j];
              UNROLL
              for (int h = 0; h < group; ++h) sum[h].x[j] += phi_q[h * p.K + i] * state[a].x[j];
            }
            if (update) *reinterpret_cast<Floats<width>*>(kv + i * p.V + c) = state[a];
          }
        }
      }
      UNROLL
      for (int h = 0; h < group; ++h) {
        UNROLL
        for (int j = 0; j < width; ++j) {
          partial[(h * shape.num_rows + row) * turn + column * width + j] = sum[h].x[j];
        }
      }
      sync_block();
      for (int64_t i = thread; i < group * turn; i += kStepThreads) {
        const int64_t h = i / turn, at = start + i % turn;
        if (first + h >= heads || at >= p.V) continue;
        float result = 0;
        for (int r = 0; r < shape.num_rows; ++r) {
          result += partial[(h * shape.num_rows + r) * turn + i % turn];
        }
        if (p.normalize) {
          float total = static_cast<float>(p.eps);
          for (int warp = 0; warp < kStepWarps; ++warp) total += den[h * kStepWarps + warp];
          result /= total;
        }
        y[(head * heads + first + h) * p.y.head + at * p.y.dim] = from_float<Scalar>(result);
      }
      // Before the next turn, or the next query heads, write there. Else, where there are several
      // turns, a thread reads only what it wrote: they have as many columns as there are threads.
      if (group > 1 || width > 1) sync_block();
    }
  }
}

template <class Scalar, int group, int width>
int launch_step(const LinearAttentionStep& p, Stream stream) {
  return launch(step_kernel<Scalar, group, width>, p.B * p.Hkv, kStepThreads,
                step_shared_bytes<group, width>(p), stream, p);
}

template <class Scalar>
int step(const LinearAttentionStep& p, Stream stream) {
  // torch aligns storages; a row of a state is aligned for wide loads if its length is, and that
  // from slot to slot.
  const bool wide =
      p.V % 4 == 0 && p.kv_slot % 4 == 0 && reinterpret_cast<uintptr_t>(p.kv) % 16 == 0;
  if (p.Hq == p.Hkv)
    return wide ? launch_step<Scalar, 1, 4>(p, stream) : launch_step<Scalar, 1, 1>(p, stream);
  return wide ? launch_step<Scalar, 4, 4>(p, stream) : launch_step<Scalar, 4, 1>(p, stream);
}

}  // namespace hfla::cuda
