// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The feature maps, as csrc/cpu/linear_attention/feature_maps.h has them. Comparisons are written
// so that a NaN goes through.
#pragma once

#include "cuda/common/scalar_types.h"
#include "kernels/linear_attention.h"

namespace hfla::cuda {

// Float32's own, or what is enough for half precision.
template <class Scalar>
DEV float exponential(float x) {
  return sizeof(Scalar) == 2 ? fast_exp(x) : expf(x);
}
template <class Scalar>
DEV float reciprocal(float x) {
  return sizeof(Scalar) == 2 ? fast_reciprocal(x) : 1 / x;
}

template <class Scalar, FeatureMap map>
DEV float apply(float x) {
  if constexpr (map == FeatureMap::elu_plus_one) {
    return x > 0 ? x + 1 : exponential<Scalar>(x);
  } else if constexpr (map == FeatureMap::relu) {
    return x <= 0 ? 0 : x;
  } else if constexpr (map == FeatureMap::relu2) {
    return x <= 0 ? 0 : x * x;
  } else if constexpr (map == FeatureMap::silu) {
    return x * reciprocal<Scalar>(1 + exponential<Scalar>(-x));
  } else if constexpr (map == FeatureMap::exp) {
    return exponential<Scalar>(x);
  } else {
    return x;
  }
}

template <class Scalar, FeatureMap map>
DEV float derivative(float x) {
  if constexpr (map == FeatureMap::elu_plus_one) {
    return x > 0 ? 1 : exponential<Scalar>(x);
  } else if constexpr (map == FeatureMap::relu) {
    return x <= 0 ? 0 : 1;
  } else if constexpr (map == FeatureMap::relu2) {
    return x <= 0 ? 0 : 2 * x;
  } else if constexpr (map == FeatureMap::silu) {
    const float e = exponential<Scalar>(-x), sigmoid = reciprocal<Scalar>(1 + e);
    const float rest = e > 1 ? 1 - sigmoid : e * sigmoid;  // 1 - sigmoid, without inf * 0
    return sigmoid * (1 + x * rest);
  } else if constexpr (map == FeatureMap::exp) {
    return exponential<Scalar>(x);
  } else {
    return 1;
  }
}

// By φ(x), of the maps that walks know.
template <FeatureMap map>
DEV float derivative_of_value(float value) {
  static_assert(map == FeatureMap::elu_plus_one || map == FeatureMap::identity);
  return map == FeatureMap::identity || value > 1 ? 1 : value;
}

template <FeatureMap map>
using Map = std::integral_constant<FeatureMap, map>;

// Calls visit with the map as a constant, so that it is asked for once and not for every number.
template <class Visit>
DEV auto with_map(FeatureMap map, Visit visit) {
  switch (map) {
    case FeatureMap::elu_plus_one:
      return visit(Map<FeatureMap::elu_plus_one>{});
    case FeatureMap::relu:
      return visit(Map<FeatureMap::relu>{});
    case FeatureMap::relu2:
      return visit(Map<FeatureMap::relu2>{});
    case FeatureMap::silu:
      return visit(Map<FeatureMap::silu>{});
    case FeatureMap::exp:
      return visit(Map<FeatureMap::exp>{});
    default:
      return visit(Map<FeatureMap::identity>{});
  }
}

template <class Scalar>
DEV float apply(FeatureMap map, float x) {
  return with_map(map, [x](auto map) { return apply<Scalar, decltype(map)::value>(x); });
}

}  // namespace hfla::cuda
