// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Between tensors of any dtype and strides and the padded rows of Acc that a scan works on.
//
// A scan takes a segment of tokens at a time, staged as rows (count, stride): converted, mapped,
// and with zeros in place of masked tokens, of columns beyond the last and of tokens beyond the
// last, so that awkward sizes take the same path as good ones. What is masked is not even read.
//
// Grouped heads: a token has one row per query head of the group. Its k, v and decay take effect in
// one of these rows, its `slot`, and in the others nothing is written and nothing forgotten. So a
// group is a longer sequence, and the state is never repeated.
#pragma once

#include "cpu/feature_maps.h"
#include "cpu/work.h"

namespace hfla::HFLA_ISA {
namespace {

// The tokens of a segment, in the order in which a scan visits them.
struct Visit {
  const Problem& problem;
  int64_t batch, head;         // head: of k and v
  int64_t first, step, count;  // times first, first + step, ...
  int64_t group, slot;
  bool plain;  // no token is masked or has several rows

  int64_t time(int64_t i) const { return first + step * i; }
  // The key mask from the first of these tokens on; null: none is masked.
  const bool* keep() const {
    return problem.key_mask ? problem.key_mask + batch * problem.T + first : nullptr;
  }
  bool masked(int64_t i) const { return keep() && !keep()[step * i]; }
  int64_t rows() const { return count * group; }
  int64_t padded_rows() const { return round_up(rows(), kTokenMultiple); }
};

// The segment of `piece` that starts `offset` tokens after its beginning, or before its end; empty
// beyond the last.
HFLA_INLINE Visit visit_segment(const Problem& p, const Piece& piece, int64_t head, bool reversed,
                                int64_t offset, int64_t segment) {
  const int64_t group = p.Hq / p.Hkv;
  Visit visit{p, piece.batch, head, reversed ? piece.end - 1 - offset : piece.begin + offset,
              reversed ? -1 : 1, max(0, min(segment, piece.length() - offset)), group,
              // A query sees its own token, and its gradient has to reach it before the token is
              // left.
              reversed ? group - 1 : 0, group == 1};
  for (int64_t i = 0; p.key_mask && i < visit.count; ++i) visit.plain &= !visit.masked(i);
  return visit;
}

// Calls body(visit, the one after it) for all segments of `piece` and all heads, which take turns.
template <class Body>
HFLA_INLINE void for_each_visit(const Problem& p, const Piece& piece, Heads heads, bool reversed,
                                int64_t segment, Body body) {
  const auto at = [&](int64_t turn) {
    return visit_segment(p, piece, heads.begin + turn % heads.count(), reversed,
                         turn / heads.count() * segment, segment);
  };
  const int64_t turns = ceil_div(piece.length(), segment) * heads.count();
  for (int64_t turn = 0; turn < turns; ++turn) body(at(turn), at(turn + 1));
}

// Whether a tensor has a row per query head, or one per token and key-value head.
enum class Rows { per_query, per_token };

template <class Scalar>
HFLA_INLINE Scalar* row_at(const View& view, const Visit& visit, Rows rows, int64_t i, int64_t g) {
  const int64_t head = rows == Rows::per_query ? visit.head * visit.group + g : visit.head;
  return static_cast<Scalar*>(view.data) + visit.batch * view.batch + visit.time(i) * view.time +
         head * view.head;
}

// Calls present(row, token, g, pointer into the view) for rows that the tensor has and that are not
// masked, absent(row) for all others up to the padding. g: which of the token's rows it is.
template <class Scalar, class Present, class Absent>
HFLA_INLINE void for_each_row(const Visit& visit, const View& view, Rows rows, Present present,
                              Absent absent) {
  const int64_t count = view.data ? visit.count : 0, group = visit.group;
  const int64_t begin = rows == Rows::per_query ? 0 : visit.slot;
  const int64_t end = rows == Rows::per_query ? group : visit.slot + 1;
  const int64_t head_stride = rows == Rows::per_query ? view.head : 0;
  const int64_t token_stride = visit.step * view.time;
  const bool* const keep = visit.plain ? nullptr : visit.keep();
  Scalar* const first = count ? row_at<Scalar>(view, visit, rows, 0, 0) : nullptr;
  for (int64_t i = 0; i < count; ++i) {
    const bool masked = keep && !keep[visit.step * i];
    for (int64_t g = 0; g < group; ++g) {
      if (!masked && g >= begin && g < end) {
        present(i * group + g, i, g, first + i * token_stride + g * head_stride);
      } else {
        absent(i * group + g);
      }
    }
  }
  for (int64_t row = count * group; row < visit.padded_rows(); ++row) absent(row);
}

// What a scan asks memory for: rows that the next visit will read or write.
class Upcoming {
 public:
  // How many addresses rows of `columns` elements have; `pairs` has room for these.
  template <class Scalar>
  static int64_t pairs_per_row(int64_t columns) {
    return ceil_div(columns * static_cast<int64_t>(sizeof(Scalar)), kPairBytes);
  }

  Upcoming(const Visit& next, const char** pairs) : next_(next), pairs_(pairs) {}

  template <class Scalar>
  void add(const View& view, Rows rows, int64_t begin, int64_t end) {
    if (!view.data || view.dim != 1 || next_.count == 0) return;
    const int64_t heads = rows == Rows::per_query ? next_.group : 1;
    const int64_t stride = next_.step * view.time * static_cast<int64_t>(sizeof(Scalar));
    for (int64_t g = 0; g < heads; ++g) {
      const char* from =
          reinterpret_cast<const char*>(row_at<const Scalar>(view, next_, rows, 0, g) + begin);
      for (int64_t pair = 0; pair < pairs_per_row<Scalar>(end - begin); ++pair) {
        const char** const to = pairs_ + count_;
        for (int64_t i = 0; i < next_.count; ++i) to[i] = from + i * stride;
        count_ += next_.count;
        from += kPairBytes;
      }
    }
  }

