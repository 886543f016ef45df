// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Through a piece of a sequence, a segment of tokens at a time.
//
// Grouped heads: a token has one row per query head of the group. Its k, v and decay take effect in
// one of these rows, its `slot`, and in the others nothing is written and nothing forgotten. So a
// group is a longer sequence, and the state is never repeated.
#pragma once

#include "cpu/sequences/plan.h"

namespace hfla::HFLA_ISA {
namespace {

// The tokens of a segment, in the order in which a scan visits them.
struct Segment {
  const Sequences& sequences;
  int64_t batch, head;         // head: of k and v
  int64_t first, step, count;  // times first, first + step, ...
  int64_t group, slot;
  bool plain;  // no token is masked or has several rows

  int64_t time(int64_t i) const { return first + step * i; }
  // The key mask from the first of these tokens on; null: none is masked.
  const bool* keep() const {
    return sequences.key_mask ? sequences.key_mask + batch * sequences.T + first : nullptr;
  }
  bool masked(int64_t i) const { return keep() && !keep()[step * i]; }
  int64_t rows() const { return count * group; }
  int64_t padded_rows() const { return round_up(rows(), kRowMultiple); }
};

// The segment of `piece` that starts `offset` tokens after its beginning, or before its end; empty
// beyond the last.
HFLA_INLINE Segment segment_at(const Sequences& p, const Piece& piece, int64_t head, bool reversed,
                               int64_t offset, int64_t length) {
  const int64_t group = p.Hq / p.Hkv;
  Segment segment{p, piece.batch, head, reversed ? piece.end - 1 - offset : piece.begin + offset,
                  reversed ? -1 : 1, max(0, min(length, piece.length() - offset)), group,
                  // A query sees its own token, and its gradient has to reach it before the token
                  // is left.
                  reversed ? group - 1 : 0, group == 1};
  for (int64_t i = 0; p.key_mask && i < segment.count; ++i) segment.plain &= !segment.masked(i);
  return segment;
}

// Calls body(segment, the one after it) for all segments of `piece` and all heads, which take
// turns. The segments are the same ones in both directions.
template <class Body>
HFLA_INLINE void traverse(const Plan& plan, const Piece& piece, Heads heads, bool reversed,
                          Body body) {
  const int64_t length = plan.segment.tokens, segments = ceil_div(piece.length(), length);
  const int64_t missing = reversed ? segments * length - piece.length() : 0;  // in the first one
  const auto at = [&](int64_t turn) {
    const int64_t offset = turn / heads.count() * length - missing;
    return segment_at(plan.sequences, piece, heads.begin + turn % heads.count(), reversed,
                      max(0, offset), offset < 0 ? length - missing : length);
  };
  const int64_t turns = segments * heads.count();
  for (int64_t turn = 0; turn < turns; ++turn) body(at(turn), at(turn + 1));
}

// Whether a tensor has a row per query head, or one per token and key-value head.
enum class RowsPer { query_head, token };

// The columns [begin, end) of a tensor's rows.
struct TensorRows {
  const View& view;
  RowsPer per;
  int64_t begin, end;
};

// In elements, from the beginning of the tensor.
HFLA_INLINE int64_t row_offset(const View& view, RowsPer per, const Segment& segment, int64_t i,
                               int64_t g) {
  const int64_t head = per == RowsPer::query_head ? segment.head * segment.group + g : segment.head;
  return segment.batch * view.batch + segment.time(i) * view.time + head * view.head;
}
template <class Scalar>
HFLA_INLINE Scalar* row_at(const View& view, RowsPer per, const Segment& segment, int64_t i,
                           int64_t g) {
  return static_cast<Scalar*>(view.data) + row_offset(view, per, segment, i, g);
}
template <class Scalar>
HFLA_INLINE Scalar* row_at(const TensorRows& rows, const Segment& segment, int64_t i, int64_t g) {
  return row_at<Scalar>(rows.view, rows.per, segment, i, g);
}

// Calls present(row, token, g, pointer into the view) for rows that the tensor has and that are not
// masked, absent(row) for all others up to the padding. g: which of the token's rows it is.
template <class Scalar, class Present, class Absent>
HFLA_INLINE void for_each_row(const Segment& segment, const View& view, RowsPer per,
                              Present present, Absent absent) {
  const int64_t count = view.data ? segment.count : 0, group = segment.group;
  const int64_t begin = per == RowsPer::query_head ? 0 : segment.slot;
  const int64_t end = per == RowsPer::query_head ? group : segment.slot + 1;
  const int64_t head_stride = per == RowsPer::query_head ? view.head : 0;
  const int64_t token_stride = segment.step * view.time;
  const bool* const keep = segment.plain ? nullptr : segment.keep();
  Scalar* const first = count ? row_at<Scalar>(view, per, segment, 0, 0) : nullptr;
  for (int64_t i = 0; i < count; ++i) {
    const bool masked = keep && !keep[segment.step * i];
    for (int64_t g = 0; g < group; ++g) {
      if (!masked && g >= begin && g < end) {
        present(i * group + g, i, g, first + i * token_stride + g * head_stride);
      } else {
        absent(i * group + g);
      }
    }
  }
  for (int64_t row = count * group; row < segment.padded_rows(); ++row) absent(row);
}

// Calls body(row, token, g) for the rows of a tensor that are not masked.
template <class Body>
HFLA_INLINE void for_each_present_row(const Segment& segment, RowsPer per, Body body) {
  const int64_t begin = per == RowsPer::query_head ? 0 : segment.slot;
  const int64_t end = per == RowsPer::query_head ? segment.group : segment.slot + 1;
  for (int64_t i = 0; i < segment.count; ++i) {
    if (!segment.plain && segment.masked(i)) continue;
    for (int64_t g = begin; g < end; ++g) body(i * segment.group + g, i, g);
  }
}

// Memory that will be read or written soon: addresses of pairs of cache lines. A scan asks for one
// of them with every row of the state, at a steady pace, which hides the latency behind its
// arithmetic: with heads inside of time, as in (B, T, H, D), rows are too far apart for the
// processor to foresee, and what is asked for all at once is not fetched any faster, or not at all.
struct Prefetch {
  const char* const* pairs;
  int64_t count;
};
constexpr int64_t kPairBytes = 2 * kCacheLine;

// What a scan asks memory for: rows that the next segment will read or write.
class Upcoming {
 public:
  // How many addresses rows of `columns` elements have; `pairs` has room for these.
  template <class Scalar>
  static int64_t pairs_per_row(int64_t columns) {
    return pairs_per_row(columns, sizeof(Scalar));
  }

