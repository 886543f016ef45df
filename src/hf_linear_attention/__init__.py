# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Linear attention for Transformers. Importing this makes the Auto classes know the models."""

from .cache.caches import LinearAttentionCache, StaticLinearAttentionCache
from .checkpoints.export import export_checkpoint
from .checkpoints.load import from_checkpoint
from .conversion.convert import Conversion, convert
from .conversion.report import ConversionReport
from .extras.bounded_caches import SinkCache, TOVACache
from .extras.int4_weights import pack_int4_weights
from .extras.large_pages import use_large_pages
from .extras.prompts_once import DataCollatorWithTrees, SharedPrompts, share_prompts
from .extras.self_check import check_model
from .mixers.facts import MixerFacts
from .mixers.parts.decays import Decay, register_decay
from .mixers.tables import register_mixer
from .model.auto import before_context_parallel, observe_model_classes, register_model_type
from .model.configuration import LinearAttentionConfig
from .model.context_parallel import gathering_copies, prepare, refuse_ulysses
from .model.modeling import (
    LinearAttentionForCausalLM,
    LinearAttentionForMaskedLM,
    LinearAttentionForQuestionAnswering,
    LinearAttentionForSequenceClassification,
    LinearAttentionForTokenClassification,
    LinearAttentionModel,
    LinearAttentionPreTrainedModel,
)
from .ops.convolution import short_convolution, short_convolution_step_
from .ops.delta_rule import delta_rule, delta_rule_step_
from .ops.dplr_delta_rule import dplr_delta_rule, dplr_delta_rule_step_
from .ops.elementwise_scan import elementwise_scan, elementwise_scan_step_
from .ops.feature_maps import FeatureMap, register_feature_map
from .ops.in_slots import delta_rule_, linear_attention_, short_convolution_
from .ops.linear_attention import LinearAttentionState, linear_attention, linear_attention_step_
from .ops.selective_scan import selective_scan, selective_scan_step_
from .recurrences.sequence_parallel import split_sequence
from .recurrences.tree import TokenTree
from .releases import warn_of_newer
from .remote.saved_code import replace_outdated
from .to_onnx.export import export_onnx
from .upstream.use_kernels import use_kernels, use_kernels_everywhere

__version__ = "0.2.0"  # read by setup.py, which imports nothing for it: this must stay a literal

register_model_type(LinearAttentionConfig)
observe_model_classes(replace_outdated)
before_context_parallel(prepare, refuse_ulysses, gathering_copies)
warn_of_newer()

__all__ = [
    "Conversion",
    "ConversionReport",
    "DataCollatorWithTrees",
    "Decay",
    "FeatureMap",
    "LinearAttentionCache",
    "LinearAttentionConfig",
    "LinearAttentionForCausalLM",
    "LinearAttentionForMaskedLM",
    "LinearAttentionForQuestionAnswering",
    "LinearAttentionForSequenceClassification",
    "LinearAttentionForTokenClassification",
    "LinearAttentionModel",
    "LinearAttentionPreTrainedModel",
    "LinearAttentionState",
    "MixerFacts",
    "SharedPrompts",
    "SinkCache",
    "StaticLinearAttentionCache",
    "TOVACache",
    "TokenTree",
    "check_model",
    "convert",
    "delta_rule",
    "delta_rule_",
    "delta_rule_step_",
    "dplr_delta_rule",
    "dplr_delta_rule_step_",
    "elementwise_scan",
    "elementwise_scan_step_",
    "export_checkpoint",
    "export_onnx",
    "from_checkpoint",
    "linear_attention",
    "linear_attention_",
    "linear_attention_step_",
    "pack_int4_weights",
    "register_decay",
    "register_feature_map",
    "register_mixer",
    "selective_scan",
    "selective_scan_step_",
    "share_prompts",
    "short_convolution",
    "short_convolution_",
    "short_convolution_step_",
    "split_sequence",
    "use_kernels",
    "use_kernels_everywhere",
    "use_large_pages",
]
