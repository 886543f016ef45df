// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// A state as a scan keeps it, and in a tensor's layout.
//
// The columns of a state are cut into blocks of a few vectors. A block is stored on its own, all
// its rows together, padded with zero columns to whole vectors.
#pragma once

#include "cpu/common/constants.h"
#include "cpu/sequences/plan.h"

namespace hfla::HFLA_ISA {
namespace {

// The number of vectors in the next block, when `left` are left: a power of two.
HFLA_INLINE int64_t block_width(int64_t left, int64_t widest) {
  for (int64_t width = widest; width > 1; width /= 2) {
    if (width <= left) return width;
  }
  return 1;
}

// A range of a state's columns, in blocks.
template <class Acc>
struct Blocks {
  Acc* data;
  int64_t rows;
  Columns columns;
  int64_t widest;  // vectors
};

// Calls run(the block's width as a type with a constant `value`, its first column, its memory) for
// all blocks of a state. widest: that of the state.
template <int widest, class Run>
HFLA_INLINE void with_width(int64_t width, Run run) {
  if constexpr (widest > 1) {
    if (width < widest) return with_width<widest / 2>(width, run);
  }
  run(Constant<widest>{});
}
template <int widest, class Acc, class Run>
HFLA_INLINE void for_each_block(Blocks<Acc> state, Run run) {
  int64_t width;
  for (int64_t c = state.columns.begin; c < state.columns.end; c += width) {
    width = block_width(state.columns.end - c, widest);
    with_width<widest>(width, [&](auto its_width) { run(its_width, c * kLanes<Acc>, state.data); });
    state.data += state.rows * width * kLanes<Acc>;
  }
}

// In elements.
template <class Acc>
int64_t size_of(Blocks<Acc> state) {
  return state.rows * state.columns.count() * kLanes<Acc>;
}

// Rows [row_begin, row_end) of a state as a matrix in memory, with the columns that there really
// are.
template <class Acc>
struct Matrix {
  Acc* data;  // null: zeros to read, nowhere to write
  int64_t row_begin, row_end, columns;
  int64_t row_stride, column_stride;
};

// Calls visit(element of the state, element of the matrix) for all that both have.
template <class Acc, class MatrixAcc, class Visit>
HFLA_INLINE void for_each_element(Blocks<Acc> state, Matrix<MatrixAcc> matrix, Visit visit) {
  int64_t width;
  for (int64_t c = state.columns.begin; c < state.columns.end; c += width) {
    width = block_width(state.columns.end - c, state.widest);
    const int64_t first = c * kLanes<Acc>, padded = width * kLanes<Acc>;
    const int64_t count = min(padded, matrix.columns - first);
    for (int64_t r = matrix.row_begin; r < matrix.row_end; ++r) {
      for (int64_t i = 0; i < count; ++i) {
        visit(state.data[r * padded + i], matrix.data[(r - matrix.row_begin) * matrix.row_stride +
                                                      (first + i) * matrix.column_stride]);
      }
    }
    state.data += state.rows * padded;
  }
}

template <class Acc>
void clear_state(Blocks<Acc> state) {
  __builtin_memset(state.data, 0, sizeof(Acc) * size_of(state));
}

// To a state that has been cleared.
template <class Acc>
HFLA_NOINLINE void import_state(Blocks<Acc> state, Matrix<const Acc> from) {
  if (!from.data) return;
  for_each_element(state, from, [&](Acc& element, const Acc& x) { element = x; });
}

template <class Acc>
HFLA_NOINLINE void export_state(Blocks<Acc> state, Acc scale, Matrix<Acc> to) {
  if (!to.data) return;
  for_each_element(state, to, [&](const Acc& element, Acc& x) { x = scale * element; });
}

}  // namespace
}  // namespace hfla::HFLA_ISA
