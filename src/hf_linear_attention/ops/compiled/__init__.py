# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The compiled kernels. Importing this raises ImportError where there are none, and says why."""

from . import (
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

# What code that travels with checkpoints may call, by name and version. Such code outlives
# versions of this package: an entry stays, and keeps its arguments, their meaning and its results;
# what would change them gets a new version beside it.
OPS = {
    ("linear_attention", 1): linear_attention.forward,
    ("linear_attention_step_", 1): linear_attention.step_,
    ("linear_attention_step_", 2): linear_attention.step_,  # with state_indices
    ("linear_attention_", 1): linear_attention.forward_in_slots_,
    ("delta_rule", 1): delta_rule.forward,
    ("delta_rule", 2): delta_rule.forward,  # on CUDA, too, as all of its steps
    ("delta_rule_step_", 1): delta_rule.step_,
    ("delta_rule_step_", 2): delta_rule.step_,  # with state_indices
    ("delta_rule_", 1): delta_rule.forward_in_slots_,
    ("short_convolution", 1): convolution.forward,
    ("short_convolution_step_", 1): convolution.step_,
    ("short_convolution_step_", 2): convolution.step_,  # with state_indices
    ("selective_scan", 1): selective_scan.forward,
    ("selective_scan_step_", 1): selective_scan.step_,
    ("selective_scan_step_", 2): selective_scan.step_,  # with state_indices
    ("elementwise_scan", 1): elementwise_scan.forward,
    ("elementwise_scan_step_", 1): elementwise_scan.step_,
    ("rg_lru", 1): rg_lru.forward,
    ("linear", 1): linear.linear,
    ("many_rows_linear", 1): linear.many_rows_linear,
    ("many_rows_linear_in", 1): linear.many_rows_linear_in,
    ("expert_linear", 1): linear.expert_linear,
    ("onednn_linear", 1): linear.many_rows_linear,  # oneDNN's in older code, for float32
    ("int8_linear", 1): quantized_linear.int8_linear,
    ("int4_linear", 1): quantized_linear.int4_linear,
    ("int8_linear", 2): quantized_linear.int8_linear,  # with rounds_x
    ("int4_linear", 2): quantized_linear.int4_linear,
    ("rms_norm", 1): rms_norm.rms_norm,
    ("cross_entropy", 1): cross_entropy.cross_entropy,
    ("cross_entropy_backward", 1): cross_entropy.cross_entropy_backward,
    ("add_sinusoids", 1): sinusoids.add_sinusoids,
    ("can_record", 1): recordings.can_record,
    ("recording", 1): recordings.recording,
    ("why_not_on_cuda", 1): cuda.why_not_on_cuda,
    ("cpu_instruction_set", 1): library.cpu_instruction_set,
}

flops.register_formulas()
