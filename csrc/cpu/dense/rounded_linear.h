// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
#pragma once

#include "cpu/common/isa.h"
#include "kernels/quantized_linear.h"

namespace hfla::HFLA_ISA {

// For problems whose x is rounded to 16 bits.
Status rounded_linear(const QuantizedLinearProblem&, const Threads&);
Status rounded_int4(const QuantizedLinearProblem&, const Threads&);  // of these, those of 4 bits

}  // namespace hfla::HFLA_ISA
