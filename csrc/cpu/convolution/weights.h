// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// What kernels of the short convolution share whatever the number of tokens: weights as they are
// computed with, and the activation.
#pragma once

#include "cpu/common/normal_exp.h"

namespace hfla::HFLA_ISA {
namespace {

// Channels that a task works on: their rows of a few tokens, and what is kept for each of them,
// stay in the first-level cache.
constexpr int64_t kBlockChannels = 256;

struct Channels {
  int64_t begin, count;
};

HFLA_INLINE int64_t channel_blocks(int64_t C) { return ceil_div(C, kBlockChannels); }

HFLA_INLINE Channels channel_block(int64_t C, int64_t block) {
  const int64_t begin = block * kBlockChannels;
  return {begin, min(kBlockChannels, C - begin)};
}

// How many of the channels fill vectors. What is left is the last of a row, if any: it has one loop
// for all kernel sizes.
template <class Acc>
HFLA_INLINE int64_t whole_vectors(Channels channels) {
  return channels.count / kLanes<Acc> * kLanes<Acc>;
}

// Row j of `to` (taps, kBlockChannels) gets tap j of these channels; zeros where there is none.
template <class Acc>
HFLA_NOINLINE void stage_weights(const ConvolutionWeights& weights, int64_t count,
                                 Channels channels, Acc* to) {
  if (!weights.data) {
    __builtin_memset(to, 0, sizeof(Acc) * count * kBlockChannels);
    return;
  }
  with_any_dtype(weights.dtype, [&](auto scalar) {
    using Scalar = decltype(scalar);
    const Scalar* const from =
        static_cast<const Scalar*>(weights.data) + channels.begin * weights.channel;
    if constexpr (sizeof(Scalar) >= sizeof(float)) {
      for (int64_t c = 0; c < channels.count; ++c) {
        for (int64_t j = 0; j < count; ++j) {
          to[j * kBlockChannels + c] =
              static_cast<Acc>(from[c * weights.channel + j * weights.tap]);
        }
      }
    } else {
      for (int64_t j = 0; j < count; ++j) {
        for_each_vector<float>(0, channels.count, [&](int64_t c, int64_t n) {
          const Vec<float> x = load_vector(from + j * weights.tap, weights.channel, c, n);
          for (int64_t i = 0; i < n; ++i) to[j * kBlockChannels + c + i] = static_cast<Acc>(x[i]);
        });
      }
    }
    return Status::ok;
  });
}

// Back, to a contiguous (C, taps) of some dtype.
template <class Acc>
void write_weights(void* data, DType dtype, int64_t count, const Acc* from, Channels channels) {
  with_any_dtype(dtype, [&](auto scalar) {
    using Scalar = decltype(scalar);
    using Wide = AccOf<Scalar>;
    Scalar* const to = static_cast<Scalar*>(data) + channels.begin * count;
    for (int64_t j = 0; j < count; ++j) {
      for_each_vector<Wide>(0, channels.count, [&](int64_t c, int64_t n) {
        Vec<Wide> x{};
        for (int64_t i = 0; i < n; ++i) x[i] = static_cast<Wide>(from[j * kBlockChannels + c + i]);
        store_vector(to + j, count, c, n, x);
      });
    }
    return Status::ok;
  });
}

template <class V>
HFLA_INLINE V activation(bool silu, V u) {
  if (!silu) return u;
  u = at_least(-kNormalExpRange<ElementOf<V>>, u);  // or a huge one would show how near to 0 is 0
  return u * sigmoid(u);
}

// Its derivative, times dy.
template <class V>
HFLA_INLINE V activation_gradient(bool silu, V u, V dy) {
  if (!silu) return dy;
  u = at_least(-kNormalExpRange<ElementOf<V>>, u);
  const V s = sigmoid(u);
  return dy * s * (ElementOf<V>(1) + u * (ElementOf<V>(1) - s));
}

template <int value>
struct Constant {
  static constexpr int kValue = value;
};

// Calls run(k), k a constant where loops are compiled for it, and 0 where they are not.
template <class Run>
HFLA_INLINE void with_kernel_size(int64_t kernel_size, Run run) {
  switch (kernel_size) {
    case 2:
      return run(Constant<2>{});
    case 3:
      return run(Constant<3>{});
    case 4:
      return run(Constant<4>{});
    default:
      return run(Constant<0>{});
  }
}

}  // namespace
}  // namespace hfla::HFLA_ISA
