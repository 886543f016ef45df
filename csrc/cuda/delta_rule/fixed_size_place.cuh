// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// What a block of a walk has to go over (fixed_size_walk.cuh).
#pragma once

#include "cuda/delta_rule/fixed_size_chunk.cuh"

namespace hfla::cuda {

// Where a block's chunks are. Numbers that no launch or length exceeds are kept in 32 bits: a walk
// has no registers to spare.
struct FixedSizePlace {
  int sequence, batch, begin;  // the first token
  int head, first_column, first_chunk;
  int chunks, tokens;  // of the sequence

  DEV explicit FixedSizePlace(const FixedSizeDeltaRule& p) {
    const int block = int(block_index());
    const int blocks = int((p.V + kFixedSizeColumns - 1) / kFixedSizeColumns);
    const int heads = block / blocks;
    first_column = block % blocks * kFixedSizeColumns;
    head = heads % int(p.Hkv);
    sequence = heads / int(p.Hkv);
    batch = p.pieces.cu_seqlens ? 0 : sequence;
    begin = int(p.pieces.sequence_begin(sequence));
    first_chunk = int(p.pieces.first_piece(sequence));
    const int length = int(p.pieces.sequence_end(sequence)) - begin;
    tokens = length > 0 ? length : 0;
    chunks = (tokens + kFixedSizeTokens - 1) / kFixedSizeTokens;
  }
  DEV int tokens_of(int chunk) const {
    const int left = tokens - chunk * kFixedSizeTokens;
    return left < kFixedSizeTokens ? left : kFixedSizeTokens;
  }
  // The first feature of a head's first token.
  template <class T>
  DEV T* rows(const View& x, int head) const {
    return static_cast<T*>(x.data) + batch * x.batch + begin * x.time + head * x.head;
  }
};

}  // namespace hfla::cuda
