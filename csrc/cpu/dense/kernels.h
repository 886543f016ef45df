// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The kernels of one instruction set for layers that look at one token at a time.
#pragma once

#include "cpu/common/isa.h"
#include "kernels/cross_entropy.h"
#include "kernels/decay_steps.h"
#include "kernels/linear.h"
#include "kernels/quantized_linear.h"
#include "kernels/rms_norm.h"
#include "kernels/rwkv7.h"
#include "kernels/sinusoids.h"

namespace hfla::HFLA_ISA {

Status linear(const LinearProblem&, const Threads&);
Status many_rows_linear(const ManyRowsLinearProblem&, const Threads&);
Status quantized_linear(const QuantizedLinearProblem&, const Threads&);
Status rounded_linear(const QuantizedLinearProblem&, const Threads&);
Status rounded_int4(const QuantizedLinearProblem&, const Threads&);  // where values have 4 bits
Status dequantize_int4(const QuantizedLinearProblem&, const Threads&);
Status rms_norm(const RmsNormProblem&, const RmsNormResult&, const Threads&);
Status rms_norm_backward(const RmsNormProblem&, const RmsNormGradients&, const Threads&);
Status add_sinusoids(const SinusoidsProblem&);
Status decay_steps(const DecayStepsProblem&, const Threads&);
Status token_mix(const TokenMixProblem&, const Threads&);
Status rwkv7_values(const RWKV7ValuesProblem&, const Threads&);
Status rwkv7_keys(const RWKV7KeysProblem&, const Threads&);
Status rwkv7_read(const RWKV7ReadProblem&, const Threads&);
Status squared_relu(const SquaredReluProblem&, const Threads&);
Status cross_entropy(const CrossEntropyProblem&, const CrossEntropyResult&, const Threads&);
Status cross_entropy_backward(const CrossEntropyProblem&, const CrossEntropyGradients&,
                              const Threads&);

}  // namespace hfla::HFLA_ISA
