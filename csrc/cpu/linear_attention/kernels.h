// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Linear attention's kernels of one instruction set.
#pragma once

#include "cpu/common/isa.h"
#include "kernels/linear_attention.h"

namespace hfla::HFLA_ISA {

Status linear_attention_forward(const LinearAttentionProblem&, const LinearAttentionResult&,
                                const Threads&);
Status linear_attention_backward(const LinearAttentionProblem&, const LinearAttentionUpstream&,
                                 const LinearAttentionGradients&, const Threads&);
Status linear_attention_step(const LinearAttentionStep&, const Threads&);
Status linear_attention_forward_in_slots(const LinearAttentionProblem&, const LinearAttentionSlots&,
                                         const View& y, const Threads&);

}  // namespace hfla::HFLA_ISA
