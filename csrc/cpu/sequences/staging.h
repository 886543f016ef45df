// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Between tensors of any dtype and strides and the padded rows of Acc that a scan works on.
//
// A scan takes a segment of tokens at a time, staged as rows (count, stride): converted, mapped,
// and with zeros in place of masked tokens, of columns beyond the last and of tokens beyond the
// last, so that awkward sizes take the same path as good ones. What is masked is not even read.
#pragma once

#include "cpu/sequences/visits.h"

namespace hfla::HFLA_ISA {
namespace {

// A map that changes nothing.
struct Identity {
  template <class V>
  HFLA_INLINE V operator()(V x) const {
    return x;
  }
  template <class V>
  HFLA_INLINE V derivative(V, V) const {
    return V{} + 1;
  }
};

// ---- rows in ----

// to[c] = map(from[c]) for the columns c in [begin, end), a vector at a time, then zeros up to a
// whole vector.
template <class Scalar, class Map>
HFLA_INLINE void load_row(const Scalar* from, int64_t stride, int64_t begin, int64_t end,
                          AccOf<Scalar>* to, Map map) {
  constexpr int64_t W = kLanes<AccOf<Scalar>>;
  int64_t c = begin;
  if (stride == 1) {
    for (; c + W <= end; c += W) store(to + c, map(load(from + c)));
  }
  for (; c < end; c += W) {
    const int64_t count = min(W, end - c);
    const auto x = load_some(from + c * stride, stride, count);
    store(to + c, first_lanes<AccOf<Scalar>>(count, map(x)));
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

// Whether a scan can read or write these rows in the tensor itself.
template <class Scalar>
HFLA_INLINE bool in_place(const Visit& visit, const TensorRows& rows) {
  return sizeof(Scalar) == sizeof(AccOf<Scalar>) && visit.plain && rows.view.dim == 1 &&
         (rows.end - rows.begin) % kLanes<Scalar> == 0 && visit.rows() == visit.padded_rows();
}

template <class Acc, class Scalar>
HFLA_INLINE RowArray<Acc> rows_in_place(const Visit& visit, const TensorRows& rows) {
  return {reinterpret_cast<Acc*>(row_at<Scalar>(rows, visit, 0, 0)), visit.step * rows.view.time};
}

// The same for tensors of a dtype that is accumulated as Acc.
template <class Acc>
HFLA_INLINE bool in_place(DType dtype, const Visit& visit, const TensorRows& rows) {
  return is_acc(dtype) && in_place<Acc>(visit, rows);
}

// A tensor's rows, mapped, in the same columns of `to`.
template <class Scalar, class Map>
void stage_rows(const Visit& visit, const TensorRows& rows, Map map, RowArray<AccOf<Scalar>> to) {
  constexpr int64_t W = kLanes<AccOf<Scalar>>;
  const View& view = rows.view;
  const int64_t begin = rows.begin, end = rows.end;
  const auto absent = [&](int64_t row) { zero_row(to.data + row * to.stride, begin, end); };
  if (visit.plain && view.dim == 1 && (end - begin) % W == 0) {  // nothing to decide in the loop
    const Scalar* from = row_at<const Scalar>(rows, visit, 0, 0);
    for (int64_t row = 0; row < visit.count; ++row, from += visit.step * view.time) {
      for (int64_t c = begin; c < end; c += W) {
        store(to.data + row * to.stride + c, map(load(from + c)));
      }
    }
    for (int64_t row = visit.count; row < visit.padded_rows(); ++row) absent(row);
    return;
  }
  for_each_row<const Scalar>(
      visit, view, rows.per,
      [&](int64_t row, int64_t, int64_t, const Scalar* from) {
        load_row(from, view.dim, begin, end, to.data + row * to.stride, map);
      },
      absent);
}

// Rows of a tensor of Scalar where they are, or else converted to `to`, zero for masked tokens.
template <class Scalar>
RowArray<const AccOf<Scalar>> find_rows(const Visit& visit, const TensorRows& rows,
                                        RowArray<AccOf<Scalar>> to) {
  using Acc = AccOf<Scalar>;
  if (in_place<Scalar>(visit, rows)) return rows_in_place<const Acc, const Scalar>(visit, rows);
  stage_rows<Scalar>(visit, rows, Identity{}, to);
  return {to.data, to.stride};
}
// The same for tensors of a dtype that is accumulated as Acc.
template <class Acc>
RowArray<const Acc> find_rows(DType dtype, const Visit& visit, const TensorRows& rows,
                              RowArray<Acc> to) {
  return with_dtype_of<Acc>(
      dtype, [&](auto scalar) { return find_rows<decltype(scalar)>(visit, rows, to); });
}

// ---- rows out ----

// Calls fill(row, token, g, to) for the rows that a tensor has; those of masked tokens are set to
// zero.
template <class Scalar, class Fill>
HFLA_INLINE void unstage_rows(const Visit& visit, const TensorRows& rows, Fill fill) {
  using Acc = AccOf<Scalar>;
  for (int64_t i = 0; i < visit.count; ++i) {
    const bool masked = !visit.plain && visit.masked(i);
    for (int64_t g = 0; g < visit.group; ++g) {
      if (rows.per == RowsPer::token && g != visit.slot) continue;
      Scalar* const to = row_at<Scalar>(rows, visit, i, g);
      if (masked) {
        for_each_vector<Acc>(rows.begin, rows.end,
                             [&](int64_t c, int64_t count) HFLA_INLINE_LAMBDA {
                               store_vector(to, rows.view.dim, c, count, Vec<Acc>{});
                             });
      } else {
        fill(i * visit.group + g, i, g, to);
      }
    }
  }
}

// Staged rows, to the same columns of a tensor's rows.
template <class Scalar>
void store_rows(const Visit& visit, const TensorRows& rows, RowArray<AccOf<Scalar>> from) {
  using Acc = AccOf<Scalar>;
  constexpr int64_t W = kLanes<Acc>;
  const View& view = rows.view;
  const int64_t begin = rows.begin, end = rows.end;
  if (visit.plain && view.dim == 1 && (end - begin) % W == 0) {  // nothing to decide in the loop
    Scalar* to = row_at<Scalar>(rows, visit, 0, 0);
    const Acc* row = from.data;
    for (int64_t i = 0; i < visit.count; ++i, to += visit.step * view.time, row += from.stride) {
      for (int64_t c = begin; c < end; c += W) store(to + c, load(row + c));
    }
    return;
  }
  unstage_rows<Scalar>(visit, rows, [&](int64_t row, int64_t, int64_t, Scalar* to) {
    for_each_vector<Acc>(begin, end, [&](int64_t c, int64_t count) HFLA_INLINE_LAMBDA {
      store_vector(to, view.dim, c, count, load(from.data + row * from.stride + c));
    });
  });
}

// The same for tensors of a dtype that is accumulated as Acc.
template <class Acc>
void store_rows(DType dtype, const Visit& visit, const TensorRows& rows, RowArray<Acc> from) {
  with_dtype_of<Acc>(dtype, [&](auto scalar) { store_rows<decltype(scalar)>(visit, rows, from); });
}

}  // namespace
}  // namespace hfla::HFLA_ISA
