// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// A causal convolution over the last few real tokens, channel by channel: with k taps,
//
//     u_t = bias + Σ_j weight_j x_{t-k+1+j}   y_t = u_t, or u_t / (1 + e^{-u_t}) with `silu`
//
// Padding is no token of a sequence. A state holds the last S >= k - 1 of them, the newest last.
// Letters as in common.h, and C channels.
#pragma once

#include "kernels/common.h"

namespace hfla {

// A weight (C, k), or a bias (C,), of a dtype of its own.
struct ConvolutionWeights {
  const void* data = nullptr;  // null: there is none
  DType dtype = DType::f32;
  int64_t channel = 0, tap = 0;  // strides
};

struct ConvolutionSizes {
  int64_t B, C, kernel_size, S;
  DType dtype;  // of x, y and states
  bool silu;
};

// A View here is of (B, T, C), or of (B, S, C): its `dim` is the stride of channels.
struct ConvolutionProblem : ConvolutionSizes {
  int64_t T;
  int64_t num_sequences;      // rows of a state: N with cu_seqlens, else B
  const int32_t* cu_seqlens;  // as in Sequences
  const bool* key_mask;       // (B, T) contiguous, optional
  View x;
  ConvolutionWeights weight, bias;
  const void* initial_state;  // (rows, S, C) contiguous, optional: zeros
};

struct ConvolutionResult {
  void* y;      // (B, T, C) contiguous
  void* state;  // after the last token, as initial_state
};

// The gradients of forward's results.
struct ConvolutionUpstream {
  View dy;             // (B, T, C), optional
  const void* dstate;  // contiguous, optional
};

// All contiguous.
struct ConvolutionGradients {
  void* dx;              // (B, T, C)
  void* dweight;         // (C, k) of weight's dtype
  void* dbias;           // (C,) of bias's dtype; null when there is none
  void* dinitial_state;  // null when there is no initial state
};

// One token for every batch row.
struct ConvolutionStep : ConvolutionSizes {
  View x;  // (B, C)
  ConvolutionWeights weight, bias;
  const bool* key_mask;  // (B,) contiguous, optional
  Slots slots;
  View state;  // (slots, S, C), any strides, updated in place
  void* y;     // (B, C) contiguous
};

struct ConvolutionOnCpu {
  Status (*forward)(const ConvolutionProblem&, const ConvolutionResult&, const Threads&);
  Status (*backward)(const ConvolutionProblem&, const ConvolutionUpstream&,
                     const ConvolutionGradients&, const Threads&);
  Status (*step)(const ConvolutionStep&, const Threads&);
};

}  // namespace hfla
