// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Between tensors of any dtype and strides and the padded rows of Acc that a scan works on.
//
// A scan takes a segment of tokens at a time, staged as rows (count, stride): converted, mapped,
// and with zeros in place of masked tokens, of columns beyond the last and of tokens beyond the
// last, so that awkward sizes take the same path as good ones. What is masked is not even read.
#pragma once

#include "cpu/sequences/traversal.h"

namespace hfla::HFLA_ISA {
namespace {

// ---- rows in ----

// to[c] = from[c] for the columns c in [begin, end), a vector at a time, then zeros up to a whole
// vector.
template <class Scalar>
HFLA_INLINE void load_row(const Scalar* from, int64_t stride, int64_t begin, int64_t end,
                          AccOf<Scalar>* to) {
  constexpr int64_t W = kLanes<AccOf<Scalar>>;
  int64_t c = begin;
  if (stride == 1) {
    for (; c + W <= end; c += W) store(to + c, load(from + c));
  }
  for (; c < end; c += W) {
    store(to + c, load_some(from + c * stride, stride, min(W, end - c)));
  }
}

template <class Acc>
HFLA_INLINE void zero_row(Acc* to, int64_t begin, int64_t end) {
  for (int64_t c = begin; c < end; c += kLanes<Acc>) store(to + c, Vec<Acc>{});
}

// Rows of Acc in a tensor or staged: row i begins at data + i * stride.
template <class Acc>
struct RowArray {
  Acc* data;
  int64_t stride;
};

// Whether there is nothing to decide in a loop over rows and vectors.
template <class Acc>
HFLA_INLINE bool are_plain(const Segment& segment, const TensorRows& rows) {
  return segment.plain && rows.view.dim == 1 && (rows.end - rows.begin) % kLanes<Acc> == 0;
}

// Whether a scan can read or write these rows in the tensor itself, which is of a dtype that is
// accumulated as Acc.
template <class Acc>
HFLA_INLINE bool in_place(DType dtype, const Segment& segment, const TensorRows& rows) {
  return is_acc(dtype) && are_plain<Acc>(segment, rows) && segment.rows() == segment.padded_rows();
}

template <class Acc>
HFLA_INLINE RowArray<Acc> rows_in_place(const Segment& segment, const TensorRows& rows) {
  return {row_at<Acc>(rows, segment, 0, 0), segment.step * rows.view.time};
}

template <class Acc>
HFLA_INLINE bool in_place(const Segment& segment, const TensorRows& rows) {
  return in_place<Acc>(dtype_of<Acc>, segment, rows);
}

// Rows that are plain, mapped, in the same columns of `to`.
template <class Scalar, class Map>
HFLA_INLINE void stage_plain_rows(const Segment& segment, const TensorRows& rows, Map map,
                                  RowArray<AccOf<Scalar>> to) {
  constexpr int64_t W = kLanes<AccOf<Scalar>>;
  const Scalar* from = row_at<const Scalar>(rows, segment, 0, 0);
  for (int64_t row = 0; row < segment.count; ++row, from += segment.step * rows.view.time) {
    for (int64_t c = rows.begin; c < rows.end; c += W) {
      store(to.data + row * to.stride + c, map(load(from + c)));
    }
  }
  for (int64_t row = segment.count; row < segment.padded_rows(); ++row) {
    zero_row(to.data + row * to.stride, rows.begin, rows.end);
  }
}

// A tensor's rows in the same columns of `to`, zero for masked tokens.
template <class Scalar>
void stage_rows(const Segment& segment, const TensorRows& rows, RowArray<AccOf<Scalar>> to) {
  using Acc = AccOf<Scalar>;
  if (are_plain<Acc>(segment, rows)) {
    const auto as_they_are = [](auto x) HFLA_INLINE_LAMBDA { return x; };
    return stage_plain_rows<Scalar>(segment, rows, as_they_are, to);
  }
  for_each_row<const Scalar>(
      segment, rows.view, rows.per,
      [&](int64_t row, int64_t, int64_t, const Scalar* from) {
        load_row(from, rows.view.dim, rows.begin, rows.end, to.data + row * to.stride);
      },
      [&](int64_t row) { zero_row(to.data + row * to.stride, rows.begin, rows.end); });
}
// The same for tensors of a dtype that is accumulated as Acc.
template <class Acc>
HFLA_NOINLINE void stage_rows(DType dtype, const Segment& segment, const TensorRows& rows,
                              RowArray<Acc> to) {
  with_dtype_of<Acc>(dtype, [&](auto scalar) { stage_rows<decltype(scalar)>(segment, rows, to); });
}

// Rows of a tensor where they are, if they are of Acc, or else converted to `to`, zero for masked
// tokens.
template <class Acc>
HFLA_INLINE RowArray<const Acc> find_rows(DType dtype, const Segment& segment,
                                          const TensorRows& rows, RowArray<Acc> to) {
  if (in_place<Acc>(dtype, segment, rows)) return rows_in_place<const Acc>(segment, rows);
  stage_rows<Acc>(dtype, segment, rows, to);
  return {to.data, to.stride};
}
// The same for tensors of Acc.
template <class Acc>
HFLA_INLINE RowArray<const Acc> find_rows(const Segment& segment, const TensorRows& rows,
                                          RowArray<Acc> to) {
  return find_rows<Acc>(dtype_of<Acc>, segment, rows, to);
}

// ---- rows out ----

// Calls fill(row, token, g, to) for the rows that a tensor has; those of masked tokens are set to
// zero.
template <class Scalar, class Fill>
HFLA_INLINE void unstage_rows(const Segment& segment, const TensorRows& rows, Fill fill) {
  using Acc = AccOf<Scalar>;
  for (int64_t i = 0; i < segment.count; ++i) {
    const bool masked = !segment.plain && segment.masked(i);
    for (int64_t g = 0; g < segment.group; ++g) {
      if (rows.per == RowsPer::token && g != segment.slot) continue;
      Scalar* const to = row_at<Scalar>(rows, segment, i, g);
      if (masked) {
        for_each_vector<Acc>(rows.begin, rows.end,
                             [&](int64_t c, int64_t count) HFLA_INLINE_LAMBDA {
                               store_vector(to, rows.view.dim, c, count, Vec<Acc>{});
                             });
      } else {
        fill(i * segment.group + g, i, g, to);
      }
    }
  }
}

// Staged rows, to the same columns of a tensor's rows.
template <class Scalar>
void store_rows(const Segment& segment, const TensorRows& rows, RowArray<AccOf<Scalar>> from) {
  using Acc = AccOf<Scalar>;
  constexpr int64_t W = kLanes<Acc>;
  const View& view = rows.view;
  const int64_t begin = rows.begin, end = rows.end;
  if (segment.plain && view.dim == 1 && (end - begin) % W == 0) {  // nothing to decide in the loop
    Scalar* to = row_at<Scalar>(rows, segment, 0, 0);
    const Acc* row = from.data;
    for (int64_t i = 0; i < segment.count;
         ++i, to += segment.step * view.time, row += from.stride) {
      for (int64_t c = begin; c < end; c += W) store(to + c, load(row + c));
    }
    return;
  }
  unstage_rows<Scalar>(segment, rows, [&](int64_t row, int64_t, int64_t, Scalar* to) {
    for_each_vector<Acc>(begin, end, [&](int64_t c, int64_t count) HFLA_INLINE_LAMBDA {
      store_vector(to, view.dim, c, count, load(from.data + row * from.stride + c));
    });
  });
}

// The same for tensors of a dtype that is accumulated as Acc.
template <class Acc>
HFLA_NOINLINE void store_rows(DType dtype, const Segment& segment, const TensorRows& rows,
                              RowArray<Acc> from) {
  with_dtype_of<Acc>(dtype,
                     [&](auto scalar) { store_rows<decltype(scalar)>(segment, rows, from); });
}

}  // namespace
}  // namespace hfla::HFLA_ISA
