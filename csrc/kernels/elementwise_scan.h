// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The elementwise scan of HGRN and of RecurrentGemma's RG-LRU: a sum for each channel, which decays
// as each token says,
//
//     h_t = exp(log_decay_t) h_{t-1} + x_t    y_t = h_t
//
// and the RG-LRU itself, which makes both of two gates and a rate for each channel, at most 0:
//
//     log_decay_t = rate sigmoid(recurrent_gate_t)
//     x_t = sqrt(1 - exp(2 log_decay_t)) sigmoid(input_gate_t) (its own x)_t
//
// and the latter without the root at a token that begins a sequence, before which is nothing. The
// derivative of the root of z is at most kMaxRootGradient, as without a bound there is none at 0.
//
// Letters as in common.h, and C channels; of the RG-LRU in heads of P, as gates have them.
#pragma once

#include "kernels/common.h"

namespace hfla {

// A View here is of (B, T, C): its `dim` is the stride of channels. dtype is that of x and y; log
// decays and states are acc.
struct ElementwiseScanSizes {
  int64_t B, C;
  DType dtype;
};

struct ChannelSumsProblem : ElementwiseScanSizes {
  int64_t T;
  int64_t num_sequences;      // rows of a state: as many as cu_seqlens bounds, else B
  const int32_t* cu_seqlens;  // as in Sequences
  const bool* key_mask;       // (B, T) contiguous, optional
  View x;
  const void* initial_state;  // (rows, C) contiguous, optional: zeros
};

struct ElementwiseScanProblem : ChannelSumsProblem {
  View log_decay;
};

static constexpr double kMaxRootGradient = 1000;

struct RgLruProblem : ChannelSumsProblem {
  int64_t P;
  View input_gate, recurrent_gate;  // (B, T, C / P, P), of x's dtype
  const void* rate;                 // (C,) contiguous, acc
  const bool* begins;               // (B, T) contiguous, optional
};

struct ElementwiseScanResult {
  void* y;      // (B, T, C) contiguous
  void* state;  // after the last token, as initial_state
};

// The gradients of forward's results.
struct ElementwiseScanUpstream {
  View dy;             // (B, T, C), optional
  const void* dstate;  // contiguous, optional
  const void* y;       // forward's, where there is no padding, it was not rounded, and it was kept
};

// All contiguous, of the shapes and dtypes of what they are gradients of.
struct ElementwiseScanGradients {
  void *dx, *dlog_decay;
  void* dinitial_state;  // null when there is no initial state
};
struct RgLruGradients {
  void *dx, *dinput_gate, *drecurrent_gate;
  void* drate;           // (rows, C): the share of each sequence
  void* dinitial_state;  // as above
};

// One token for every batch row.
struct ElementwiseScanStep : ElementwiseScanSizes {
  View x, log_decay;     // (B, C)
  const bool* key_mask;  // (B,) contiguous, optional
  Slots slots;
  View state;  // (slots, C), any strides, updated in place
  void* y;     // (B, C) contiguous
};

struct ElementwiseScanOnCpu {
  Status (*forward)(const ElementwiseScanProblem&, const ElementwiseScanResult&, const Threads&);
  Status (*backward)(const ElementwiseScanProblem&, const ElementwiseScanUpstream&,
                     const ElementwiseScanGradients&, const Threads&);
  Status (*step)(const ElementwiseScanStep&, const Threads&);
};

struct RgLruOnCpu {
  Status (*forward)(const RgLruProblem&, const ElementwiseScanResult&, const Threads&);
  Status (*backward)(const RgLruProblem&, const ElementwiseScanUpstream&, const RgLruGradients&,
                     const Threads&);
};

}  // namespace hfla
