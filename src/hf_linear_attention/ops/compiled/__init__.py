# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The compiled kernels. Importing this raises ImportError where there are none, and says why."""

from . import (
    attention,
    convolution,
    cross_entropy,
    cuda,
    delta_rule,
    elementwise_scan,
    flops,
    library,
    linear,
    linear_attention,
    quantized_linear,
    recordings,
    rg_lru,
    rms_norm,
    selective_scan,
    sinusoids,
)

OPS = {
    "attention": attention.attention,
    "linear_attention": linear_attention.forward,
    "linear_attention_step_": linear_attention.step_,
    "linear_attention_": linear_attention.forward_in_slots_,
    "delta_rule": delta_rule.forward,
    "delta_rule_step_": delta_rule.step_,
    "delta_rule_": delta_rule.forward_in_slots_,
    "short_convolution": convolution.forward,
    "short_convolution_step_": convolution.step_,
    "selective_scan": selective_scan.forward,
    "selective_scan_step_": selective_scan.step_,
    "elementwise_scan": elementwise_scan.forward,
    "elementwise_scan_step_": elementwise_scan.step_,
    "rg_lru": rg_lru.forward,
    "linear": linear.linear,
    "many_rows_linear": linear.many_rows_linear,
    "many_rows_linear_in": linear.many_rows_linear_in,
    "expert_linear": linear.expert_linear,
    "int8_linear": quantized_linear.int8_linear,
    "int4_linear": quantized_linear.int4_linear,
    "rms_norm": rms_norm.rms_norm,
    "cross_entropy": cross_entropy.cross_entropy,
    "cross_entropy_backward": cross_entropy.cross_entropy_backward,
    "add_sinusoids": sinusoids.add_sinusoids,
    "can_record": recordings.can_record,
    "recording": recordings.recording,
    "why_not_on_cuda": cuda.why_not_on_cuda,
    "cpu_instruction_set": library.cpu_instruction_set,
}

flops.register_formulas()