  Prefetch get() const { return {pairs_, count_}; }

 private:
  const Visit& next_;
  const char** const pairs_;
  int64_t count_ = 0;
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

// Whether a scan can read or write the columns [begin, end) in the tensor itself.
template <class Scalar>
HFLA_INLINE bool in_place(const Visit& visit, const View& view, int64_t begin, int64_t end) {
  return sizeof(Scalar) == sizeof(AccOf<Scalar>) && visit.plain && view.dim == 1 &&
         (end - begin) % kLanes<Scalar> == 0 && visit.rows() == visit.padded_rows();
}

template <class Acc, class Scalar>
HFLA_INLINE RowArray<Acc> rows_in_place(const Visit& visit, const View& view, Rows rows) {
  return {reinterpret_cast<Acc*>(row_at<Scalar>(view, visit, rows, 0, 0)), visit.step * view.time};
}

// The columns [begin, end) of a tensor's rows, mapped.
template <class Scalar>
void stage_rows(const Visit& visit, const View& view, Rows rows, FeatureMap feature_map,
                int64_t begin, int64_t end, AccOf<Scalar>* to, int64_t stride) {
  constexpr int64_t W = kLanes<AccOf<Scalar>>;
  const auto absent = [&](int64_t row) { zero_row(to + row * stride, begin, end); };
  with_feature_map(feature_map, [&](auto map) {
    if (visit.plain && view.dim == 1 && (end - begin) % W == 0) {  // nothing to decide in the loop
      const Scalar* from = row_at<const Scalar>(view, visit, rows, 0, 0);
      for (int64_t row = 0; row < visit.count; ++row, from += visit.step * view.time) {
        for (int64_t c = begin; c < end; c += W) store(to + row * stride + c, map(load(from + c)));
      }
      for (int64_t row = visit.count; row < visit.padded_rows(); ++row) absent(row);
      return;
    }
    for_each_row<const Scalar>(
        visit, view, rows,
        [&](int64_t row, int64_t, int64_t, const Scalar* from) {
          load_row(from, view.dim, begin, end, to + row * stride, map);
        },
        absent);
  });
}

// e^log_decay for every row, 1 where nothing is forgotten. Returns false if a decay would grow.
template <class Acc>
bool stage_decay(const Visit& visit, Acc* decay) {
  bool valid = true;
  for_each_row<const Acc>(
      visit, visit.problem.log_decay, Rows::per_token,
      [&](int64_t row, int64_t, int64_t, const Acc* from) {
        decay[row] = *from;
        valid &= !(*from > 0);
      },
      [&](int64_t row) { decay[row] = 0; });
  for (int64_t row = 0; row < visit.padded_rows(); row += kLanes<Acc>) {
    store(decay + row, exp(load(decay + row)));
  }
  return valid;
}

// ---- rows out ----

// Calls fill(row, token, g, to) for the rows that a tensor has; those of masked tokens are set to
// zero.
template <class Scalar, class Fill>
HFLA_INLINE void unstage_rows(const Visit& visit, const View& view, Rows rows, int64_t begin,
                              int64_t end, Fill fill) {
  using Acc = AccOf<Scalar>;
  for (int64_t i = 0; i < visit.count; ++i) {
    const bool masked = !visit.plain && visit.masked(i);
    for (int64_t g = 0; g < visit.group; ++g) {
      if (rows == Rows::per_token && g != visit.slot) continue;
      Scalar* const to = row_at<Scalar>(view, visit, rows, i, g);
      if (masked) {
        for_each_vector<Acc>(begin, end, [&](int64_t c, int64_t count) HFLA_INLINE_LAMBDA {
          store_vector(to, view.dim, c, count, Vec<Acc>{});
        });
      } else {
        fill(i * visit.group + g, i, g, to);
      }
    }
  }
}

// The columns [begin, end) of staged rows.
template <class Scalar>
void store_rows(const Visit& visit, const View& view, Rows rows, int64_t begin, int64_t end,
                const AccOf<Scalar>* from, int64_t stride) {
  using Acc = AccOf<Scalar>;
  constexpr int64_t W = kLanes<Acc>;
  if (visit.plain && view.dim == 1 && (end - begin) % W == 0) {  // nothing to decide in the loop
    Scalar* to = row_at<Scalar>(view, visit, rows, 0, 0);
    for (int64_t i = 0; i < visit.count; ++i, to += visit.step * view.time, from += stride) {
      for (int64_t c = begin; c < end; c += W) store(to + c, load(from + c));
    }
    return;
  }
  unstage_rows<Scalar>(
      visit, view, rows, begin, end, [&](int64_t row, int64_t, int64_t, Scalar* to) {
        for_each_vector<Acc>(begin, end, [&](int64_t c, int64_t count) HFLA_INLINE_LAMBDA {
          store_vector(to, view.dim, c, count, load(from + row * stride + c));
        });
      });
}

// ---- the normaliser ----

// z = decay z + k, dots_i = q_iᵀ z, of the rows of a segment. It is one more column of the state,
// which would need a vector of its own in the scan.
template <class Acc>
void scan_normalizer(Role role, int64_t rows, const Acc* q, const Acc* k, int64_t stride,
                     const Acc* decay, int64_t K, Acc* z, Acc* terms, Acc* dots) {
  constexpr int64_t W = kLanes<Acc>;
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
