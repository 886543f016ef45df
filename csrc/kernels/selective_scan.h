// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The selective scan of Mamba: N sums for each channel, each with a decay of its own,
//
//     S_t = exp(dt_t A) S_{t-1} + dt_t x_t write_t    y_t = S_t · read_t + D x_t
//
// where A (C, N), D (C,), dt_t and x_t (C,) belong to channels, and write_t and read_t (N,) are
// shared by all of them. Letters as in common.h, and C channels, N sums of a state.
#pragma once

#include "kernels/common.h"

namespace hfla {

// A View here is of (B, T, C) or (B, T, N): its `dim` is the stride of channels or sums. dtype is
// that of x, write, read and y; dt, A, D and states are acc.
struct SelectiveScanSizes {
  int64_t B, C, N;
  DType dtype;
};

struct SelectiveScanProblem : SelectiveScanSizes {
  int64_t T;
  int64_t num_sequences;      // rows of a state: as many as cu_seqlens bounds, else B
  const int32_t* cu_seqlens;  // as in Sequences
  const bool* key_mask;       // (B, T) contiguous, optional
  View x, dt, write, read;
  const void* A;              // (C, N) contiguous
  const void* D;              // (C,) contiguous, optional
  const void* initial_state;  // (rows, C, N) contiguous, optional: zeros
};

struct SelectiveScanResult {
  void* y;      // (B, T, C) contiguous
  void* state;  // after the last token, as initial_state
};

// The gradients of forward's results.
struct SelectiveScanUpstream {
  View dy;             // (B, T, C), optional
  const void* dstate;  // contiguous, optional
};

// All contiguous, of the shapes and dtypes of what they are gradients of.
struct SelectiveScanGradients {
  void *dx, *ddt, *dA, *dwrite, *dread;
  void* dD;              // null when there is no D
  void* dinitial_state;  // null when there is no initial state
};

// One token for every batch row.
struct SelectiveScanStep : SelectiveScanSizes {
  View x, dt, write, read;  // (B, C) or (B, N)
  const void* A;            // (C, N) contiguous
  const void* D;            // (C,) contiguous, optional
  const bool* key_mask;     // (B,) contiguous, optional
  Slots slots;
  View state;  // (slots, C, N), any strides, updated in place: `head` is that of channels
  void* y;     // (B, C) contiguous
};

struct SelectiveScanOnCpu {
  Status (*forward)(const SelectiveScanProblem&, const SelectiveScanResult&, const Threads&);
  Status (*backward)(const SelectiveScanProblem&, const SelectiveScanUpstream&,
                     const SelectiveScanGradients&, const Threads&);
  Status (*step)(const SelectiveScanStep&, const Threads&);
};

}  // namespace hfla
