// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The exponential function in fewer instructions, for a smaller range.
#pragma once

#include "cpu/common/exp.h"

namespace hfla::HFLA_ISA {
namespace {

// From minus this to this, e^x is a normal number.
template <class Acc>
constexpr Acc kNormalExpRange = sizeof(Acc) == sizeof(float) ? Acc(87) : Acc(708);

// As exp, of x within kNormalExpRange; beyond it the result means nothing.
template <class V>
HFLA_INLINE V normal_exp(V x) {
  using Acc = ElementOf<V>;
  // Unsigned, since that may overflow: beyond the range.
  using Bits = UIntVec<Acc>;
  const ReducedExp<V> of(x);
  const V p = of.factor * of.r + Acc(1);
  // n, in the lowest bits of rounded_n, goes to the exponent; the bits above it leave.
  return (V)((Bits)p + ((Bits)of.rounded_n << Exp<Acc>::kMantissaBits));
}

// Of x not below -kNormalExpRange; beyond that, in both directions, it is 0 or 1 to all digits but
// those of numbers as 1e-37.
template <class V>
HFLA_INLINE V sigmoid(V x) {
  using Acc = ElementOf<V>;
  return Acc(1) / (Acc(1) + normal_exp(-at_most(kNormalExpRange<Acc>, x)));
}

// The same of any x.
template <class V>
HFLA_INLINE V gate_of(V x) {
  using Acc = ElementOf<V>;
  return select(x < -kNormalExpRange<Acc>, V{}, sigmoid(x));
}

}  // namespace
}  // namespace hfla::HFLA_ISA
