// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The pointwise feature maps, on vectors: f(x), and its derivative from x and f(x). Comparisons are
// written so that a NaN goes through.
#pragma once

#include "cpu/common/exp.h"
#include "cpu/sequences/staging.h"
#include "kernels/linear_attention.h"

namespace hfla::HFLA_ISA {
namespace {

struct Identity {
  template <class V>
  HFLA_INLINE V operator()(V x) const {
    return x;
  }
  template <class V>
  HFLA_INLINE V derivative(V, V) const {
    return V{} + 1;
  }
};

struct EluPlusOne {
  template <class V>
  HFLA_INLINE V operator()(V x) const {
    using Acc = ElementOf<V>;
    return bounded_exp(at_most(Acc(0), x)) +
           at_least(Acc(0), x);  // for x > 0 that is exactly 1 + x
  }
  template <class V>
  HFLA_INLINE V derivative(V, V f) const {
    return at_most(ElementOf<V>(1), f);  // exp where that applies, and 1 elsewhere
  }
};

struct Relu {
  template <class V>
  HFLA_INLINE V operator()(V x) const {
    return select(x <= 0, V{}, x);
  }
  template <class V>
  HFLA_INLINE V derivative(V x, V) const {
    return select(x <= 0, V{}, V{} + 1);
  }
};

struct Relu2 {
  template <class V>
  HFLA_INLINE V operator()(V x) const {
    const V y = select(x <= 0, V{}, x);
    return y * y;
  }
  template <class V>
  HFLA_INLINE V derivative(V x, V) const {
    return select(x <= 0, V{}, x + x);
  }
};

struct Silu {
  template <class V>
  HFLA_INLINE V operator()(V x) const {
    return x / (exp(-x) + 1);
  }
  template <class V>
  HFLA_INLINE V derivative(V x, V) const {
    const V e = exp(-x);
    const V sigmoid = 1 / (e + 1);
    const V rest = select(e > 1, V{} + 1 - sigmoid, e * sigmoid);  // 1 - sigmoid, without inf * 0
    return sigmoid * (x * rest + 1);
  }
};

struct Exponential {
  template <class V>
  HFLA_INLINE V operator()(V x) const {
    return exp(x);
  }
  template <class V>
  HFLA_INLINE V derivative(V, V f) const {
    return f;
  }
};

// Calls body with the map, so that loops inside of it are compiled for each map.
template <class Body>
HFLA_INLINE void with_feature_map(FeatureMap map, Body body) {
  switch (map) {
    case FeatureMap::elu_plus_one:
      return body(EluPlusOne{});
    case FeatureMap::relu:
      return body(Relu{});
    case FeatureMap::relu2:
      return body(Relu2{});
    case FeatureMap::silu:
      return body(Silu{});
    case FeatureMap::exp:
      return body(Exponential{});
    case FeatureMap::identity:
    case FeatureMap::count:
      return body(Identity{});
  }
}

// x = φ(x), in the columns [begin, end) of a staged row.
template <class Acc, class Map>
HFLA_INLINE void map_row(Map map, int64_t begin, int64_t end, Acc* x) {
  int64_t c = begin;
  for (; c < end; c += kLanes<Acc>) store(x + c, map(load(x + c)));
  if (c == end) return;
  Acc* const last = x + c - kLanes<Acc>;
  store(last, first_lanes<Acc>(end - c + kLanes<Acc>, load(last)));
}

// Whether a derivative is taken from x, not from f(x) alone.
HFLA_INLINE bool derivative_needs_x(FeatureMap map) {
  return map == FeatureMap::relu || map == FeatureMap::relu2 || map == FeatureMap::silu;
}

}  // namespace
}  // namespace hfla::HFLA_ISA
