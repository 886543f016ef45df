// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Tensors that have one number per token and head, as decays, for the rows of a segment.
#pragma once

#include "cpu/common/exp.h"
#include "cpu/sequences/visits.h"

namespace hfla::HFLA_ISA {
namespace {

// The numbers, `absent` where the tensor or the token is none.
template <class Acc>
void stage_numbers(const Visit& visit, const View& view, Acc absent, Acc* to) {
  for_each_row<const Acc>(
      visit, view, RowsPer::token,
      [&](int64_t row, int64_t, int64_t, const Acc* from) { to[row] = *from; },
      [&](int64_t row) { to[row] = absent; });
}

// e^log_decay for every row, 1 where nothing is forgotten. Returns false if a decay would grow.
template <class Acc>
bool stage_decay(const Visit& visit, const View& log_decay, Acc* decay) {
  stage_numbers<Acc>(visit, log_decay, 0, decay);
  bool valid = true;
  for (int64_t row = 0; row < visit.padded_rows(); ++row) valid &= !(decay[row] > 0);
  for (int64_t row = 0; row < visit.padded_rows(); row += kLanes<Acc>) {
    store(decay + row, exp(load(decay + row)));
  }
  return valid;
}

}  // namespace
}  // namespace hfla::HFLA_ISA
