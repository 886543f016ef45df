// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// How sequences are cut into pieces, which blocks find without the host's help.
#pragma once

#include "cuda/common/device.h"

namespace hfla::cuda {

// How sequences are cut. Piece i of sequence n has an index that every block can find on its own,
// so that the host need not know cu_seqlens: with at most floor(length / L) + 1 pieces each,
// sequences that begin at s have their first at floor(s / L) + n, and never overlap. Some indices
// stay unused.
struct Pieces {
  const int32_t* cu_seqlens;  // null: all sequences have length T
  int64_t T, num_sequences;
  int64_t length;  // of a piece, a multiple of the chunk

  BOTH int64_t per_sequence() const {  // without cu_seqlens
    return T <= length ? 1 : (T + length - 1) / length;
  }
  BOTH int64_t count() const {
    return cu_seqlens ? T / length + num_sequences : num_sequences * per_sequence();
  }
  // Whether every sequence is one piece.
  BOTH bool whole() const { return T <= length; }

  // Nobody has checked cu_seqlens: wrong ones give a wrong answer, within the tensors.
  DEV int64_t bound(int64_t n) const {
    const int64_t at = cu_seqlens[n];
    return at < 0 ? 0 : at > T ? T : at;
  }
  DEV int64_t sequence_begin(int64_t n) const { return cu_seqlens ? bound(n) : 0; }
  DEV int64_t sequence_end(int64_t n) const { return cu_seqlens ? bound(n + 1) : T; }
  DEV int64_t first_piece(int64_t n) const {
    return cu_seqlens ? bound(n) / length + n : n * per_sequence();
  }
  DEV int64_t num_pieces(int64_t n) const {
    const int64_t tokens = sequence_end(n) - sequence_begin(n);
    return tokens <= length ? 1 : (tokens + length - 1) / length;
  }
};

struct Piece {
  int64_t sequence, batch, begin, end;  // sequence -1: there is no such piece
};

DEV Piece find_piece(const Pieces& pieces, int64_t index) {
  int64_t n = 0;
  if (!pieces.cu_seqlens) {
    n = int(index) / int(pieces.per_sequence());  // no launch has more blocks
  } else {
    // The last sequence whose first piece is not after this one.
    int64_t end = pieces.num_sequences;
    while (end - n > 1) {
      const int64_t middle = (n + end) / 2;
      (pieces.first_piece(middle) <= index ? n : end) = middle;
    }
  }
  const int64_t i = index - pieces.first_piece(n);
  const int64_t begin = pieces.sequence_begin(n) + i * pieces.length;
  const int64_t end = pieces.sequence_end(n);
  return {i < pieces.num_pieces(n) ? n : -1, pieces.cu_seqlens ? 0 : n, begin,
          begin + pieces.length < end ? begin + pieces.length : end};
}

}  // namespace hfla::cuda
