// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The delta rule, with a decay per head, per channel or none: for every head of the state, with
// a_t = e^{g_t},
//
//     S' = a_t ∘ S_{t-1}   e_t = v_t - S'ᵀ k_t   u_t = β_t e_t   S_t = S' + k_t u_tᵀ
//     y_t = scale S_tᵀ q_t
//
// Without `delta`, u_t = β_t v_t: linear attention with a write strength. With an erase key p_t the
// state is asked by it: e_t = v_t - S'ᵀ p_t. Or it is asked before it decays, and what it says is
// added along a direction b_t: e_t = S_{t-1}ᵀ p_t, S_t = S' + b_t e_tᵀ + k_t v_tᵀ. Letters as in
// common.h, but for the heads: every head of v has a state, Hv of them, and may share its key and
// its query with others: Hk and Hq divide Hv, and state h reads key head h / (Hv / Hk), query head
// h / (Hv / Hq).
#pragma once

#include "kernels/common.h"

namespace hfla {

struct DeltaRuleOptions {
  double scale;
  bool normalize_qk;  // q and k become x / sqrt(sum(x²) + kNormEps)
  bool delta;
};

constexpr double kNormEps = 1e-6;

// Of sequences on CUDA, where a block has all rows of a state in shared memory, and a warp all
// channels of a key in registers.
constexpr int64_t kMostKeyDimOnCuda = 256;

// How many heads of the state read one head of q, and of k.
struct DeltaRuleGroups {
  int64_t q_group, k_group;
};

// Everything that forward and backward read alike. A scan has one row for every token and head of
// the state, so that Hq and Hkv of Sequences are both Hv.
struct DeltaRuleProblem : Sequences, DeltaRuleOptions, DeltaRuleGroups {
  View q, k, v;            // (B, T, Hq, K), (B, T, Hk, K), (B, T, Hv, V) of dtype
  View beta;               // (B, T, Hv) acc, optional: ones
  View log_decay;          // (B, T, Hv) or (B, T, Hv, K) acc, optional
  bool decay_per_channel;  // log_decay has K numbers per head
  // (B, T, Hv, K) acc, optional: p with `delta`, b with p and without β.
  View erase_key, add_along;
  const void* initial_state;  // (rows, Hv, K, V) acc, contiguous, optional
};

struct DeltaRuleResult {
  View y;       // (B, T, Hv, V) of dtype
  View errors;  // (B, T, Hv, V) acc: e_t; without data where they are not needed, as without delta
  void* state;  // after the last token, contiguous, shaped as initial_state
};

// In the place of initial and final states: (slots, Hv, K, V) acc, updated in place; each slot
// contiguous.
struct DeltaRuleSlots : SequenceSlots {
  void* state;
  int64_t state_slot;  // stride between slots
};

// What backward is given: the gradients of forward's results, and what forward found.
struct DeltaRuleUpstream {
  View dy;             // (B, T, Hv, V) of dtype, optional
  const void* dstate;  // contiguous, shaped as initial_state, optional
  View errors;         // as forward gave them; without data where there is no delta
  const void* state;   // as forward gave it
};

struct DeltaRuleGradients {
  View dq, dk, dv;              // shaped as q, k, v, of dtype
  View dbeta;                   // (B, T, Hv) acc; without data when there is no beta
  View dlog_decay;              // shaped as log_decay, acc; without data when there is none
  View derase_key, dadd_along;  // shaped as these, acc; without data when there is none
  void* dinitial_state;         // null when there is no initial state
};

// One token for every batch row; the time stride of the views is unused.
struct DeltaRuleStep : HeadSizes, DeltaRuleOptions, DeltaRuleGroups {
  View q, k, v;    // (B, Hq, K), (B, Hk, K), (B, Hv, V)
  View beta;       // (B, Hv) acc, optional
  View log_decay;  // (B, Hv) or (B, Hv, K) acc, optional
  bool decay_per_channel;
  View erase_key, add_along;  // (B, Hv, K), as in DeltaRuleProblem
  const bool* key_mask;       // (B,) contiguous, optional
  Slots slots;
  void* state;         // (slots, Hv, K, V) acc, updated in place; each slot contiguous
  int64_t state_slot;  // stride between slots
  // On the CPU, optional: as state, where the states before the token are instead of in it.
  const void* before;
  View y;  // (B, Hv, V) of dtype
};

struct DeltaRuleOnCpu {
  Status (*forward)(const DeltaRuleProblem&, const DeltaRuleResult&, const Threads&);
  Status (*backward)(const DeltaRuleProblem&, const DeltaRuleUpstream&, const DeltaRuleGradients&,
                     const Threads&);
  Status (*step)(const DeltaRuleStep&, const Threads&);
  Status (*forward_in_slots)(const DeltaRuleProblem&, const DeltaRuleSlots&, const View& y,
                             const Threads&);
};

// For one dtype. Pointers are the device's. All calls are asynchronous, and return cudaSuccess or
// another cudaError_t.
struct DeltaRuleOnCuda {
  int (*load)();  // all kernels, onto the current device
  int (*forward)(const DeltaRuleProblem&, const DeltaRuleResult&, const CudaPlace&);
  int (*backward)(const DeltaRuleProblem&, const DeltaRuleUpstream&, const DeltaRuleGradients&,
                  const CudaPlace&);
  int (*step)(const DeltaRuleStep&, void* stream);
};

}  // namespace hfla
