// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The short convolution's kernels of one instruction set.
#pragma once

#include "cpu/common/isa.h"
#include "kernels/convolution.h"

namespace hfla::HFLA_ISA {

Status convolution_forward(const ConvolutionProblem&, const ConvolutionResult&, const Threads&);
Status convolution_backward(const ConvolutionProblem&, const ConvolutionUpstream&,
                            const ConvolutionGradients&, const Threads&);
Status convolution_step(const ConvolutionStep&, const Threads&);

}  // namespace hfla::HFLA_ISA
