// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// What a block of a walk has to go over (known_walk.cuh).
#pragma once

#include "cuda/delta_rule/known_chunk.cuh"

namespace hfla::cuda {

// Where a block's chunks are.
struct KnownPlace {
  int64_t sequence, batch, begin;  // the first token
  int64_t head, first_column, first_chunk;
  int chunks, tokens;  // of the sequence

  DEV explicit KnownPlace(const KnownDeltaRule& p) {
    const int64_t blocks = (p.V + kKnownColumns - 1) / kKnownColumns;
    first_column = block_index() % blocks * kKnownColumns;
    head = block_index() / blocks % p.Hkv;
    sequence = block_index() / blocks / p.Hkv;
    batch = p.pieces.cu_seqlens ? 0 : sequence;
    begin = p.pieces.sequence_begin(sequence);
    first_chunk = p.pieces.first_piece(sequence);
    const int64_t length = p.pieces.sequence_end(sequence) - begin;
    tokens = length > 0 ? int(length) : 0;
    chunks = (tokens + kKnownTokens - 1) / kKnownTokens;
  }
  DEV int tokens_of(int chunk) const {
    const int left = tokens - chunk * kKnownTokens;
    return left < kKnownTokens ? left : kKnownTokens;
  }
  // How much further than the sequence's first token is that of its last chunk.
  DEV int64_t last_chunk(const View& x) const {
    return int64_t(chunks - 1) * kKnownTokens * x.time;
  }
  // The first feature of a head's first token.
  template <class T>
  DEV T* rows(const View& x, int64_t head) const {
    return static_cast<T*>(x.data) + batch * x.batch + begin * x.time + head * x.head;
  }
};

}  // namespace hfla::cuda
