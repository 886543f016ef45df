// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Decoding: one token for every batch row, in one launch, with the state updated in place.
//
// With S' the decayed state, what the token reads needs no second look at what it wrote:
//
//     u = β (v - S'ᵀk)      y = S'ᵀq + (k·q) u      S = S' + k uᵀ
//
// with an erase key p in the place of k in u; or with b, where the state S₀ is asked before it
// decays,
//
//     e = S₀ᵀp      u = v      y = S'ᵀq + (k·q) u + (b·q) e      S = S' + k uᵀ + b eᵀ
//
// Columns of a state know nothing of each other. A block has one batch row, one head and some
// columns, of which its threads keep rows in registers between the sums over all rows and the
// update: each element of a state of up to kStepRows rows is read and written once. Of a larger one
// all rows but the last kStepRows are read again, by then from the cache.
#pragma once

#include "cuda/common/scalar_types.h"
#include "kernels/delta_rule.h"

namespace hfla::cuda {

constexpr int kDeltaStepThreads = 128, kDeltaStepWarps = kDeltaStepThreads / 32;
constexpr int kStepLanes = 8;  // threads beside each other in a row of the state
constexpr int kStepRowGroups = kDeltaStepThreads / kStepLanes;
constexpr int kStepKept = 8;  // rows in a thread's registers
constexpr int kStepRows = kStepRowGroups * kStepKept;

constexpr int kStepArrays = 5, kStepSums = 4;  // of a token: rows of K numbers, and sums over them

inline int64_t delta_step_shared_bytes(const DeltaRuleStep& p, int width) {
  const int64_t partial = 2 * kDeltaStepWarps * kStepLanes * width;
  return int64_t(sizeof(float)) * (kStepArrays * p.K + partial + kStepSums * kDeltaStepWarps);
}

template <int width>
struct alignas(width * sizeof(float)) StepFloats {
  float x[width];
};

// What a block keeps of one token's key, query and decay, of what asks the state before it decays,
// and of b, (K,) each. Key and query are as they come: what they are multiplied with is
// `key_factor` and `query_factor`, and what asks with `asking_factor`.
struct StepToken {
  float *k, *q, *decay, *asks, *b;
  float key_factor, query_factor, asking_factor;
  float key_query, along_query;  // k·q and b·q, with their factors
};

template <class Scalar>
DEV const Scalar* of_head(const View& view, int64_t b, int64_t head) {
  return static_cast<const Scalar*>(view.data) + b * view.batch + head * view.head;
}

// All threads' rows are in shared memory afterwards.
template <class Scalar>
DEV StepToken load_token(const DeltaRuleStep& p, int64_t b, int64_t head, float* shared) {
  StepToken token{shared,
                  shared + p.K,
                  shared + 2 * p.K,
                  shared + 3 * p.K,
                  shared + 4 * p.K,
                  1,
                  float(p.scale),
                  1,
                  0,
                  0};
  float* const sums = shared + kStepArrays * p.K;  // (kStepSums, warps)
  const Scalar* const k = of_head<Scalar>(p.k, b, head / p.k_group);
  const Scalar* const q = of_head<Scalar>(p.q, b, head / p.q_group);
  const float* const g = p.log_decay.data ? of_head<float>(p.log_decay, b, head) : nullptr;
  const float* const erase = p.erase_key.data ? of_head<float>(p.erase_key, b, head) : nullptr;
  const float* const along = p.add_along.data ? of_head<float>(p.add_along, b, head) : nullptr;
  const int thread = thread_index();
  float squares_k = 0, squares_q = 0, product = 0, product_along = 0;
  for (int64_t i = thread; i < p.K; i += kDeltaStepThreads) {
    const float key = to_float(k[i * p.k.dim]), query = to_float(q[i * p.q.dim]);
    token.k[i] = key, token.q[i] = query;
    const float decay = g ? expf(g[p.decay_per_channel ? i * p.log_decay.dim : 0]) : 1;
    const float asking = erase ? erase[i * p.erase_key.dim] : key;
    token.decay[i] = decay;
    token.asks[i] = along ? asking : decay * asking;
    squares_k += key * key, squares_q += query * query, product += key * query;
    if (!along) continue;
    token.b[i] = along[i * p.add_along.dim];
    product_along += token.b[i] * query;
  }
  float parts[kStepSums] = {squares_k, squares_q, product, product_along};
  UNROLL
  for (int i = 0; i < kStepSums; ++i) {
    for (int lanes = 16; lanes > 0; lanes /= 2) parts[i] += shuffle_xor(parts[i], lanes);
    if (thread % 32 == 0) sums[i * kDeltaStepWarps + thread / 32] = parts[i];
  }
  sync_block();
  UNROLL
  for (int i = 0; i < kStepSums; ++i) {
    parts[i] = 0;
    for (int warp = 0; warp < kDeltaStepWarps; ++warp) parts[i] += sums[i * kDeltaStepWarps + warp];
  }
  if (p.normalize_qk) {
    token.key_factor = 1 / sqrtf(parts[0] + float(kNormEps));
    token.query_factor /= sqrtf(parts[1] + float(kNormEps));
  }
  if (!erase) token.asking_factor = token.key_factor;
  token.key_query = token.key_factor * token.query_factor * parts[2];
  token.along_query = token.query_factor * parts[3];
  return token;
}

// The sums over a column of all rows, of which each thread has a part, to all of them.
template <int width>
DEV void sum_over_rows(StepFloats<width>& of_key, StepFloats<width>& of_query, float* partial) {
  const int thread = thread_index(), column = thread % kStepLanes, warp = thread / 32;
  UNROLL
  for (int j = 0; j < width; ++j) {
    UNROLL
    for (int lanes = kStepLanes; lanes < 32; lanes *= 2) {
      of_key.x[j] += shuffle_xor(of_key.x[j], lanes);
      of_query.x[j] += shuffle_xor(of_query.x[j], lanes);
    }
    if (thread % 32 < kStepLanes) {
      float* const to = partial + 2 * ((warp * kStepLanes + column) * width + j);
      to[0] = of_key.x[j], to[1] = of_query.x[j];
    }
  }
  sync_block();
  UNROLL
  for (int j = 0; j < width; ++j) {
    of_key.x[j] = of_query.x[j] = 0;
    for (int w = 0; w < kDeltaStepWarps; ++w) {
      const float* const from = partial + 2 * ((w * kStepLanes + column) * width + j);
      of_key.x[j] += from[0], of_query.x[j] += from[1];
    }
  }
}

template <class Scalar, int width>
KERNEL LAUNCH_BOUNDS(kDeltaStepThreads, 4) delta_step_kernel(const GRID_CONSTANT DeltaRuleStep p) {
  constexpr int kColumns = kStepLanes * width;
  const int64_t column_blocks = (p.V + kColumns - 1) / kColumns;
  const int64_t column_block = block_index() % column_blocks;
  const int64_t head = block_index() / column_blocks % p.Hkv;
  const int64_t b = block_index() / column_blocks / p.Hkv;
  const int64_t c = column_block * kColumns + thread_index() % kStepLanes * width;
  const int row = thread_index() / kStepLanes;

  const bool keep = !p.key_mask || p.key_mask[b];
  const int64_t slot = p.slots.state_indices ? p.slots.state_indices[b] : b;
  Scalar* const y = static_cast<Scalar*>(p.y.data) + b * p.y.batch + head * p.y.head;
  if (!keep || slot < 0 || slot >= p.slots.count) {  // neither writes nor forgets nor reads
    // Nobody has checked indices, since that would wait for the device: a wrong one gives NaN.
    const float nothing = !keep || slot == -1 ? 0 : NAN;
    for (int i = thread_index(); i < kColumns; i += kDeltaStepThreads) {
      const int64_t at = column_block * kColumns + i;
      if (at < p.V) y[at * p.y.dim] = from_float<Scalar>(nothing);
    }
    return;
  }

  using Row = StepFloats<width>;
  float* const state = static_cast<float*>(p.state) + slot * p.state_slot + head * p.K * p.V + c;
  Row kept[kStepKept];
  const auto load = [&](int64_t first) {
    UNROLL
    for (int i = 0; i < kStepKept; ++i) {
      const int64_t r = first + row + i * kStepRowGroups;
      if (r < p.K && c < p.V) kept[i] = *reinterpret_cast<const Row*>(state + r * p.V);
    }
  };
  load(0);  // on its way while the token is loaded
  float* const shared = reinterpret_cast<float*>(shared_memory());
  const StepToken token = load_token<Scalar>(p, b, head, shared);
  float* const partial = shared + kStepArrays * p.K + kStepSums * kDeltaStepWarps;

  Row of_key{}, of_query{};
  const int64_t last = (p.K - 1) / kStepRows * kStepRows;
  for (int64_t first = 0;; first += kStepRows) {
    UNROLL
    for (int i = 0; i < kStepKept; ++i) {
      const int64_t r = first + row + i * kStepRowGroups;
      if (r >= p.K || c >= p.V) continue;
      UNROLL
      for (int j = 0; j < width; ++j) {
        of_key.x[j] += token.asks[r] * kept[i].x[j];
        kept[i].x[j] *= token.decay[r];
        of_query.x[j] += token.q[r] * kept[i].x[j];
      }
    }
    if (first == last) break;
    load(first + kStepRows);
  }
  sum_over_rows<width>(of_key, of_query, partial);

  const float beta = p.beta.data ? *of_head<float>(p.beta, b, head) : 1;
  const Scalar* const v = of_head<Scalar>(p.v, b, head);
  const bool along = p.add_along.data;
  Row written{}, found{};
  UNROLL
  for (int j = 0; j < width; ++j) {
    if (c >= p.V) continue;
    const float held = p.delta ? token.asking_factor * of_key.x[j] : 0;
    const float u = beta * (to_float(v[(c + j) * p.v.dim]) - (along ? 0 : held));
    written.x[j] = token.key_factor * u;
    if (along) found.x[j] = held;
    if (row == 0) {
      const float out = token.query_factor * of_query.x[j] + token.key_query * u;
      y[(c + j) * p.y.dim] = from_float<Scalar>(out + token.along_query * found.x[j]);
    }
  }
  for (int64_t first = last; first >= 0; first -= kStepRows) {
    if (first != last) load(first);
    UNROLL
    for (int i = 0; i < kStepKept; ++i) {
      const int64_t r = first + row + i * kStepRowGroups;
      if (r >= p.K || c >= p.V) continue;
      UNROLL
      for (int j = 0; j < width; ++j) {
        const float decay = first != last ? token.decay[r] : 1;
        kept[i].x[j] = decay * kept[i].x[j] + token.k[r] * written.x[j];
        if (along) kept[i].x[j] += token.b[r] * found.x[j];
      }
      *reinterpret_cast<Row*>(state + r * p.V) = kept[i];
    }
  }
}

template <class Scalar, int width>
int launch_delta_step(const DeltaRuleStep& p, Stream stream) {
  const int64_t columns = kStepLanes * width, column_blocks = (p.V + columns - 1) / columns;
  return launch(delta_step_kernel<Scalar, width>, p.B * p.Hkv * column_blocks, kDeltaStepThreads,
                delta_step_shared_bytes(p, width), stream, p);
}

template <class Scalar>
int delta_step(const DeltaRuleStep& p, Stream stream) {
  // torch aligns storages; a row of a state is aligned for wide loads if its length is, and that
  // from slot to slot.
  const bool wide =
      p.V % 4 == 0 && p.state_slot % 4 == 0 && reinterpret_cast<uintptr_t>(p.state) % 16 == 0;
  return wide ? launch_delta_step<Scalar, 4>(p, stream) : launch_delta_step<Scalar, 1>(p, stream);
}

}  // namespace hfla::cuda
