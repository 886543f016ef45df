// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// What a scan of linear attention needs beside rows of numbers: mapped features and the normaliser.
#pragma once

#include "cpu/linear_attention/feature_maps.h"
#include "cpu/linear_attention/scan.h"
#include "cpu/sequences/token_scalars.h"

namespace hfla::HFLA_ISA {
namespace {

// φ of a tensor's rows. All but plain ones are mapped after they are staged, lest every map be
// compiled for every dtype and layout.
template <class Acc>
HFLA_NOINLINE void stage_features(DType dtype, const Segment& segment, const TensorRows& rows,
                                  FeatureMap feature_map, RowArray<Acc> to) {
  const bool plain = are_plain<Acc>(segment, rows);
  if (!plain) stage_rows<Acc>(dtype, segment, rows, to);
  with_feature_map(feature_map, [&](auto map) {
    if (plain) {
      return with_dtype_of<Acc>(
          dtype, [&](auto scalar) { stage_plain_rows<decltype(scalar)>(segment, rows, map, to); });
    }
    for_each_present_row(segment, rows.per, [&](int64_t row, int64_t, int64_t) {
      map_row<Acc>(map, rows.begin, rows.end, to.data + row * to.stride);
    });
  });
}

// z = decay z + k, dots_i = q_iᵀ z, of the rows of a segment. It is one more column of the state,
// which would need a vector of its own in the scan.
template <class Acc>
struct NormalizerScan {
  int64_t count;  // of rows
  int64_t K;
  const Acc *q, *k;  // (count, stride)
  int64_t stride;
  const Acc* decay;  // (count,); null: no decay
  Acc* z;            // (K,), up to a whole vector
  Acc* terms;        // (count, lanes), for the sums
  Acc* dots;         // (count,)
};

template <class Acc>
void scan_normalizer(Role role, const NormalizerScan<Acc>& scan) {
  constexpr int64_t W = kLanes<Acc>;
  const auto [rows, K, q, k, stride, decay, z, terms, dots] = scan;
  __builtin_memset(terms, 0, sizeof(Acc) * rows * W);
  for (int64_t c = 0; c < K; c += W) {
    Vec<Acc> column = load(z + c);
    for (int64_t row = 0; row < rows; ++row) {
      if (writes(role)) {
        if (decay) column *= decay[row];
        column += load(k + row * stride + c);
      }
      if (reads(role)) {
        store(terms + row * W, load(terms + row * W) + load(q + row * stride + c) * column);
      }
    }
    store(z + c, column);
  }
  for (int64_t row = 0; reads(role) && row < rows; ++row)
    dots[row] = sum<Acc>(load(terms + row * W));
}

}  // namespace
}  // namespace hfla::HFLA_ISA
