// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// How work on sequences is cut into tasks, and the memory that tasks work in.
//
// Sequences and key-value heads are independent, and tasks come from these first. Where that leaves
// threads idle, the value columns of a state are divided into `parts`, which need not talk to each
// other, although each stages the keys and queries. Where that still is not enough, time is divided
// into `pieces`, and the states at their ends are computed first. Where there is plenty, a task
// takes several heads, a segment of tokens of one after the other: they are neighbours in memory,
// as (B, T, H, D) has it. All of it depends on the shapes and the number of threads only, so
// results repeat to the bit.
#pragma once

#include "cpu/common/memory.h"
#include "cpu/common/tasks.h"
#include "cpu/common/vec.h"

namespace hfla::HFLA_ISA {
namespace {

// Consecutive tokens of one sequence.
struct Piece {
  int64_t sequence;    // the row of the states
  int64_t batch;       // the row of the tensors
  int64_t begin, end;  // time
  bool first, last;    // of its sequence
  int64_t length() const { return end - begin; }
};

// Piece i of `pieces` of a sequence.
HFLA_INLINE Piece piece_of(const Sequences& p, int64_t sequence, int64_t i, int64_t pieces) {
  const int64_t begin = p.cu_seqlens ? p.cu_seqlens[sequence] : 0;
  const int64_t length = (p.cu_seqlens ? p.cu_seqlens[sequence + 1] : p.T) - begin;
  return {sequence,
          p.cu_seqlens ? 0 : sequence,
          begin + length * i / pieces,
          begin + length * (i + 1) / pieces,
          i == 0,
          i == pieces - 1};
}

HFLA_INLINE Piece whole_sequence(const Sequences& p, int64_t sequence) {
  return piece_of(p, sequence, 0, 1);
}

struct Heads {
  int64_t begin, end;
  int64_t count() const { return end - begin; }
};

// A range of columns, counted in vectors.
struct Columns {
  int64_t begin, end;
  int64_t count() const { return end - begin; }
};

// How much of a sequence is staged at once: enough to spread the cost of a pass over the segment,
// and little enough that the rows stay in the first-level cache beside a block of the state.
constexpr int64_t kSegmentRows = 32;
constexpr int64_t kRowMultiple = 4;  // the number of staged rows is padded to this

struct SegmentShape {
  int64_t tokens;  // at most, in a segment
  int64_t rows;    // of its staged arrays

  explicit SegmentShape(const Sequences& p) {
    const int64_t group = p.Hq / p.Hkv;
    tokens = max(1, kSegmentRows / group);
    rows = round_up(tokens * group, 16);
  }
};

// Of staged rows of `columns` elements: not a power of two, which would put all rows into the same
// few lines of the cache.
template <class Acc>
HFLA_INLINE int64_t row_stride(int64_t columns) {
  return round_up(columns, kLanes<Acc>) + kCacheLine / static_cast<int64_t>(sizeof(Acc));
}

struct Plan {
  const Sequences& sequences;
  SegmentShape segment;
  int64_t workers = 1;
  int64_t heads = 1;    // of a task
  int64_t parts = 1;    // of the columns
  int64_t pieces = 1;   // of each sequence
  int64_t longest = 0;  // sequence, in tokens

  explicit Plan(const Sequences& p) : sequences(p), segment(p) {}

  int64_t num_pieces() const { return sequences.num_sequences * pieces; }
  int64_t num_tasks() const { return num_pieces() * (sequences.Hkv / heads) * parts; }

  Piece piece(int64_t index) const {
    return piece_of(sequences, index / pieces, index % pieces, pieces);
  }

  Columns part(int64_t index, int64_t vectors) const {
    return {vectors * index / parts, vectors * (index + 1) / parts};
  }

  struct Task {
    int64_t piece, part;  // indices
    Heads heads;
  };
  Task task(int64_t index) const {
    const int64_t groups = sequences.Hkv / heads, group = index / parts % groups;
    return {index / parts / groups, index % parts, {group * heads, (group + 1) * heads}};
  }
};

constexpr int64_t kMinPiece = 128;              // tokens
constexpr int64_t kMaxHeads = 8;                // of a task
constexpr int64_t kMaxStateBytes = 256 * 1024;  // of a task's heads, which take turns in the cache

// From so many tokens on a state is kept in levels, where a kernel can (linear_attention/
// long_scan.h): with fewer, its drift is less than 1e-4 at worst.
constexpr int64_t kLongSequence = 8192;

// divides_time: pieces of a sequence may be scanned at once, because the states at their ends can
// be had from what each adds. levels: how many floats a number of a long sequence's state takes.
HFLA_INLINE Plan make_plan(const Sequences& p, const Threads& threads, int64_t max_parts,
                           bool divides_time = true, int64_t levels = 1) {
  Plan plan(p);
  for (int64_t s = 0; s < p.num_sequences; ++s)
    plan.longest = max(plan.longest, whole_sequence(p, s).length());
  if (p.B * p.T * (p.Hq + p.Hkv) * (p.K + p.V) < threads.serial_work) return plan;
  plan.workers = max(1, threads.count);
  const int64_t longest = plan.longest;
  // By how much the largest task exceeds a thread's fair share, rounded.
  const int64_t total = p.B * p.T * p.Hkv;
  const int64_t excess = (2 * longest * plan.workers + total) / (2 * total);
  plan.parts = max(1, min(excess, max_parts));
  if (divides_time) plan.pieces = max(1, min(ceil_div(excess, plan.parts), longest / kMinPiece));
  // As many heads as leave every worker its share.
  const int64_t state_bytes =
      p.K * p.V * (p.dtype == DType::f64 ? 8 : 4) * (longest > kLongSequence ? levels : 1);
  const int64_t tasks = p.num_sequences * p.Hkv;
  for (int64_t heads = 2; heads <= kMaxHeads && excess <= 1; heads *= 2) {
    const bool fair =
        ceil_div(tasks, heads * plan.workers) * heads <= ceil_div(tasks, plan.workers) &&
        heads * longest * plan.workers <= total;
    if (fair && p.Hkv % heads == 0 && heads * state_bytes <= kMaxStateBytes) plan.heads = heads;
  }
  return plan;
}

// Workers with memory of their own: a Scratch(carver, plan).
template <class Scratch, class ItsPlan = Plan>
class Workers {
 public:
  Workers(const Threads& threads, const ItsPlan& plan)
      : threads_(threads),
        plan_(plan),
        bytes_each_(bytes_needed<Scratch>(plan)),
        buffer_(plan.workers * bytes_each_) {}

  bool out_of_memory() const { return !buffer_.data(); }

  // Calls task(scratch, i) for every i in [0, count).
  template <class Task>
  void run(int64_t count, Task task) {
    run_tasks(threads_, plan_.workers, count, [&](int64_t worker, int64_t i) {
      Carver carver(buffer_.data() + worker * bytes_each_);
      Scratch scratch(carver, plan_);
      task(scratch, i);
    });
  }

 private:
  const Threads threads_;
  const ItsPlan& plan_;
  const int64_t bytes_each_;
  const Buffer buffer_;
};

}  // namespace
}  // namespace hfla::HFLA_ISA
