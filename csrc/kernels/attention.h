// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Softmax attention of a few queries to many keys, as when a token is generated:
//
//     y = Σ_s p_s v_s / Σ_s p_s,   p_s = exp(scale ⟨q, k_s⟩ + mask_s)
//
// R queries of each head, S keys; Hkv divides Hq, and heads share as in common.h.
#pragma once

#include "kernels/common.h"

namespace hfla {

enum class MaskType : int32_t { none, kept, added };  // bool, true where a key is seen; or of dtype

struct AttentionProblem : HeadSizes {
  int64_t R, S;
  double scale;
  View q, k, v;  // (B, R, Hq, K), (B, S, Hkv, K), (B, S, Hkv, V) of dtype
  MaskType mask_type;
  View mask;  // (B, R, Hq, S); strides may be 0
  void* y;    // (B, R, Hq, V), contiguous; 0 where nothing is seen
};

// A token of softmax attention to the last tokens, a ring, and to the first ones ("sinks") that are
// no more among these: it takes the oldest one's place.
struct WindowRow {
  int64_t slot;    // of its state; -1: nothing is read or written, and all of its output is 0
  int64_t oldest;  // of the ring
  int64_t count;   // tokens before, window + num_sinks for more
};

struct WindowProblem : HeadSizes {
  int64_t window, num_sinks;
  int64_t F;  // features that go with a key, for whoever reads tokens when they have left
  double scale;
  View q, kvf;                      // (B, 1, Hq, K), (B, 1, Hkv, K + V + F) of dtype, kvf.dim 1
  const WindowRow* rows;            // (B,)
  void* tokens;                     // (slots, window, Hkv, K + V + F) of dtype, and as `sinks`
  void* sinks;                      // (slots, num_sinks, Hkv, K + V), contiguous but for slots
  int64_t tokens_slot, sinks_slot;  // numbers from one to the next
  void* out;                        // (B, out_size), acc
  void* total;                      // (B, Hq), acc: denominators, relative to the largest scores
};

// Of a row: y (Hq, V), the largest scores (Hq,), and of the token that leaves the ring values and a
// 1 (Hkv, V + 1), and features (Hkv, F), 0 where none leaves, or a first one, which stays. Kernels
// leave logarithms to the caller.
static inline int64_t out_size(const WindowProblem& p) {
  return (p.Hq + p.Hkv) * (p.V + 1) + p.Hkv * p.F;
}

using WindowOnCpu = Status (*)(const WindowProblem&, const Threads&);
using AttentionOnCpu = Status (*)(const AttentionProblem&, const Threads&);

}  // namespace hfla
