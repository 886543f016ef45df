// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Sums of channels over many tokens that do not drift.
//
// A float rounds equal summands all alike, and a decay close to 1 by percents of what it forgets:
// e^-1e-6 by three. So here a sum forgets by 1 - e^x, which has all its digits, and its rounding
// errors are kept beside it, as Kahan's are.
#pragma once

#include "cpu/common/constants.h"
#include "cpu/sequences/channels.h"
#include "cpu/sequences/plan.h"

namespace hfla::HFLA_ISA {
namespace {

// Calls run(whether it is, as a type with a constant `value`).
template <class Run>
HFLA_INLINE void with_length(const Span& span, Run run) {
  with_flag(span.end - span.begin > kLongSequence, run);
}

// e^x and 1 - e^x, each to its last digits, for x not above 0.
template <class V>
struct Decay {
  V left, lost;

  explicit HFLA_INLINE Decay(V x) {
    using Acc = ElementOf<V>;
    using Bits = UIntVec<Acc>;
    const ReducedExp<V> of(x);
    const V p = of.factor * of.r;                                         // e^r - 1
    const Bits exponent = (Bits)of.rounded_n << Exp<Acc>::kMantissaBits;  // as normal_exp
    const V power = (V)((Bits)broadcast(Acc(1)) + exponent);
    const auto all = x < -kNormalExpRange<Acc>;
    left = select(all, V{}, power * (p + Acc(1)));
    lost = select(all, broadcast(Acc(1)), (Acc(1) - power) - power * p);
  }
};

// What is beside `next`, the rounded sum of `sum` and `more`; nothing beside an infinity.
template <class V>
HFLA_INLINE V rest_of(V next, V sum, V more) {
  const V rest = more - (next - sum);
  return select(rest == rest, rest, V{});
}

// Where a sum forgets little, and is no infinity.
template <class V>
HFLA_INLINE auto forgets_little(V sum, V lost) {
  return (lost < ElementOf<V>(0.5)) & (sum - sum == V{});
}

// sum + rest = left (sum + rest) + x, where little is lost; else rest begins anew.
template <class V>
HFLA_INLINE void decay_and_add(V& sum, V& rest, V left, V lost, V x) {
  const auto keeps = forgets_little(sum, lost);
  const V more = rest + (x - lost * sum), next = sum + more;
  rest = select(keeps, rest_of(next, sum, more), V{});
  sum = select(keeps, next, left * sum + x);
}

// The same in the other order, sum + rest = left (sum + rest + x): returns what is decayed.
template <class V>
HFLA_INLINE V add_and_decay(V& sum, V& rest, V left, V lost, V x) {
  const V whole = sum + (rest + x);
  const auto keeps = forgets_little(whole, lost);
  const V more = rest + (x - lost * whole), next = sum + more;
  rest = select(keeps, rest_of(next, sum, more), V{});
  sum = select(keeps, next, left * whole);
  return whole;
}

template <class V>
HFLA_INLINE void add_exactly(V& sum, V& rest, V x) {
  const V more = rest + x, next = sum + more;
  rest = rest_of(next, sum, more);
  sum = next;
}

}  // namespace
}  // namespace hfla::HFLA_ISA
