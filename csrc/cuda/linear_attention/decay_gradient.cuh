// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The two parts of backward that are no recurrence: before the walks, the gradient of the
// normaliser; after them, that of the decay.
#pragma once

#include "cuda/linear_attention/walk.cuh"

namespace hfla::cuda {

constexpr int kRowThreads = 128;

// y = num / den, so den's gradient is -⟨dy, y⟩ / den. The walks take it times den: beside dy stands
// -⟨dy, y⟩, and what both are multiplied with is divided. One warp per token and query head.
struct NormalizerGradient : Sequences {
  View dy, y;
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
  if (thread_index() % 32 == 0) p.den_grad[row] = -dot;
}

// ⟨φ(x_t), dφ(x)_t⟩ of some columns of x each: (column_blocks, B T, heads).
struct Dots {
  float* dots = nullptr;
  int64_t column_blocks = 0;
};

// One item of the sum below: what is added, and whether the sum starts afresh with it.
struct DecayItem {
  double sum;
  int reset;
};

// The gradient of the log decay, e^{g_t} ⟨[S, z]_{t-1}, its gradient⟩, as the recurrences make it:
//
//     dg_t = dg_{t+1} + ⟨φ(q_t), dφ(q)_t⟩ - ⟨φ(k_t), dφ(k)_t⟩,    dg_T = ⟨[S, z]_T, its gradient⟩
//
// summed in double because much of it cancels. Where e^{g_t} is 0 so is dg_t, exactly, and the sum
// starts afresh.
//
// A warp has a piece of a sequence, and a head. Three launches: dg_T, in parts; what each piece
// adds; and the gradients, from what the pieces behind add.
struct DecayGradient : Sequences {
  Pieces pieces;
  int64_t num_tokens;  // B T
  View log_decay, dlog_decay;
  Dots q, k;
  States state, gradient;  // the last ones; per sequence
  double* state_dots;      // (num_sequences, Hkv, kStateParts); null: zeros
  DecayItem* piece_sums;   // (pieces, Hkv); null: every sequence is one piece
};

constexpr int64_t kDecayTokens = 256;  // of a piece
constexpr int kStateParts = 8;

KERNEL LAUNCH_BOUNDS(32, 16) state_dots_kernel(const GRID_CONSTANT DecayGradient p) {
  const int64_t row = block_index() / kStateParts, part = block_index() % kStateParts;
  const auto dot_of = [&](const float* a, const float* b, int64_t size) {
    double dot = 0;
    if (!a || !b) return dot;
    a += row * size, b += row * size;
    UNROLL_BY(8)
    for (int64_t e = part * 32 + thread_index(); e < size; e += 32 * kStateParts) {
      dot += double(a[e]) * b[e];
    }
    return dot;
  };
  double dot = dot_of(p.state.kv, p.gradient.kv, p.K * p.V) + dot_of(p.state.z, p.gradient.z, p.K);
  for (int lanes = 16; lanes > 0; lanes /= 2) dot += shuffle_xor(dot, lanes);
  if (thread_index() == 0) p.state_dots[block_index()] = dot;
}

// Sums up `count` items, from the last to the first, after `carry`, and calls store(i, sum) with
// the sum down to each. Returns the last sum, and whether there was a reset.
template <class Load, class Store>
DEV DecayItem sum_backwards(int64_t count, DecayItem carry, Load load, Store store) {
  const int lane = thread_index();
  for (int64_t offset = 0; offset < count; offset += 32) {
    const int64_t i = count - 1 - offset - lane;
    DecayItem item{};
    if (i >= 0) item = load(i);
    // Sums of the lanes up to this one, from the last reset on.
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const double more = shuffle_up(item.sum, lanes);
      const int earlier_reset = shuffle_up(item.reset, lanes);
      if (lane < lanes) continue;
      if (!item.reset) item.sum += more;
      item.reset |= earlier_reset;
    }
    if (!item.reset) item.sum += carry.sum;
    item.reset |= carry.reset;
    if (i >= 0) store(i, item.sum);
    carry = {shuffle(item.sum, 31), shuffle(item.reset, 31)};
  }
  return carry;
}

// A piece and a head, and what its tokens add.
struct DecayPiece {
  const DecayGradient& p;
  const int64_t head, index;
  const Piece piece;

  DEV explicit DecayPiece(const DecayGradient& p)
      : p(p),
        head(block_index() % p.Hkv),
        index(block_index() / p.Hkv),
        piece(find_piece(p.pieces, index)) {}

  DEV bool present(int64_t t) const { return !p.key_mask || p.key_mask[piece.batch * p.T + t]; }
  DEV bool forgets(int64_t t) const {
    const View& g = p.log_decay;
    return static_cast<const float*>(g.data)[piece.batch * g.batch + t * g.time + head * g.head] <=
           kForgetsAll;
  }
  DEV DecayItem item(int64_t t) const {
    if (!present(t)) return {0, 0};
    if (forgets(t)) return {0, 1};
    const int64_t row = piece.batch * p.T + t, group = p.Hq / p.Hkv;
    double sum = 0;
    for (int64_t c = 0; c < p.q.column_blocks; ++c) {
      const float* const dots = p.q.dots + (c * p.num_tokens + row) * p.Hq + head * group;
      for (int64_t h = 0; h < group; ++h) sum += dots[h];
    }
    for (int64_t c = 0; c < p.k.column_blocks; ++c) {
      sum -= p.k.dots[(c * p.num_tokens + row) * p.Hkv + head];
    }
    return {sum, 0};
  }
  template <class Store>
  DEV DecayItem sum(double carry, Store store) const {
    return sum_backwards(
        piece.end - piece.begin, {carry, 0}, [&](int64_t i) { return item(piece.begin + i); },
        [&](int64_t i, double sum) { store(piece.begin + i, sum); });
  }
};

KERNEL LAUNCH_BOUNDS(32, 16) decay_sums_kernel(const GRID_CONSTANT DecayGradient p) {
  const DecayPiece here(p);
  if (here.piece.sequence < 0) return;
  const DecayItem sum = here.sum(0, [](int64_t, double) {});
  if (thread_index() == 0) p.piece_sums[block_index()] = sum;
}

KERNEL LAUNCH_BOUNDS(32, 16) decay_gradient_kernel(const GRID_CONSTANT DecayGradient p) {
  const DecayPiece here(p);
  const int64_t n = here.piece.sequence;
  if (n < 0) return;
  DecayItem carry{};
  for (int part = 0; p.state_dots && part < kStateParts; ++part) {
    carry.sum += p.state_dots[(n * p.Hkv + here.head) * kStateParts + part];
  }
  if (p.piece_sums) {
    const int64_t next = here.index + 1, end = p.pieces.first_piece(n) + p.pieces.num_pieces(n);
    carry = sum_backwards(
        end - next, carry, [&](int64_t i) { return p.piece_sums[(next + i) * p.Hkv + here.head]; },
        [](int64_t, double) {});
  }
  const View& to = p.dlog_decay;
  here.sum(carry.sum, [&](int64_t t, double sum) {
    const bool kept = here.present(t) && !here.forgets(t);
    static_cast<float*>(to.data)[here.piece.batch * to.batch + t * to.time + here.head * to.head] =
        kept ? float(sum) : 0;
  });
}

}  // namespace hfla::cuda
