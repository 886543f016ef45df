// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Linear attention with a decay per head: y_t = φ(q_t)ᵀ S_t / (φ(q_t)ᵀ z_t + eps), where
// S_t = e^{g_t} S_{t-1} + φ(k_t) v_tᵀ and z_t = e^{g_t} z_{t-1} + φ(k_t). Letters as in common.h.
#pragma once

#include "kernels/common.h"

namespace hfla {

enum class FeatureMap : int64_t { identity, elu_plus_one, relu, relu2, silu, exp, count };

// As users call them, in the enumeration's order. Python has them from here.
constexpr const char* kFeatureMapNames[] = {"identity", "elu+1", "relu", "relu2", "silu", "exp"};
static_assert(sizeof(kFeatureMapNames) / sizeof(*kFeatureMapNames) ==
              static_cast<int64_t>(FeatureMap::count));

struct LinearAttentionOptions {
  FeatureMap feature_map;
  double eps;
  bool normalize;
};

// Everything that forward and backward read alike.
struct LinearAttentionProblem : Sequences, LinearAttentionOptions {
  bool is_causal;
  View q, k, v;                        // (B, T, Hq, K), (B, T, Hkv, K), (B, T, Hkv, V) of dtype
  View log_decay;                      // (B, T, Hkv) acc, optional, never without is_causal
  const void *initial_kv, *initial_z;  // (rows, Hkv, K, V), (rows, Hkv, K) contiguous, optional
};

struct LinearAttentionResult {
  View y;        // (B, T, Hq, V) of dtype
  void* den;     // (B, T, Hq) acc, contiguous; null when not normalised, or not wanted
  void *kv, *z;  // final state, contiguous, shaped as initial_kv and initial_z; z null when not
                 // normalised
  // On CUDA, for backward: the states that come into pieces of sequences, (pieces, Hkv, K, V), and
  // then, normalised, (pieces, Hkv, K), acc. There is room for so many.
  void* piece_states;
  int64_t piece_room;
};

// The states that forward keeps for backward on CUDA: for as many pieces of sequences as GPUs of
// today have places for, each of 256 tokens at least. It depends on shapes alone, as sizes of
// results do. Where there are more pieces, none is kept, and backward sums up again.
inline int64_t room_for_pieces(const LinearAttentionProblem& p) {
  constexpr int64_t kPlaces = 320, kColumns = 64, kTokens = 256;
  const int64_t blocks = p.B * p.Hq * ((p.V + kColumns - 1) / kColumns);  // without pieces
  const int64_t places = kPlaces / (blocks > 1 ? blocks : 1), most = p.T / kTokens;
  const int64_t each = places < most ? places : most;  // of a row
  if (!p.is_causal || each < 2) return 0;
  if (!p.cu_seqlens) return p.B * each;
  return each + (p.num_sequences < each ? p.num_sequences : each);
}
// Of a piece in piece_states.
inline int64_t piece_numbers(const LinearAttentionProblem& p) {
  return p.Hkv * (p.K * p.V + (p.normalize ? p.K : 0));
}

// In the place of initial and final states: (slots, Hkv, K, V), (slots, Hkv, K) acc, updated in
// place; each slot contiguous; z null when not normalised.
struct LinearAttentionSlots : SequenceSlots {
  void *kv, *z;
  int64_t kv_slot, z_slot;  // strides between slots
};

// What backward is given: the gradients of forward's results, and these.
struct LinearAttentionUpstream {
  View dy;               // (B, T, Hq, V) of dtype, optional
  const void *dkv, *dz;  // gradients of the final state, contiguous, optional
  LinearAttentionResult forward;
};

struct LinearAttentionGradients {
  View dq, dk, dv;                 // shaped as q, k, v, of dtype
  View dlog_decay;                 // (B, T, Hkv) acc; null when there is no log_decay
  void *dinitial_kv, *dinitial_z;  // null when there is no initial state
};

// One token for every batch row; the time stride of the views is unused.
struct LinearAttentionStep : HeadSizes, LinearAttentionOptions {
  View q, k, v;          // (B, Hq, K), (B, Hkv, K), (B, Hkv, V)
  View log_decay;        // (B, Hkv) acc, optional
  const bool* key_mask;  // (B,) contiguous, optional
  Slots slots;
  void *kv, *z;  // (slots, Hkv, K, V), (slots, Hkv, K) acc, updated in place; each slot contiguous;
                 // z null when not normalised
  int64_t kv_slot, z_slot;  // strides between slots
  // On the CPU, optional: as kv and z, where the states before the token are instead of in these.
  const void *before, *z_before;
  void* den;  // on the CPU, optional: (B, Hq) acc, contiguous
  View y;     // (B, Hq, V) of dtype
};

struct LinearAttentionOnCpu {
  Status (*forward)(const LinearAttentionProblem&, const LinearAttentionResult&, const Threads&);
  Status (*backward)(const LinearAttentionProblem&, const LinearAttentionUpstream&,
                     const LinearAttentionGradients&, const Threads&);
  Status (*step)(const LinearAttentionStep&, const Threads&);
  // Causal; y as in LinearAttentionResult.
  Status (*forward_in_slots)(const LinearAttentionProblem&, const LinearAttentionSlots&,
                             const View& y, const Threads&);
};

// For one dtype. Pointers are the device's. All calls are asynchronous, and return cudaSuccess or
// another cudaError_t.
struct LinearAttentionOnCuda {
  int (*load)();  // all kernels, onto the current device
  int (*forward)(const LinearAttentionProblem&, const LinearAttentionResult&, const CudaPlace&);
  int (*backward)(const LinearAttentionProblem&, const LinearAttentionUpstream&,
                  const LinearAttentionGradients&, const CudaPlace&);
  int (*step)(const LinearAttentionStep&, void* stream);
};

}  // namespace hfla
