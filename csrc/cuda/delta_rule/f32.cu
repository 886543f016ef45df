// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.

#include "cuda/delta_rule/table.cuh"

const hfla::DeltaRuleOnCuda hfla::cuda::delta_rule_f32 = hfla::cuda::kDeltaRuleTable<float>;
