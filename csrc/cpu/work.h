// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// How forward and backward are cut into tasks, and the memory that tasks work in.
//
// Sequences and key-value heads are independent, and tasks come from these first. Where that leaves
// threads idle, the value columns of a state are divided into `parts`, which need not talk to each
// other, although each stages the keys and queries. Where that still is not enough, time is divided
// into `pieces`, and the states at their ends are computed first. Where there is plenty, a task
// takes several heads, a segment of tokens of one after the other: they are neighbours in memory,
// as (B, T, H, D) has it. All of it depends on the shapes and the number of threads only, so
// results repeat to the bit.
#pragma once

#include <stdlib.h>

#include "cpu/scan.h"

namespace hfla::HFLA_ISA {
namespace {

// ---- memory ----

class Buffer {
 public:
  explicit Buffer(int64_t bytes)
      : data_(aligned_alloc(kCacheLine, static_cast<size_t>(round_up(max(bytes, 1), kCacheLine)))) {
  }
  ~Buffer() { free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  char* data() const { return static_cast<char*>(data_); }

 private:
  void* data_;
};

// Hands out consecutive, aligned arrays; starting from null it only measures.
class Carver {
 public:
  explicit Carver(char* base) : base_(base) {}
  template <class T>
  T* take(int64_t count) {
    T* array = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += round_up(count * static_cast<int64_t>(sizeof(T)), kCacheLine);
    return array;
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

// ---- division of work ----

// Consecutive tokens of one sequence.
struct Piece {
  int64_t sequence;    // the row of the states
  int64_t batch;       // the row of the tensors
  int64_t begin, end;  // time
  bool first, last;    // of its sequence
  int64_t length() const { return end - begin; }
};

struct Sequence {
  int64_t begin, end;
};

HFLA_INLINE Sequence sequence_at(const Problem& p, int64_t sequence) {
  if (!p.cu_seqlens) return {0, p.T};
  return {p.cu_seqlens[sequence], p.cu_seqlens[sequence + 1]};
}

struct Heads {
  int64_t begin, end;
  int64_t count() const { return end - begin; }
};

struct Plan {
  int64_t workers = 1;
  int64_t heads = 1;   // of a task
  int64_t parts = 1;   // of the columns
  int64_t pieces = 1;  // of each sequence

  int64_t num_pieces(const Problem& p) const { return p.num_sequences * pieces; }

  Piece piece(const Problem& p, int64_t index) const {
    const int64_t sequence = index / pieces, i = index % pieces;
    const Sequence s = sequence_at(p, sequence);
    const int64_t length = s.end - s.begin;
    return {sequence,
            p.cu_seqlens ? 0 : sequence,
            s.begin + length * i / pieces,
            s.begin + length * (i + 1) / pieces,
            i == 0,
            i == pieces - 1};
  }

  Columns part(int64_t index, int64_t vectors) const {
    return {vectors * index / parts, vectors * (index + 1) / parts};
  }

  int64_t num_tasks(const Problem& p) const { return num_pieces(p) * (p.Hkv / heads) * parts; }

  struct Task {
    int64_t piece, part;  // indices
    Heads heads;
  };
  Task task(const Problem& p, int64_t index) const {
    const int64_t group = index / parts % (p.Hkv / heads);
    return {index / parts / (p.Hkv / heads), index % parts, {group * heads, (group + 1) * heads}};
  }
};

constexpr int64_t kSerialWork = 65536;  // floats; with less, waking threads takes longer than that
constexpr int64_t kMinPiece = 128;      // tokens
constexpr int64_t kMaxHeads = 8;        // of a task
constexpr int64_t kMaxStateBytes = 256 * 1024;  // of a task's heads, which take turns in the cache

HFLA_INLINE Plan make_plan(const Problem& p, const Threads& threads, int64_t max_parts) {
  Plan plan;
  if (p.B * p.T * (p.Hq + p.Hkv) * (p.K + p.V) < kSerialWork) return plan;
  plan.workers = max(1, threads.count);
  int64_t longest = 0;
  for (int64_t s = 0; s < p.num_sequences; ++s) {
    longest = max(longest, sequence_at(p, s).end - sequence_at(p, s).begin);
  }
  // By how much the largest task exceeds a thread's fair share, rounded.
  const int64_t total = p.B * p.T * p.Hkv;
  const int64_t excess = (2 * longest * plan.workers + total) / (2 * total);
  plan.parts = max(1, min(excess, max_parts));
  plan.pieces = max(1, min(ceil_div(excess, plan.parts), longest / kMinPiece));
  // As many heads as leave every worker its share.
  const int64_t state_bytes = p.K * p.V * (p.dtype == DType::f64 ? 8 : 4);
  const int64_t tasks = p.num_sequences * p.Hkv;
  for (int64_t heads = 2; heads <= kMaxHeads && excess <= 1; heads *= 2) {
    const bool fair =
        ceil_div(tasks, heads * plan.workers) * heads <= ceil_div(tasks, plan.workers) &&
        heads * longest * plan.workers <= total;
    if (fair && p.Hkv % heads == 0 && heads * state_bytes <= kMaxStateBytes) plan.heads = heads;
  }
  return plan;
}

// How much of a sequence is staged at once: enough to spread the cost of a pass over the segment,
// and little enough that the rows stay in the first-level cache beside a block of the state.
constexpr int64_t kSegmentRows = 32;

struct SegmentShape {
  int64_t tokens;  // at most, in a segment
  int64_t rows;    // of its staged arrays

  explicit SegmentShape(const Problem& p) {
    const int64_t group = p.Hq / p.Hkv;
    tokens = max(1, kSegmentRows / group);
    rows = round_up(tokens * group, 16);
  }

  // Of rows of `columns` elements: not a power of two, which would put all rows into the same few
  // lines of the cache.
  template <class Acc>
  int64_t stride(int64_t columns) const {
    return round_up(columns, kLanes<Acc>) + kCacheLine / static_cast<int64_t>(sizeof(Acc));
  }
};

// Calls task(worker, i) for every i in [0, count). Workers take the next task when they are done
// with one; no result depends on which of them that is.
template <class Task>
void run_tasks(const Threads& threads, int64_t workers, int64_t count, Task task) {
  struct Context {
    Task& task;
    int64_t count, next;
  } context{task, count, 0};
  const auto body = [](void* opaque, int64_t begin, int64_t end) {
    Context& shared = *static_cast<Context*>(opaque);
    for (int64_t worker = begin; worker < end; ++worker) {
      int64_t i;
      while ((i = __atomic_fetch_add(&shared.next, 1, __ATOMIC_RELAXED)) < shared.count) {
        shared.task(worker, i);
      }
    }
  };
  workers = min(workers, count);
  if (workers <= 1) {
    body(&context, 0, 1);
  } else {
    threads.parallel_for(workers, body, &context);
  }
}

// Workers with memory of their own.
template <class Scratch>
class Workers {
 public:
  Workers(const Threads& threads, const Plan& plan, const Problem& p, const SegmentShape& shape)
      : threads_(threads),
        count_(plan.workers),
        problem_(p),
        plan_(plan),
        shape_(shape),
        bytes_each_(bytes_needed(p, plan, shape)),
        buffer_(count_ * bytes_each_) {}

  bool out_of_memory() const { return !buffer_.data(); }

  // Calls task(scratch, i) for every i in [0, count).
  template <class Task>
  void run(int64_t count, Task task) {
    run_tasks(threads_, count_, count, [&](int64_t worker, int64_t i) {
      Carver carver(buffer_.data() + worker * bytes_each_);
      Scratch scratch(carver, problem_, plan_, shape_);
      task(scratch, i);
    });
  }

 private:
  static int64_t bytes_needed(const Problem& p, const Plan& plan, const SegmentShape& shape) {
    Carver carver(nullptr);
    Scratch(carver, p, plan, shape);
    return carver.used();
  }

  const Threads& threads_;
  const int64_t count_;
  const Problem& problem_;
  const Plan& plan_;
  const SegmentShape& shape_;
  const int64_t bytes_each_;
  const Buffer buffer_;
};

// ---- states of pieces ----

// One head's state in the layout of the tensors: kv (K, V), z (K,) or null.
template <class Acc>
struct State {
  Acc *kv, *z;
};

// The state of a sequence's head in tensors that may be absent.
template <class Acc, class Pointer>
HFLA_INLINE State<Acc> state_of(const Problem& p, Pointer kv, Pointer z, int64_t sequence,
                                int64_t head) {
  const int64_t row = sequence * p.Hkv + head;
  return {kv ? static_cast<Acc*>(kv) + row * p.K * p.V : nullptr,
          z ? static_cast<Acc*>(z) + row * p.K : nullptr};
}

// Where time is divided: for every piece and head the state that its own tokens add up to, and the
// product of its decays; after `combine`, the state that comes into the piece.
template <class Acc>
struct PieceStates {
  Acc* states;  // (num_pieces, Hkv, K V + K)
  Acc* decays;  // (num_pieces, Hkv)

  PieceStates(Carver& carver, const Problem& p, const Plan& plan) {
    const int64_t count = plan.pieces > 1 ? plan.num_pieces(p) * p.Hkv : 0;
    states = carver.take<Acc>(count * (p.K * p.V + p.K));
    decays = carver.take<Acc>(count);
  }

  static int64_t bytes_needed(const Problem& p, const Plan& plan) {
    Carver carver(nullptr);
    PieceStates(carver, p, plan);
    return carver.used();
  }

  State<Acc> at(const Problem& p, int64_t piece, int64_t head) const {
    Acc* kv = states + (piece * p.Hkv + head) * (p.K * p.V + p.K);
    return {kv, kv + p.K * p.V};
  }

  Acc& decay(const Problem& p, int64_t piece, int64_t head) const {
    return decays[piece * p.Hkv + head];
  }

  // For one head of one sequence, whose pieces are visited from `piece` on in steps of `step`.
  void combine(const Problem& p, int64_t piece, int64_t step, int64_t pieces, int64_t head,
               State<const Acc> initial) const {
    for (int64_t e = 0; e < p.K * p.V + p.K; ++e) {
      const bool in_kv = e < p.K * p.V;
      const Acc* from = in_kv ? initial.kv : initial.z;
      Acc carry = from ? from[in_kv ? e : e - p.K * p.V] : 0;
      for (int64_t i = 0; i < pieces; ++i) {
        Acc& slot = at(p, piece + i * step, head).kv[e];
        const Acc added = slot;
        slot = carry;
        carry = decay(p, piece + i * step, head) * carry + added;
      }
      if (p.is_causal) continue;
      for (int64_t i = 0; i < pieces; ++i) at(p, piece + i * step, head).kv[e] = carry;
    }
  }
};

}  // namespace
}  // namespace hfla::HFLA_ISA
