// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The loss of a language model: -log softmax(logits)[label] of each row.
#pragma once

#include "kernels/common.h"

namespace hfla {

// Everything is contiguous.
struct CrossEntropyProblem {
  int64_t rows, words;
  DType dtype;            // of logits
  const void* logits;     // (rows, words)
  const int64_t* labels;  // (rows,) in [0, words), or ignore_index for a row that does not count
  int64_t ignore_index;
};

// log sum exp(logits) is `largest` + log(sums). Kernels leave logarithms to the caller.
struct CrossEntropyResult {
  void* largest;  // (rows,) acc, of the logits
  void* sums;     // (rows,) acc, of exp(logit - largest)
  void* gaps;     // (rows,) acc, largest - logit of the label; 0 where the row does not count
};

struct CrossEntropyGradients {
  const void* dlosses;      // (rows,) acc
  const void* normalizers;  // (rows,) acc, log sum exp(logits)
  void* dlogits;  // (rows, words); zeros where the row does not count, whatever its logits are
};

struct CrossEntropyOnCpu {
  Status (*forward)(const CrossEntropyProblem&, const CrossEntropyResult&, const Threads&);
  Status (*backward)(const CrossEntropyProblem&, const CrossEntropyGradients&, const Threads&);
};

}  // namespace hfla
