# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The parts of Transformers' continuous batching that the engine needs, and whether the installed
release has them. That engine changes with every release: methods that are replaced here, and
attributes that are set, may be gone, and then nobody would call or read them.
"""

import dis
import functools
import inspect
from collections.abc import Iterator

import transformers
from transformers import GenerationConfig, GenerationMixin
from transformers.generation.continuous_batching import (
    ContinuousBatchingManager,
    PagedAttentionCache,
)
from transformers.generation.continuous_batching.cache_allocators import (
    CacheAllocator,
    FullAttentionCacheAllocator,
    SlidingAttentionCacheAllocator,
)
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessorList,
    ContinuousBatchingTopKLogitsWarper,
)
from transformers.generation.continuous_batching.continuous_api import (
    ContinuousBatchProcessor,
    OutputRouter,
)
from transformers.generation.continuous_batching.input_outputs import (
    ContinuousBatchingIOs,
    PagedAttentionArgs,
)
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.requests import (
    FutureRequestState,
    GenerationOutput,
    RequestState,
)
from transformers.generation.continuous_batching.scheduler import Scheduler

# Methods that are replaced or called, with their arguments. Behind these there are only ones with
# defaults, or any where it says "...".
METHODS: dict[type, dict[str, str]] = {
    GenerationConfig: {"_get_default_generation_params": ""},
    GenerationMixin: {"_get_logits_processor": "generation_config"},
    ContinuousBatchingManager: {
        "__init__": "model generation_config continuous_batching_config workload_hints",
        "_create_batch_processor": "",
        "_generation_loop_body": "batch_processor bootstrapping",
        "_generation_step": "",
        "add_request": "input_ids request_id max_new_tokens streaming ...",
        "cancel_request": "request_id",
        "is_running": "",
        "join": "stop_trigger_time ...",
        "pause": "",
        "register_result_handler": "request_id callback",
        "start": "",
        "stop": "",
        "switch_to_cb_friendly_attn": "model auto_switch_to_flash",
        "warmup": "",
    },
    ContinuousBatchProcessor: {
        "_generation_step": "model",
        "_handle_request_error": "error state",
        "warmup": "model",
    },
    OutputRouter: {
        "deliver": "output",
        "deliver_batch": "outputs",
        "fail_and_deliver": "state error",
    },
    ContinuousBatchingTopKLogitsWarper: {"__call__": "scores tensor_arg"},
    PagedAttentionCache: {
        "can_store_request_tokens": "state request_len dry_run",
        "update": "key_states value_states layer_idx kwargs",
    },
    CacheAllocator: {
        "_before_cache_tensor_init": "index layer_indices tokens_per_page bytes_per_page "
        "allow_block_sharing",
        "_after_cache_tensor_init": "non_trash_bytes bytes_per_sector cache_tensor pool",
        "allocate_cache_to_request": "request_id past_length query_length",
        "fill_block_table": "request_id past_length query_length block_table",
        "get_cache_for_block_table": "layer_idx",
        "get_read_indices": "request_id past_length query_length",
        "get_seqlen_k": "past_length query_length",
        "get_write_indices": "request_id past_length query_length",
        "needs_new_blocks": "request_id past_length query_length",
        "register_cache_tensor": "bytes_per_sector non_trash_bytes cache_tensor pool",
        "update": "key_states value_states layer_idx read_index write_index",
    },
    ContinuousBatchingIOs: {
        "get_model_kwargs": "use_padding",
        "prepare_batch_tensors": "requests_in_batch logits_processors ...",
    },
    ModelRunner: {"_sample": "scores output_ids"},
    RequestState: {"fork": "new_request_id"},
    Scheduler: {
        "_infer_request_tokens": "state request_ids_to_remove_from_waiting",
        "_schedule_request": "state request_tokens token_budget request_ids_to_remove_from_waiting",
        "add_waiting_request": "state",
        "clear_cancelled_requests": "",
        "finish_request": "request_id",
        "schedule_batch": "token_budget cache_budget",
    },
}
# Attributes that are read or set.
ATTRIBUTES: dict[type, str] = {
    ContinuousBatchingManager: "_wake_up_loop background_thread_status batch_processor "
    "continuous_batching_config distributed_helper input_queue logit_processor model output_router "
    "warmed_up",
    ContinuousBatchingLogitsProcessorList: "logits_processor supported_keys",
    ContinuousBatchProcessor: "cache inputs_and_outputs model_runner output_router scheduler",
    OutputRouter: "_lock output_queue result_handlers",
    PagedAttentionCache: "cache_allocators read_cache_limit use_prefix_sharing",
    CacheAllocator: "block_table bytes_per_block index layer_indices num_blocks pool "
    "rows_per_token supports_block_sharing supports_block_table",
    FullAttentionCacheAllocator: "_kv_token_views",
    SlidingAttentionCacheAllocator: "_kv_token_views sliding_window",
    ContinuousBatchingIOs: "_bulk_input_tensor attention_mask compute_stream cumulative_seqlens_k "
    "cumulative_seqlens_q device max_length_k max_requests_per_batch model_dtype "
    "num_request_in_batch output_ids requests_in_batch static_inputs total_seqlen_k",
    ModelRunner: "cb_config do_sample inputs_and_outputs pad_inputs return_logprobs",
    Scheduler: "_requests_to_fork active_requests block_new_requests max_requests_per_batch "
    "starved_requests waiting_requests",
    RequestState: "_eos_token_ids _true_initial_tokens generated_tokens initial_tokens "
    "is_cpu_offloaded "
    "logit_processor_kwargs max_new_tokens num_children position_offset remaining_prefill_tokens "
    "request_id status streaming tokens_to_process",
    FutureRequestState: "has_new_token query_length state",
    GenerationOutput: "error generated_tokens request_id",
}
# What a batch of paged attention has. Of anything else nobody here knows what it is for.
BATCH = (
    "attention_mask block_table cache cu_seq_lens_k cu_seq_lens_q input_ids is_causal "
    "logits_indices logits_processor_args max_length_k max_length_q position_ids read_index "
    "use_cache write_index"
)


@functools.cache
def check_release() -> None:
    """Raises an ImportError that says what the installed Transformers has not, or has otherwise."""
    if wrong := [*wrong_methods(), *missing_attributes(), *wrong_batch()]:
        raise ImportError(f"transformers {transformers.__version__} has {'; '.join(wrong)}")


def wrong_methods() -> Iterator[str]:
    for cls, methods in METHODS.items():
        for name, arguments in methods.items():
            method = getattr(cls, name, None)
            if method is None:
                yield f"no {cls.__name__}.{name}"
                continue
            expected = arguments.split()
            may_need_more = expected[-1:] == ["..."]
            expected = expected[: len(expected) - may_need_more]
            found = list(inspect.signature(method).parameters.values())[1:]
            needed = [x.name for x in found if x.default is x.empty and x.kind < x.VAR_POSITIONAL]
            has_these = [x.name for x in found[: len(expected)]] == expected
            if not has_these or not (may_need_more or set(needed) <= set(expected)):
                names = ", ".join(x.name for x in found)
                yield f"{cls.__name__}.{name}({names}), not ({', '.join(expected)})"


def missing_attributes() -> Iterator[str]:
    for cls, names in ATTRIBUTES.items():
        known = attributes_of(cls)
        yield from (f"no {cls.__name__}.{name}" for name in names.split() if name not in known)


def attributes_of(cls: type) -> set[str]:
    """Of a class and what its methods set."""
    names = set(dir(cls))
    for each in cls.__mro__:
        names.update(getattr(each, "__annotations__", ()), getattr(each, "__slots__", ()))
        for method in vars(each).values():
            if inspect.isfunction(method):
                body = dis.get_instructions(inspect.unwrap(method))
                names.update(x.argval for x in body if x.opname == "STORE_ATTR")
    return names


def wrong_batch() -> Iterator[str]:
    found, known = set(PagedAttentionArgs.__annotations__), set(BATCH.split())
    yield from (f"no {name!r} in PagedAttentionArgs" for name in sorted(known - found))
    yield from (f"{name!r} in PagedAttentionArgs" for name in sorted(found - known))
