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

using AttentionOnCpu = Status (*)(const AttentionProblem&, const Threads&);

}  // namespace hfla
