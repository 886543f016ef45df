// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Which tokens a task of the short convolution takes, and where their rows are.
//
// The real tokens of a sequence are counted from 0; the rows before them are those of the initial
// state, of which the newest is number -1. Sequences are cut into runs of tokens, and runs are
// grouped into tasks, in a way that depends on the shapes and the padding only.
#pragma once

#include "cpu/convolution/weights.h"
#include "cpu/sequences/plan.h"

namespace hfla::HFLA_ISA {
namespace {

constexpr int64_t kRunTokens = 256;  // at most, and about what a task should have
constexpr int64_t kMaxGroups = 64;   // each of which has a gradient of the weight
constexpr int64_t kTileTokens = 16;  // that are walked over before the next channels' turn

// Consecutive real tokens of one sequence.
struct Run {
  int64_t sequence;      // the row of the states
  int64_t batch;         // the row of the tensors
  int64_t begin, end;    // times of the sequence
  const int32_t* times;  // of its real tokens; null: all are real
  int64_t count;         // of its real tokens
  int64_t first, last;   // the run's among them

  int64_t time(int64_t token) const { return times ? times[token] : begin + token; }
};

// All runs of a problem.
class Runs {
 public:
  explicit Runs(const ConvolutionProblem& p)
      : times_(p.key_mask ? p.B * p.T * static_cast<int64_t>(sizeof(int32_t)) : 0),
        runs_((p.num_sequences + p.B * p.T / kRunTokens) * static_cast<int64_t>(sizeof(Run))) {
    if (out_of_memory()) return;
    int32_t* times = p.key_mask ? reinterpret_cast<int32_t*>(times_.data()) : nullptr;
    for (int64_t s = 0; s < p.num_sequences; ++s) {
      Run run{};
      run.sequence = s, run.batch = p.cu_seqlens ? 0 : s;
      run.begin = p.cu_seqlens ? p.cu_seqlens[s] : 0;
      run.end = p.cu_seqlens ? p.cu_seqlens[s + 1] : p.T;
      run.times = times, run.count = run.end - run.begin;
      if (times) {
        run.count = 0;
        const bool* const keep = p.key_mask + run.batch * p.T;
        for (int64_t t = run.begin; t < run.end; ++t) {
          if (keep[t]) times[run.count++] = static_cast<int32_t>(t);
        }
        times += run.count;
      }
      add(run);
    }
    // Together as many runs as make a run of full length, and no more groups than there may be.
    per_group_ = max(1, max(ceil_div(count_, kMaxGroups), kRunTokens * count_ / max(1, p.B * p.T)));
  }

  bool out_of_memory() const { return !times_.data() || !runs_.data(); }
  int64_t groups() const { return ceil_div(count_, per_group_); }

  // Calls body(run) for the runs of a group.
  template <class Body>
  HFLA_INLINE void for_each(int64_t group, Body body) const {
    const int64_t end = min(count_, (group + 1) * per_group_);
    for (int64_t i = group * per_group_; i < end; ++i) body(data()[i]);
  }

 private:
  Run* data() const { return reinterpret_cast<Run*>(runs_.data()); }

  // The whole sequence; a run even where there is no token, for the state.
  void add(Run run) {
    run.first = 0;
    do {
      run.last = min(run.count, run.first + kRunTokens);
      data()[count_++] = run;
      run.first = run.last;
    } while (run.first < run.count);
  }

  const Buffer times_, runs_;
  int64_t count_ = 0, per_group_ = 1;
};

// Rows so far apart go into the same few lines of the first-level cache, all of a tile.
constexpr int64_t kCollision = 2048;  // bytes

// Rows (k - 1 + kTileTokens, kBlockChannels) of a tensor whose channels are not beside each other.
template <class Scalar>
class TileRows {
 public:
  TileRows(Carver& carver, int64_t kernel_size)
      : rows_(carver.take<const Scalar*>(kernel_size - 1 + kTileTokens)),
        copies_(carver.take<Scalar>((kernel_size - 1 + kTileTokens) * kStride)) {}

  // Finds rows [first, first + count) of the run. before(row) is the row of a number below 0.
  template <class Before>
  const Scalar* const* find(const View& view, const Run& run, Channels channels, int64_t first,
                            int64_t count, Before before) {
    const Scalar* const base =
        static_cast<const Scalar*>(view.data) + run.batch * view.batch + channels.begin * view.dim;
    const int64_t real = min(count, max(0, -first));  // the first real token's place
    for (int64_t i = 0; i < real; ++i) rows_[i] = before(first + i);
    if (view.dim == 1) {
      const bool collide = view.time * static_cast<int64_t>(sizeof(Scalar)) % kCollision == 0;
      for (int64_t i = real; i < count; ++i) {
        const Scalar* const row = base + run.time(first + i) * view.time;
        rows_[i] = collide ? copy_row(row, channels.count, i) : row;
      }
      return rows_;
    }
    for (int64_t i = real; i < count; ++i) rows_[i] = copies_ + i * kStride;
    for (int64_t c = 0; c < channels.count; ++c) {
      for (int64_t i = real; i < count; ++i) {
        copies_[i * kStride + c] = base[run.time(first + i) * view.time + c * view.dim];
      }
    }
    return rows_;
  }

