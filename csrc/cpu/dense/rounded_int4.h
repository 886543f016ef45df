// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
#pragma once

#include "cpu/common/isa.h"
#include "kernels/quantized_linear.h"

namespace hfla::HFLA_ISA {

// rounded_linear, where values have 4 bits.
Status rounded_int4(const QuantizedLinearProblem&, const Threads&);

}  // namespace hfla::HFLA_ISA
