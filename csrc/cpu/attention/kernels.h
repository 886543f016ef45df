// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
#pragma once

#include "cpu/common/isa.h"
#include "kernels/attention.h"

namespace hfla::HFLA_ISA {

Status attention(const AttentionProblem&, const Threads&);
Status window_step(const WindowProblem&, const Threads&);

}  // namespace hfla::HFLA_ISA
