// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The gradients of q and k from those of what heads of the state made of them: summed over the
// heads that share one, and through the norm. With r = 1 / |x| and x' = r x,
//
//     d(scale x') = dx',    dx = scale r (dx' - ⟨dx', x'⟩ x')
//
// A block has some tokens of a sequence and head, and a warp one of them after the other, with all
// of its channels in registers.
#pragma once

#include "cuda/delta_rule/chunk.cuh"

namespace hfla::cuda {

constexpr int kFinishThreads = 128, kFinishTokens = 32;

struct FinishRows {
  View x, dx;       // (B, T, heads, K)
  const float* dy;  // (B, T, Hv, K)
  const bool* key_mask;
  int64_t T, K, Hv;
  int heads, blocks;  // blocks: of a sequence and head
  float scale;
  bool normalize;
};

template <class Scalar>
class Finish {
  static constexpr int kChannels = int(kMostKeyDimOnCuda) / 32;  // of a lane

 public:
  DEV explicit Finish(const FinishRows& p)
      : p_(p),
        lane_(thread_index() % 32),
        group_(int(p.Hv) / p.heads),
        head_(int(block_index()) % p.heads),
        batch_(int(block_index()) / p.heads / p.blocks),
        first_(int64_t(int(block_index()) / p.heads % p.blocks) * kFinishTokens) {}

  DEV void run() const {
    const int64_t left = p_.T - first_;
    NO_UNROLL
    for (int i = thread_index() / 32; i < kFinishTokens && i < left; i += kFinishThreads / 32) {
      visit(first_ + i);
    }
  }

 private:
  DEV void visit(int64_t t) const {
    const float* const dy = p_.dy + ((batch_ * p_.T + t) * p_.Hv + head_ * group_) * p_.K;
    const Scalar* const x = row<const Scalar>(p_.x, t);
    const bool present = !p_.key_mask || p_.key_mask[batch_ * p_.T + t];
    float of_x[kChannels] = {}, of_dx[kChannels] = {};
    if (present) {
      for_each_channel([&](int i, int c) {
        if (p_.normalize) of_x[i] = to_float(x[c * p_.x.dim]);
      });
      NO_UNROLL
      for (int h = 0; h < group_; ++h) {
        for_each_channel([&](int i, int c) { of_dx[i] += dy[h * p_.K + c]; });
      }
    }
    float squares = 0, dot = 0;
    UNROLL
    for (int i = 0; i < kChannels; ++i) squares += of_x[i] * of_x[i];
    const float r =
        p_.normalize ? fast_reciprocal_root(sum_of_lanes(squares) + float(kNormEps)) : 1;
    // Normed first: a long x would meet a gradient as large.
    UNROLL
    for (int i = 0; i < kChannels; ++i) {
      of_x[i] *= r;
      dot += of_x[i] * of_dx[i];
    }
    dot = sum_of_lanes(dot);
    Scalar* const dx = row<Scalar>(p_.dx, t);
    for_each_channel([&](int i, int c) {
      const float through_norm = p_.normalize ? dot * of_x[i] : 0;
      dx[c * p_.dx.dim] = from_float<Scalar>(p_.scale * r * (of_dx[i] - through_norm));
    });
  }

  static DEV float sum_of_lanes(float x) {
    for (int lanes = 16; lanes > 0; lanes /= 2) x += shuffle_xor(x, lanes);
    return x;
  }

  // Those of the lane.
  template <class Visit>
  DEV void for_each_channel(Visit visit) const {
    const int K = int(p_.K);
    UNROLL
    for (int i = 0; i < kChannels; ++i) {
      if (32 * i + lane_ < K) visit(i, 32 * i + lane_);
    }
  }

  template <class T>
  DEV T* row(const View& view, int64_t t) const {
    return static_cast<T*>(view.data) + batch_ * view.batch + t * view.time + head_ * view.head;
  }

  const FinishRows& p_;
  const int lane_, group_;
  const int64_t head_, batch_, first_;
};

template <class Scalar>
KERNEL LAUNCH_BOUNDS(kFinishThreads, 6) delta_finish_kernel(const GRID_CONSTANT FinishRows p) {
  Finish<Scalar>(p).run();
}

}  // namespace hfla::cuda
