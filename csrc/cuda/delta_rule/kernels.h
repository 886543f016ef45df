// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The delta rule's kernels, a file per dtype.
#pragma once

#include "kernels/delta_rule.h"

namespace hfla::cuda {

extern const DeltaRuleOnCuda delta_rule_f32, delta_rule_bf16, delta_rule_f16;

}  // namespace hfla::cuda
