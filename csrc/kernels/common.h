// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The seam between the torch bindings, which check arguments and allocate results, and the kernels,
// which compute: here what all ops share, and beside it one header per op. Plain structs and
// pointers: no torch, no standard library, so that a kernel file can be compiled once per
// instruction set without exporting an inline function of either.
//
// Shapes: B batch, T time, Hq query heads, Hkv key-value heads, K key dim, V value dim, N packed
// sequences. Strides count elements, not bytes. "acc" is float, or double for f64 inputs.
#pragma once

#include <stddef.h>

#include <cstdint>

namespace hfla {

enum class DType : int32_t { f32, bf16, f16, f64 };

// static, so that the kernels of every instruction set have their own.
static constexpr int64_t bytes_of(DType dtype) {
  return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2;
}

// A tensor (B, T, H, D) read or written through its strides; what has one number per head, as a
// decay, has no D.
struct View {
  void* data = nullptr;  // null: the argument is absent
  int64_t batch = 0, time = 0, head = 0, dim = 0;
};

// The sizes of queries, keys and values, which share a dtype.
struct HeadSizes {
  int64_t B, Hq, Hkv, K, V;
  DType dtype;
};

// What any op over whole sequences is told of them, whatever its recurrence.
struct Sequences : HeadSizes {
  int64_t T;
  int64_t num_sequences;  // rows of a state: N with cu_seqlens, else B
  const int32_t*
      cu_seqlens;  // (N + 1,) checked by the caller, B == 1; null: each batch row is one sequence
  const bool* key_mask;  // (B, T) contiguous, optional
};

// Where the states of a step's batch rows are in a buffer of states.
struct Slots {
  int64_t count;                 // states in the buffer
  const int32_t* state_indices;  // (B,) the one of each row, all different, -1: it has none; null:
                                 // row b has state b
};

// Where the states of sequences are in a buffer of states that an op changes in place.
struct SequenceSlots {
  const int32_t* state_indices;  // (num_sequences,) as those of Slots; a sequence without a slot is
                                 // not computed
  const bool* is_new;  // (num_sequences,) true: it begins from zero, whatever its slot holds; null:
                       // none does
};

static inline int64_t slot_of(const SequenceSlots& slots, int64_t sequence) {
  return slots.state_indices[sequence];
}

// What a sequence goes on from; -1: from zero.
static inline int64_t slot_before(const SequenceSlots& slots, int64_t sequence) {
  return slots.is_new && slots.is_new[sequence] ? -1 : slot_of(slots, sequence);
}

// What a kernel found while it read; the bindings turn it into an error with the op's name.
enum class Status : int32_t { ok, positive_log_decay, growing_state, out_of_memory };

// The caller's threads. body(context, begin, end) runs over disjoint ranges that cover [0, n).
struct Threads {
  int64_t count;
  void (*parallel_for)(int64_t n, void (*body)(void* context, int64_t begin, int64_t end),
                       void* context);
  bool subnormals_become_zero = false;  // what a body computes
  int64_t serial_work = 65536;          // floats; with less, to call threads takes longer than that
};

// What CUDA kernels are chosen by.
struct CudaDevice {
  int64_t multiprocessors;
  int64_t shared_bytes;      // that a block may have
  int64_t piece_length = 0;  // tokens, at least, that a block walks through; 0: chosen
};

// Where a CUDA kernel works. With no workspace, nothing is launched, and *workspace_bytes says how
// much is needed.
struct CudaPlace {
  CudaDevice device;
  void* workspace;
  int64_t* workspace_bytes;
  void* stream;  // a cudaStream_t
};

}  // namespace hfla
