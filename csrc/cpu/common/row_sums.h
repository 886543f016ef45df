// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The sum over a row.
#pragma once

#include "cpu/common/vec.h"

namespace hfla::HFLA_ISA {
namespace {

// Sums that are under way at once, so that no addition waits for another.
constexpr int kChains = 4;

// Columns that are added up at once: equal terms of more would all be rounded alike.
constexpr int64_t kRunColumns = 4096;

// Of what term(c, count) is for the vectors of a row: `count` columns from c on, and zeros behind.
// The order depends on the number of columns only.
template <class Acc, class Term>
HFLA_INLINE Acc sum_of_row(int64_t columns, Term term) {
  constexpr int64_t W = kLanes<Acc>;
  double total = 0;
  for (int64_t c = 0; c < columns;) {
    const int64_t end = min(columns, c + kRunColumns);
    Vec<Acc> sums[kChains] = {};
    for (; c + kChains * W <= end; c += kChains * W) {
      HFLA_UNROLL
      for (int chain = 0; chain < kChains; ++chain) sums[chain] += term(c + chain * W, W);
    }
    for (; c + W <= end; c += W) sums[0] += term(c, W);
    if (c < end) sums[1] += term(c, end - c);
    c = end;
    total += sum<Acc>((sums[0] + sums[1]) + (sums[2] + sums[3]));
  }
  return static_cast<Acc>(total);
}

}  // namespace
}  // namespace hfla::HFLA_ISA