 private:
  const Scalar* copy_row(const Scalar* row, int64_t count, int64_t i) {
    Scalar* const to = copies_ + i * kStride;
    __builtin_memcpy(to, row, sizeof(Scalar) * static_cast<size_t>(count));
    return to;
  }

  static constexpr int64_t kStride =
      kBlockChannels + kCacheLine / static_cast<int64_t>(sizeof(Scalar));
  const Scalar** const rows_;
  Scalar* const copies_;
};

// A row of a contiguous state (rows, S, C); `s` counts from its oldest.
template <class Scalar>
HFLA_INLINE Scalar* state_row(void* state, const ConvolutionProblem& p, const Run& run, int64_t s,
                              Channels channels) {
  return static_cast<Scalar*>(state) + (run.sequence * p.S + s) * p.C + channels.begin;
}

// A token's row of a contiguous (B, T, C).
template <class Scalar>
HFLA_INLINE Scalar* token_row(void* data, const ConvolutionProblem& p, const Run& run, int64_t time,
                              Channels channels) {
  return static_cast<Scalar*>(data) + (run.batch * p.T + time) * p.C + channels.begin;
}

// Zeros in a contiguous (B, T, C) for the padding before a run's tokens, and behind the last.
template <class Scalar>
void clear_padding(void* data, const ConvolutionProblem& p, const Run& run, Channels channels) {
  if (!run.times) return;
  const size_t bytes = sizeof(Scalar) * static_cast<size_t>(channels.count);
  int64_t time = run.first == 0 ? run.begin : run.time(run.first - 1) + 1;
  for (int64_t token = run.first; token <= run.last; ++token) {
    const bool is_last = token == run.last;
    if (is_last && run.last < run.count) return;  // the next run's
    const int64_t end = is_last ? run.end : run.time(token);
    for (; time < end; ++time) {
      __builtin_memset(token_row<Scalar>(data, p, run, time, channels), 0, bytes);
    }
    time = end + 1;
  }
}

// The window that slides over rows of a tile: k rows at the same channels, in registers where k is
// a constant K, and not 0. Weights are as stage_weights has them.
template <class Scalar, int K>
class Window {
  using Acc = AccOf<Scalar>;

 public:
  HFLA_INLINE Window(const Scalar* const* rows, int64_t /*kernel_size*/, int64_t c, int64_t count)
      : rows_(rows), c_(c), count_(count) {
    HFLA_UNROLL
    for (int j = 1; j < K; ++j) values_[j] = load_vector(rows[j - 1], 1, c, count);
  }

  // The window that ends at token i of the tile; these follow one another.
  HFLA_INLINE void move_to(int64_t i) {
    HFLA_UNROLL
    for (int j = 1; j < K; ++j) values_[j - 1] = values_[j];
    values_[K - 1] = load_vector(rows_[i + K - 1], 1, c_, count_);
  }

  HFLA_INLINE Vec<Acc> operator[](int64_t j) const { return values_[j]; }

  // bias + Σ_j weight_j window_j
  HFLA_INLINE Vec<Acc> convolve(const Acc* weight, const Acc* bias) const {
    Vec<Acc> u = load(bias + c_);
    HFLA_UNROLL
    for (int j = 0; j < K; ++j) u += load(weight + j * kBlockChannels + c_) * values_[j];
    return u;
  }

 private:
  const Scalar* const* const rows_;
  const int64_t c_, count_;
  Vec<Acc> values_[K];
};

template <class Scalar>
class Window<Scalar, 0> {
  using Acc = AccOf<Scalar>;

 public:
  HFLA_INLINE Window(const Scalar* const* rows, int64_t kernel_size, int64_t c, int64_t count)
      : rows_(rows), kernel_size_(kernel_size), c_(c), count_(count) {}

  HFLA_INLINE void move_to(int64_t i) { i_ = i; }

  HFLA_INLINE Vec<Acc> operator[](int64_t j) const {
    return load_vector(rows_[i_ + j], 1, c_, count_);
  }

  HFLA_INLINE Vec<Acc> convolve(const Acc* weight, const Acc* bias) const {
    Vec<Acc> u = load(bias + c_);
    for (int64_t j = 0; j < kernel_size_; ++j) {
      u += load(weight + j * kBlockChannels + c_) * (*this)[j];
    }
    return u;
  }

 private:
  const Scalar* const* const rows_;
  const int64_t kernel_size_, c_, count_;
  int64_t i_ = 0;
};

}  // namespace
}  // namespace hfla::HFLA_ISA