  Upcoming(const Segment& next, const char** pairs) : next_(next), pairs_(pairs) {}

  // Of elements of so many bytes.
  void add(int64_t bytes, const TensorRows& rows) { add(bytes, next_, rows); }

  // Of another head than the next segment's.
  void add(int64_t bytes, const Segment& next, const TensorRows& rows) {
    const View& view = rows.view;
    if (!view.data || view.dim != 1 || next.count == 0) return;
    const int64_t heads = rows.per == RowsPer::query_head ? next.group : 1;
    const int64_t stride = next.step * view.time * bytes;
    for (int64_t g = 0; g < heads; ++g) {
      const char* from = static_cast<const char*>(view.data) +
                         bytes * (row_offset(view, rows.per, next, 0, g) + rows.begin);
      for (int64_t pair = 0; pair < pairs_per_row(rows.end - rows.begin, bytes); ++pair) {
        const char** const to = pairs_ + count_;
        for (int64_t i = 0; i < next.count; ++i) to[i] = from + i * stride;
        count_ += next.count;
        from += kPairBytes;
      }
    }
  }

  Prefetch get() const { return {pairs_, count_}; }

 private:
  static int64_t pairs_per_row(int64_t columns, int64_t bytes) {
    return ceil_div(columns * bytes, kPairBytes);
  }

  const Segment& next_;
  const char** const pairs_;
  int64_t count_ = 0;
};

}  // namespace
}  // namespace hfla::HFLA_ISA
