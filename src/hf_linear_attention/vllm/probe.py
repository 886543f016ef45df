# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The names of vLLM that the plugin uses, and whether the installed release has them.

Looking at names, arguments and fields tells a release apart that has moved or renamed something, of
any number. What a release computes otherwise behind the same names it can't tell.
"""

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

# module -> name in it, of a class with a method behind a dot -> arguments that it is given by name
# or in this order; fields and methods that are asked of it
ARGUMENTS: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm.distributed": {
        "get_tensor_model_parallel_rank": (),
        "get_tensor_model_parallel_world_size": (),
        "tensor_model_parallel_all_gather": ("input_", "dim"),
    },
    "vllm.forward_context": {"get_forward_context": ()},
    "vllm.logger": {"init_logger": ("name",)},
    "vllm.model_executor.layers.attention": {
        "Attention": (
            *("num_heads", "head_size", "scale", "num_kv_heads", "cache_config"),
            *("per_layer_sliding_window", "prefix"),
        ),
        "Attention.forward": ("query", "key", "value"),
    },
    "vllm.model_executor.layers.linear": {
        "ColumnParallelLinear": ("input_size", "output_size", "bias", "return_bias"),
        "RowParallelLinear": ("input_size", "output_size", "bias", "return_bias"),
    },
    "vllm.model_executor.layers.logits_processor": {
        "LogitsProcessor": ("vocab_size",),
        "LogitsProcessor.forward": ("lm_head", "hidden_states"),
    },
    "vllm.model_executor.layers.mamba.abstract": {
        "MambaBase.bind_kv_cache": ("kv_cache",),
        "MambaBase.get_kv_cache_spec": ("vllm_config",),
    },
    "vllm.model_executor.layers.mamba.mamba_utils": {"get_temporal_copy_spec": ()},
    "vllm.model_executor.layers.vocab_parallel_embedding": {
        "ParallelLMHead": ("num_embeddings", "embedding_dim"),
        "VocabParallelEmbedding": ("num_embeddings", "embedding_dim"),
    },
    "vllm.model_executor.model_loader.weight_utils": {
        "default_weight_loader": ("param", "loaded_weight")
    },
    "vllm.model_executor.models.config": {
        "VerifyAndUpdateConfig.verify_and_update_config": ("vllm_config",),
        "VerifyAndUpdateConfig.verify_and_update_model_config": ("model_config",),
    },
    "vllm.model_executor.models.interfaces": {
        "IsHybrid.get_mamba_state_shape_from_config": ("vllm_config",),
        "SupportsMambaPrefixCaching.get_mamba_state_copy_func": (),
    },
    "vllm.model_executor.models.transformers.utils": {
        "init_on_device_without_buffers": ("device",)
    },
    "vllm.v1.attention.backend": {
        "AttentionMetadataBuilder": ("kv_cache_spec", "layer_names", "vllm_config", "device"),
        "AttentionMetadataBuilder.build": (
            *("common_prefix_len", "common_attn_metadata", "fast_build"),
        ),
    },
    "vllm.v1.attention.backends.utils": {
        "mamba_get_block_table_tensor": (
            *("block_table", "seq_lens", "kv_cache_spec", "mamba_cache_mode"),
        )
    },
}
FIELDS: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm.config": {
        "CacheConfig": ("mamba_cache_mode",),
        "CompilationConfig": ("static_forward_context",),
        "ModelConfig": ("dtype", "hf_config", "max_model_len", "quantization"),
        "ParallelConfig": (
            *("decode_context_parallel_size", "pipeline_parallel_size", "tensor_parallel_size"),
        ),
        "VllmConfig": (
            *("cache_config", "compilation_config", "lora_config", "model_config"),
            *("parallel_config", "speculative_config"),
        ),
    },
    "vllm.forward_context": {"ForwardContext": ("attn_metadata",)},
    "vllm.model_executor.models.config": {"MODELS_CONFIG_MAP": ()},
    "vllm.model_executor.models.interfaces": {"HasInnerState": (), "IsHybrid": ("is_hybrid",)},
    "vllm.platforms": {"current_platform": ("is_cpu",)},
    "vllm.v1.attention.backend": {
        "AttentionBackend": ("get_builder_cls", "get_impl_cls", "get_name", "is_ssm"),
        "AttentionMetadataBuilder": ("reorder_batch_threshold",),
        "CommonAttentionMetadata": ("block_table_tensor", "query_start_loc_cpu", "seq_lens"),
    },
    "vllm.v1.attention.backends.registry": {"MambaAttentionBackendEnum": ("LINEAR",)},
}


def missing() -> list[str]:
    """What the installed vLLM lacks of all this; empty where the plugin can work with it."""
    return [*_missing_arguments(), *_missing_fields()]


def _missing_arguments() -> Iterator[str]:
    for module, callables in ARGUMENTS.items():
        for path, wanted in callables.items():
            found = _find(module, path)
            if found is None:
                yield f"{module}.{path}"
                continue
            has = inspect.signature(found).parameters
            yield from (f"{module}.{path}({name})" for name in wanted if name not in has)


def _missing_fields() -> Iterator[str]:
    for module, owners in FIELDS.items():
        for path, wanted in owners.items():
            found = _find(module, path)
            if found is None:
                yield f"{module}.{path}"
                continue
            yield from (f"{module}.{path}.{name}" for name in wanted if not _has(found, name))


def _find(module: str, path: str) -> Any:
    """What a name in a module stands for; None where there is no such module or name."""
    try:
        found: Any = importlib.import_module(module)
    except ImportError:
        return None
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _has(owner: Any, name: str) -> bool:
    """Fields of a dataclass without a default are no attributes of it."""
    classes = getattr(owner, "__mro__", ())
    return hasattr(owner, name) or any(name in vars(c).get("__annotations__", ()) for c in classes)
