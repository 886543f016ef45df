// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The kernels of one instruction set, as dispatch.cpp finds them.

#include "cpu/attention/kernels.h"
#include "cpu/convolution/kernels.h"
#include "cpu/delta_rule/kernels.h"
#include "cpu/dense/kernels.h"
#include "cpu/elementwise_scan/kernels.h"
#include "cpu/linear_attention/kernels.h"
#include "cpu/selective_scan/kernels.h"
#include "kernels/cpu.h"

#define HFLA_STRING(x) #x
#define HFLA_EXPANDED_STRING(x) HFLA_STRING(x)

namespace hfla::HFLA_ISA {

extern const CpuKernels kernels;

const CpuKernels kernels = {
    HFLA_EXPANDED_STRING(HFLA_ISA),
    {linear_attention_forward, linear_attention_backward, linear_attention_step,
     linear_attention_forward_in_slots},
    {delta_rule_forward, delta_rule_backward, delta_rule_step, delta_rule_forward_in_slots},
    {convolution_forward, convolution_backward, convolution_step},
    {selective_scan_forward, selective_scan_backward, selective_scan_step},
    {elementwise_scan_forward, elementwise_scan_backward, elementwise_scan_step},
    {rg_lru_forward, rg_lru_backward},
    linear,
    many_rows_linear,
    quantized_linear,
    rounded_linear,
    dequantize_int4,
    {rms_norm, rms_norm_backward},
    add_sinusoids,
    decay_steps,
    {token_mix, rwkv7_values, rwkv7_keys, rwkv7_read, squared_relu},
    {cross_entropy, cross_entropy_backward},
    attention,
    window_step,
};

}  // namespace hfla::HFLA_ISA
