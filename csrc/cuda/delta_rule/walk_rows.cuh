// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Rows of tensors (B, T, Hv, V) on their way to a walk's registers and back: a warp's 16 tokens of
// a chunk and some of the block's columns, in the layout of accumulators.
#pragma once

#include "cuda/delta_rule/chunk.cuh"

namespace hfla::cuda {

constexpr int kDeltaWalkThreads = 128, kDeltaWalkWarps = kDeltaWalkThreads / 32;

template <class Scalar, int kColumns>
class TokenRows {
  static constexpr int C = Chunk<Scalar>::C;
  static constexpr int kStrips = C / 16, kParts = kDeltaWalkWarps / kStrips;
  static constexpr int kTiles = kColumns / kParts / 8;

 public:
  using Values = float[kTiles][4];
  using Shown = Tile<typename Chunk<Scalar>::Element, C, kColumns>;

  DEV TokenRows(const DeltaRuleChunks& p, int64_t head, int64_t first_column)
      : p_(p),
        head_(head),
        first_column_(first_column),
        warp_(thread_index() / 32),
        g_(lane().g),
        t_(lane().t) {}

  DEV void enter(const Piece& piece) {
    piece_ = piece;
    part_ = p_.part_of(step(0));
    UNROLL
    for (int half = 0; half < 2; ++half) {
      present_[half] = p_.present(piece, step(half));
      beta_[half] = present_[half] && p_.beta.data
                        ? at_piece<const float>(p_.beta, piece, head_)[token(half) * p_.beta.time]
                        : 1;
    }
  }

  // The warp's first token, and first column.
  DEV int first_token() const { return warp_ % kStrips * 16; }
  DEV int part() const { return warp_ / kStrips * (kColumns / kParts); }
  DEV float beta(int half) const { return beta_[half]; }

  // Of steps of tokens that are this part of theirs; zero elsewhere, and where there is no token.
  template <class T>
  DEV void load(const View& view, int part, Values& values) const {
    UNROLL
    for (int half = 0; half < 2; ++half) {
      const T* const row = row_of<const T>(view, half);
      UNROLL
      for (int n = 0; n < kTiles; ++n) {
        const int64_t c = first_column_ + column(n);
        float* const to = values[n] + 2 * half;
        to[0] = to[1] = 0;
        if (!present_[half] || part_ != part || !view.data || c >= p_.V) continue;
        if (has_pair(row, view, c)) {
          const auto pair = *reinterpret_cast<const Run<T, 2>*>(row + c);
          to[0] = pair.get(0), to[1] = pair.get(1);
        } else {
          to[0] = to_float(row[c * view.dim]);
          if (c + 1 < p_.V) to[1] = to_float(row[(c + 1) * view.dim]);
        }
      }
    }
  }

  // Of the same steps; zeros where a token is masked.
  template <class T>
  DEV void store(const View& view, int part, const Values& values) const {
    UNROLL
    for (int half = 0; half < 2; ++half) {
      if (part_ != part || piece_.begin + token(half) >= piece_.end) continue;
      T* const row = row_of<T>(view, half);
      UNROLL
      for (int n = 0; n < kTiles; ++n) {
        const int64_t c = first_column_ + column(n);
        float pair[2] = {values[n][2 * half], values[n][2 * half + 1]};
        if (!present_[half]) pair[0] = pair[1] = 0;
        if (c >= p_.V) continue;
        if (has_pair(row, view, c)) {
          *reinterpret_cast<Run<T, 2>*>(row + c) = make_run<T>(pair);
        } else {
          row[c * view.dim] = from_float<T>(pair[0]);
          if (c + 1 < p_.V) row[(c + 1) * view.dim] = from_float<T>(pair[1]);
        }
      }
    }
  }

  // In shared memory, times a factor for each of the thread's two tokens.
  DEV void show(const Shown& tile, const Values& values, float first, float second) const {
    UNROLL
    for (int n = 0; n < kTiles; ++n) {
      const float one[2] = {first * values[n][0], first * values[n][1]};
      const float other[2] = {second * values[n][2], second * values[n][3]};
      tile.set_run(step(0), column(n), one);
      tile.set_run(step(1), column(n), other);
    }
  }

 private:
  DEV int step(int half) const { return first_token() + g_ + 8 * half; }
  DEV int token(int half) const { return p_.token_of(step(half)); }
  DEV int column(int tile) const { return part() + 8 * tile + 2 * t_; }  // and the next

  template <class T>
  DEV T* row_of(const View& view, int half) const {
    return at_piece<T>(view, piece_, head_) + token(half) * view.time;
  }
  template <class T>
  DEV bool has_pair(const T* row, const View& view, int64_t c) const {
    return view.dim == 1 && c + 1 < p_.V &&
           reinterpret_cast<uintptr_t>(row + c) % (2 * sizeof(T)) == 0;
  }

  const DeltaRuleChunks& p_;
  const int64_t head_, first_column_;
  const int warp_, g_, t_;
  Piece piece_{};
  int part_;  // of both steps
  bool present_[2];
  float beta_[2];
};

}  // namespace hfla::cuda
