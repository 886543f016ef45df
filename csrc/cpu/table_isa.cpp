// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The kernels of one instruction set, as dispatch.cpp finds them.

#include "cpu/isa.h"

#define HFLA_STRING(x) #x
#define HFLA_EXPANDED_STRING(x) HFLA_STRING(x)

namespace hfla::HFLA_ISA {

const CpuKernels kernels = {
    HFLA_EXPANDED_STRING(HFLA_ISA), forward, backward, step, linear, rms_norm, rms_norm_backward};

}  // namespace hfla::HFLA_ISA
