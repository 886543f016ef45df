// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The feature maps, as csrc/cpu/linear_attention/feature_maps.h has them. Comparisons are written
// so that a NaN goes through.
#pragma once

#include "cuda/common/numbers.h"
#include "kernels/linear_attention.h"

namespace hfla::cuda {

// Float32's own, or what is enough for half precision.
template <class Scalar>
DEV float exponential(float x) {
  return sizeof(Scalar) == 2 ? fast_exp(x) : expf(x);
}

template <class Scalar, int count>
DEV void apply(FeatureMap map, float (&x)[count]) {
  const auto each = [&](auto f) {
    UNROLL
    for (int i = 0; i < count; ++i) x[i] = f(x[i]);
  };
  switch (map) {
    case FeatureMap::elu_plus_one:
      return each([](float x) { return x > 0 ? x + 1 : exponential<Scalar>(x); });
    case FeatureMap::relu:
      return each([](float x) { return x <= 0 ? 0 : x; });
    case FeatureMap::relu2:
      return each([](float x) { return x <= 0 ? 0 : x * x; });
    case FeatureMap::silu:
      return each([](float x) { return x / (1 + exponential<Scalar>(-x)); });
    case FeatureMap::exp:
      return each([](float x) { return exponential<Scalar>(x); });
    default:
      return;
  }
}

template <class Scalar>
DEV float apply(FeatureMap map, float x) {
  float one[1] = {x};
  apply<Scalar>(map, one);
  return one[0];
}

template <class Scalar>
DEV float derivative(FeatureMap map, float x) {
  switch (map) {
    case FeatureMap::elu_plus_one:
      return x > 0 ? 1 : exponential<Scalar>(x);
    case FeatureMap::relu:
      return x <= 0 ? 0 : 1;
    case FeatureMap::relu2:
      return x <= 0 ? 0 : 2 * x;
    case FeatureMap::silu: {
      const float e = exponential<Scalar>(-x), sigmoid = 1 / (1 + e);
      const float rest = e > 1 ? 1 - sigmoid : e * sigmoid;  // 1 - sigmoid, without inf * 0
      return sigmoid * (1 + x * rest);
    }
    case FeatureMap::exp:
      return exponential<Scalar>(x);
    default:
      return 1;
  }
}

}  // namespace hfla::cuda
