// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The elementwise scan of HGRN and of RecurrentGemma's RG-LRU: a sum for each channel, which decays
// as each token says,
//
//     h_t = exp(log_decay_t) h_{t-1} + x_t    y_t = h_t
//
// Letters as in common.h, and C channels.
#pragma once

#include "kernels/common.h"

namespace hfla {

// A View here is of (B, T, C): its `dim` is the stride of channels. dtype is that of x and y; log
// decays and states are acc.
struct ElementwiseScanSizes {
  int64_t B, C;
  DType dtype;
};

struct ElementwiseScanProblem : ElementwiseScanSizes {
  int64_t T;
  int64_t num_sequences;      // rows of a state: as many as cu_seqlens bounds, else B
  const int32_t* cu_seqlens;  // as in Sequences
  const bool* key_mask;       // (B, T) contiguous, optional
  View x, log_decay;
  const void* initial_state;  // (rows, C) contiguous, optional: zeros
};

struct ElementwiseScanResult {
  void* y;      // (B, T, C) contiguous
  void* state;  // after the last token, as initial_state
};

// The gradients of forward's results.
struct ElementwiseScanUpstream {
  View dy;             // (B, T, C), optional
  const void* dstate;  // contiguous, optional
};

// All contiguous, of the shapes and dtypes of what they are gradients of.
struct ElementwiseScanGradients {
  void *dx, *dlog_decay;
  void* dinitial_state;  // null when there is no initial state
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

}  // namespace hfla
