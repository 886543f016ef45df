// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Recurrences whose channels do not meet: sequences, and blocks of channels, which lie in the lanes
// of vectors.
#pragma once

#include "cpu/common/normal_exp.h"

namespace hfla::HFLA_ISA {
namespace {

struct Channels {
  int64_t begin, count;

  template <class Acc>
  int64_t padded() const {
    return round_up(count, kLanes<Acc>);
  }
};

// A sequence: its row of the states, its row of the tensors, and its times.
struct Span {
  int64_t sequence, batch, begin, end;

  int64_t tiles(int64_t tile_tokens) const { return ceil_div(end - begin, tile_tokens); }
};

template <class Problem>
HFLA_INLINE Span span_of(const Problem& p, int64_t sequence) {
  if (!p.cu_seqlens) return {sequence, sequence, 0, p.T};
  return {sequence, 0, p.cu_seqlens[sequence], p.cu_seqlens[sequence + 1]};
}

// Of the sequence that has most.
template <class Problem>
int64_t most_tiles(const Problem& p, int64_t tile_tokens) {
  int64_t tiles = 0;
  for (int64_t n = 0; n < p.num_sequences; ++n) {
    tiles = max(tiles, span_of(p, n).tiles(tile_tokens));
  }
  return tiles;
}

// e^x for x not above 0, and 0 where that is less than any normal number.
template <class V>
HFLA_INLINE V decay_of(V x) {
  return select(x < -kNormalExpRange<ElementOf<V>>, V{}, normal_exp(x));  // a NaN stays one
}

}  // namespace
}  // namespace hfla::HFLA_ISA
