// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Decays within a chunk of tokens.
#pragma once

#include "cuda/common/scalar_types.h"

namespace hfla::cuda {

// A log decay at or below this forgets everything: its exponential is zero in float.
constexpr float kForgetsAll = -104;

// Sums of log decays within a chunk, where position i + 1 is after token i. A decay to zero is
// counted instead of summed: differences of sums then stay finite. Sums may be large where their
// differences are not, so each is the sum of two floats.
struct DecaySum {
  float high, low;
  int resets;
};

struct DecaySums {
  const DecaySum* sums;  // (C + 1,); null: no decay

  DEV float between(int from, int to) const {  // e^{g_{from+1} + ... + g_to}
    if (!sums) return 1;
    const DecaySum a = sums[from], b = sums[to];
    return a.resets == b.resets ? expf((b.high - a.high) + (b.low - a.low)) : 0;
  }
};

}  // namespace hfla::cuda
