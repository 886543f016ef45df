// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Matrices copied as float32 in the order in which products read them.
#pragma once

#include "cpu/common/transpose.h"
#include "cpu/common/vec.h"

namespace hfla::HFLA_ISA {
namespace {

using V = Vec<float>;
constexpr int64_t W = kLanes<float>;

// A number that lies there as float32 and is rounded to what it is multiplied in.
template <class Scalar>
struct Rounded {
  float number;
};
template <class Scalar>
struct AccOfScalar<Rounded<Scalar>> {
  using type = float;
};
template <class Scalar>
HFLA_INLINE V load(const Rounded<Scalar>* from) {
  return rounded<Scalar>(load(&from->number));
}

// Calls run(a number of the type that a tensor is read as), for a product in a dtype that the
// tensor has, or that it is rounded to.
template <class Run>
HFLA_INLINE auto with_number(DType dtype, DType product_dtype, Run run) {
  return with_dtype_but_double(product_dtype, [&](auto scalar) {
    using Scalar = decltype(scalar);
    if constexpr (sizeof(Scalar) < sizeof(float)) {
      if (dtype == DType::f32) return run(Rounded<Scalar>{});
    }
    return run(scalar);
  });
}

// A matrix whose rows are put into panels.
template <class Scalar>
struct Matrix {
  const Scalar* data;
  int64_t rows, row_stride, column_stride;

  Matrix(const void* data, int64_t rows, const int64_t (&strides)[2])
      : data(static_cast<const Scalar*>(data)),
        rows(rows),
        row_stride(strides[0]),
        column_stride(strides[1]) {}

  // The columns [begin, end) of the rows from `row` on as (end - begin, panel_rows), with zeros
  // for rows that are not there.
  template <int64_t panel_rows>
  void pack(int64_t row, int64_t begin, int64_t end, float* to) const {
    const Scalar* from = data + row * row_stride + begin * column_stride;
    const int64_t rows_left = rows - row;
    int64_t column = begin;
    if (row_stride != 1) {
      for (; column + W <= end; column += W, from += W * column_stride, to += W * panel_rows) {
        pack_square<panel_rows>(from, rows_left, column + W == end, to);
      }
    }
    for (; column < end; ++column, from += column_stride, to += panel_rows) {
      for (int64_t r = 0; r < panel_rows; r += W) {
        const V x = load_vector(from, row_stride, r, max(0, min(W, rows_left - r)));
        put<panel_rows>(to, r, column + 1 == end, x);
      }
    }
  }

 private:
  // W columns, the last rows first, because of what `put` writes.
  template <int64_t panel_rows>
  HFLA_INLINE void pack_square(const Scalar* from, int64_t rows_left, bool is_last,
                               float* to) const {
    for (int64_t r = (panel_rows - 1) / W * W; r >= 0; r -= W) {
      const int64_t count = min(rows_left - r, panel_rows - r);
      V square[W] = {};
      HFLA_UNROLL
      for (int64_t i = 0; i < W; ++i) {
        if (i < count) square[i] = load_vector(from + (r + i) * row_stride, column_stride, 0, W);
      }
      transpose(square);
      HFLA_UNROLL
      for (int64_t i = 0; i < W; ++i) {
        put<panel_rows>(to + i * panel_rows, r, is_last && i + 1 == W, square[i]);
      }
    }
  }

  // The panel's rows from r on, of one column. A whole vector may reach into the first rows of the
  // next column, which are written later.
  template <int64_t panel_rows>
  HFLA_INLINE static void put(float* to, int64_t r, bool is_last_column, V x) {
    store_vector(to, 1, r, is_last_column ? min(W, panel_rows - r) : W, x);
  }
};

}  // namespace
}  // namespace hfla::HFLA_ISA
