# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Transformers' continuous batching (`generate_batch`, `ContinuousBatchingManager`, `transformers
serve --continuous-batching`) for this package's models, whose states have no place in its pages.

`continuous_batching_manager` is what `init_continuous_batching` of a model calls, be its class the
package's or a checkpoint's copy. Transformers' engine is another with every release: what this one
needs of it says requirements.py.

Shapes: T tokens of all sequences in a batch, V size of the vocabulary.
"""

import copy
import inspect
import logging
import math
import queue
import threading
import warnings
from typing import Any

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching import (
    ContinuousBatchingManager,
    PagedAttentionCache,
)
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingTopKLogitsWarper,
)
from transformers.generation.continuous_batching.continuous_api import (
    ContinuousBatchProcessor,
    OutputRouter,
)
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.model_runner import (
    infer_max_single_request_tokens,
)
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestState

from ..model.auto import allocators_of_paged_cache
from ..releases import CACHE
from .admission import Admission
from .allocators import LINEAR, SECTOR_ALIGNMENT, LatentAllocator, allocators_of
from .broken_rows import NO_TOKEN, RowSampler, take_out
from .guard import GuardedManager
from .inputs_of_states import StateInputs
from .over_http import REQUESTED
from .requirements import check_release
from .sampling import KEY, Sampling, without_sampling
from .scheduling import child_id, give_slots
from .shared_prompts import SharingManager
from .slot_layout import SlotLayout, round_up

logger = logging.getLogger(__name__)

PAGES = "cache"  # what a batch calls Transformers' paged cache
# What Transformers would choose for a GPU: all of its memory, and masks for 8192 tokens at once.
CPU_TOKENS = 512  # in a batch: others wait while a prompt is read
CPU_SLOTS = 128
CPU_PAGED_TOKENS = 2**14


class SlotManager(GuardedManager, SharingManager):
    """A ContinuousBatchingManager that also gives each request a slot for its states."""

    batch_processor: ContinuousBatchProcessor | None

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig,
        continuous_batching_config: ContinuousBatchingConfig,
        workload_hints: Any = None,
    ):
        config = settings_for_states(model, continuous_batching_config)
        self.layout = SlotLayout.of_model(model)
        self.allocators = allocators_of(model.config, self.layout)
        if REQUESTED.get() is not None and LINEAR in model.config.active_layer_types:
            generation_config = without_sampling(generation_config)
            self.sampling = Sampling(model, generation_config)
        with allocators_of_paged_cache(self.allocators):
            super().__init__(model, generation_config, config, workload_hints)
        if self.distributed_helper.tp_size > 1:
            raise NotImplementedError(
                "continuous batching needs a model without tensor parallelism"
            )
        self.output_router = OrderedRouter()
        if self.sampling is not None:
            self.logit_processor.supported_keys[KEY] = Sampling
        processors = self.logit_processor.logits_processor
        for number, processor in enumerate(processors):
            if isinstance(processor, ContinuousBatchingTopKLogitsWarper):
                processors[number] = TopKOfVocabulary(processor)
        give_memory(self.continuous_batching_config, model, self.layout)
        self.share_prompts()

    @torch.inference_mode(False)  # its tensors change outside of it, too, in later sessions
    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        """As in Transformers, for its parts know of full and sliding attention only."""
        if self.batch_processor is not None:  # which begins anew
            return super()._create_batch_processor()
        with allocators_of_paged_cache(self.allocators):
            processor = super()._create_batch_processor()
        admit = admission_to(self.model, processor.cache)
        give_slots(processor.scheduler, admit, self._forget)
        allocators = processor.cache.cache_allocators
        if "full_attention" not in allocators:
            # what is read does not grow with the text
            window = allocators.get("sliding_attention")
            processor.cache.read_cache_limit = 0 if window is None else window.sliding_window
        if LINEAR in allocators:
            count_no_keys(processor.inputs_and_outputs, is_pure=len(allocators) == 1)
        if set(allocators) == {LINEAR}:
            processor.inputs_and_outputs.__class__ = StateInputs
        self.paged_model = PagedModel(self.model, processor)
        self.prompts.attach(processor)
        self.sampler = RowSampler(processor.model_runner, self.sampling)
        return processor

    def warmup(self) -> None:
        """As in Transformers. Models with states have no graphs to capture."""
        if self.batch_processor is None:
            self.batch_processor = self._create_batch_processor()
        self.batch_processor.warmup(self.paged_model)
        self.warmed_up = True

    def _generation_step(self) -> None:
        processor = self.batch_processor
        assert processor is not None
        processor._generation_step(self.paged_model)
        if self.sampler.broken:
            for state in take_out(processor, self.sampler.broken):
                self._fail(processor, state, ArithmeticError(NO_TOKEN))
        self.prompts.after_step(processor.scheduler.batch)

    def _generation_loop_body(self, batch_processor, bootstrapping: bool) -> bool:
        """As in Transformers, where an error ends all requests, and the loop."""
        try:
            return super()._generation_loop_body(batch_processor, bootstrapping)
        except Exception as error:
            affected = requests_affected(batch_processor.scheduler)
            if not affected:
                raise
            logger.exception("%d requests have failed", len(affected))
            for state in affected:
                self._fail(batch_processor, state, error)
            return True

    def _fail(self, processor, state: RequestState, error: Exception) -> None:
        """Ends a request, and the sequences of its prompt that were to be made of it."""
        processor._handle_request_error(error, state)
        processor.scheduler.finish_request(state.request_id)
        forks = processor.scheduler._requests_to_fork
        if state in forks:
            forks.remove(state)

    def register_result_handler(self, request_id: str, callback) -> None:
        """As in Transformers; and what was ready before goes to the handler first."""
        router = self.output_router
        with router._lock:
            super().register_result_handler(request_id, callback)
            router.deliver_batch(take_outputs(router.output_queue, request_id))


class OrderedRouter(OutputRouter):
    """An OutputRouter none of whose outputs can pass by a handler that is being registered; and
    with a request, the sequences of its prompt that were to be made of it fail, too.
    """

    def __init__(self):
        super().__init__()
        self._lock = threading.RLock()

    def deliver(self, output: GenerationOutput) -> None:
        self.deliver_batch([output])  # which looks for a handler and acts under one lock

    def fail_and_deliver(self, state: RequestState, error: Exception) -> None:
        """As in Transformers, which calls it for whatever fails, also at the door."""
        unborn, state.num_children = state.num_children, 0
        super().fail_and_deliver(state, error)
        for number in range(unborn):
            child = state.fork(child_id(state.request_id, number))
            super().fail_and_deliver(child, error)


class TopKOfVocabulary(ContinuousBatchingTopKLogitsWarper):
    """Takes all tokens where `top_k` is more than there are, as `generate()` does. In Transformers
    that is an error, which would end all requests of the batch.
    """

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        return super().__call__(scores, tensor_arg.clamp(max=scores.shape[-1]))


class PagedModel:
    """The model as Transformers' engine calls it, with the arguments of paged attention."""

    def __init__(self, model: PreTrainedModel, processor: ContinuousBatchProcessor):
        self.model = model
        self.io = processor.inputs_and_outputs
        self.pages = processor.cache
        # Up to 5.23 a model hands the pages to attention functions, which keep keys in them; but
        # where `cache` is an argument of the model itself, `_keep` does.
        taken = arguments_of(model)
        self.hands_pages = PAGES not in (CACHE, *taken)
        self.chooses_logits = "logits_to_keep" in taken  # heads that see may give all of them
        allocators = processor.cache.cache_allocators
        self.slots = allocators.get(LINEAR)
        self.states = {} if self.slots is None else self.slots.states
        self.softmax_types = set(allocators) - {LINEAR}
        self.latent = allocators.get("full_attention")
        if not isinstance(self.latent, LatentAllocator):
            self.latent = None
        self.last: tuple[Any, Any] = None, None  # sequences of a forward, and its cache
        self.batch: dict[str, Any] = {}  # that the model reads now

    def _supports_logits_to_keep(self) -> bool:
        """Else the engine takes what it needs of all logits."""
        return self.chooses_logits

    def __call__(self, **batch: Any) -> Any:
        """Logits (1, requests, V) of tokens (1, T), as `logits_to_keep` asks for them, or all."""
        self.batch, sequences = batch, self._sequences()
        known, cache = self.last
        if sequences != known:
            keep_keys = self._keep if self.softmax_types else None
            cache = self.model.slot_cache(self.states, *sequences, keep_keys=keep_keys)
            self.last = sequences, cache
        if self.softmax_types:
            arguments = {**batch, "attention_mask": self._masks(batch["attention_mask"])}
            del arguments["is_causal"]  # of the attention function, not of the model
            if not self.hands_pages:
                del arguments[PAGES]
        else:
            arguments = {name: batch[name] for name in FOR_ALL_LAYERS if name in batch}
            if self.chooses_logits and self._all_are_wanted(batch["input_ids"]):
                arguments["logits_to_keep"] = 0  # which takes no copy
        return self.model(**arguments, **{CACHE: cache})

    def _sequences(self) -> tuple[list[int], list[int], list[bool]]:
        """Slots, lengths, and whether they begin here, of those in the batch."""
        if self.slots is None:
            return [], [], []
        requests = self.io.requests_in_batch
        return (
            [self.slots.slot_of(request.state.request_id) for request in requests],
            [request.query_length for request in requests],
            [request.state.position_offset == request.query_length for request in requests],
        )

    def _all_are_wanted(self, input_ids: Tensor) -> bool:
        """Whether each token of the batch is that of a sequence, and gives it the next one."""
        requests = self.io.requests_in_batch
        return input_ids.shape[1] == len(requests) and all(r.has_new_token for r in requests)

    def _masks(self, masks: Any) -> dict[str, Tensor | None]:
        """By type of layer; all None for flash attention, which makes its own. On a CPU bools, for
        attention that leaves out the keys of other sequences.
        """
        if not isinstance(masks, dict):  # one for the only type
            masks = dict.fromkeys(self.softmax_types, masks)
        if self.model.device.type == "cpu" and self.model.config._attn_implementation == "sdpa":
            masks = {kind: mask == 0 for kind, mask in masks.items()}
        return {**masks, LINEAR: None}

    def _keep(
        self, keys: Tensor, values: Tensor, layer_idx: int, arguments: dict[str, Any] | None = None
    ) -> tuple[Tensor, Tensor]:
        """`slots.KeepKeys`, in pages."""
        if self.latent is not None:
            index = self.latent.index
            read, write = (self.batch[name][index] for name in ("read_index", "write_index"))
            keys, values = self.latent.keep(keys, values, layer_idx, read, write)
        if CACHE == PAGES:  # layers keep their keys there, and not their attention functions
            return self.pages.update(keys, values, layer_idx, arguments)
        if arguments is not None:
            arguments[PAGES] = self.pages
        return keys, values


# Settings that Transformers' engine leaves out in silence, with the values that change no answer.
LEFT_OUT: dict[str, tuple] = {"num_beams": (None, 1), "stop_strings": (None,), "max_time": (None,)}
FOR_ALL_LAYERS = ("input_ids", "position_ids", "cu_seq_lens_q", "use_cache", "logits_to_keep")


def continuous_batching_manager(
    model: PreTrainedModel,
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    workload_hints: Any = None,
) -> ContinuousBatchingManager:
    """What `init_continuous_batching` returns: as in Transformers, or the one that was kept.

    Raises:
        ImportError: Transformers' release has not what this engine needs.
        NotImplementedError: the model, or its code, can't be served so.
        ValueError: the settings can't be, for states.
    """
    check_release()
    check_model(model)
    kept = getattr(model, "_cached_continuous_batching_manager", None)
    if isinstance(kept, ContinuousBatchingManager):
        kept.switch_to_cb_friendly_attn(model, kept.continuous_batching_config.auto_switch_to_flash)
        return kept
    if generation_config is None:
        generation_config = model.generation_config
    if generation_config.eos_token_id is None:
        generation_config.eos_token_id = -1  # as there: none
    for name, neutral in LEFT_OUT.items():
        is_heeded = name == "stop_strings" and REQUESTED.get() is not None
        if not is_heeded and (value := getattr(generation_config, name, None)) not in neutral:
            warnings.warn(f"continuous batching leaves out {name}={value!r}", stacklevel=3)
    if continuous_batching_config is None:
        continuous_batching_config = ContinuousBatchingConfig()
    return SlotManager(model, generation_config, continuous_batching_config, workload_hints)


def arguments_of(model: PreTrainedModel) -> set[str]:
    return set(inspect.signature(model.forward).parameters)


def check_model(model: PreTrainedModel) -> None:
    """Raises a NotImplementedError for a model that can't be served."""
    config = model.config
    # A changed model of Transformers', which is served behind a class of ours, has its own name.
    takes_cache = not isinstance(model, PreTrainedModel) or CACHE in arguments_of(model)
    if not (hasattr(model, "slot_cache") and takes_cache):
        raise NotImplementedError(
            "continuous batching needs a checkpoint's code of a newer hf-linear-attention: load "
            "the model without trust_remote_code and save it again"
        )
    if config.add_cross_attention:
        raise NotImplementedError("continuous batching needs a model without cross attention")
    if config.softmax_mixer == "mla" and "sliding_attention" in config.active_layer_types:
        raise NotImplementedError(
            "continuous batching keeps no pages for latent attention with a sliding window"
        )


def settings_for_states(
    model: PreTrainedModel, settings: ContinuousBatchingConfig
) -> ContinuousBatchingConfig:
    """A copy of the settings, without what can't be where layers have states.

    Raises:
        ValueError: one of these was asked for.
    """
    settings = copy.copy(settings)
    types = set(model.config.active_layer_types)
    if LINEAR not in types:
        return settings
    if types == {LINEAR}:
        settings.auto_switch_to_flash = False  # nobody would use it
        if settings.safety_margin is None:
            settings.safety_margin = 0.0  # no request comes to need more than its slot
    is_compiled = settings.default_compile_level > 0
    is_compiled |= settings.varlen_compile_config is not None
    refused = {
        "use_async_batching": settings.use_async_batching,
        "use_cuda_graph": settings.use_cuda_graph not in (None, False, (False, False)),
        "default_compile_level or varlen_compile_config": is_compiled,
        "cpu_offload_space": model.device.type == "cpu" and settings.cpu_offload_space != 0,
    }
    for name, is_wanted in refused.items():
        if is_wanted:
            raise ValueError(
                f"continuous batching of layers with states needs settings without {name}"
            )
    settings.use_async_batching = settings.use_cuda_graph = False
    return settings


def give_memory(
    settings: ContinuousBatchingConfig, model: PreTrainedModel, layout: SlotLayout
) -> None:
    """Decides on what is left open of the settings, a pure model's number of slots and all of a
    CPU's memory: Transformers would take most of a device's for pages, and clear it.
    """
    config, on_cpu = model.config, model.device.type == "cpu"
    if on_cpu and settings.max_batch_tokens is None:
        settings.max_batch_tokens = CPU_TOKENS
    num_softmax = sum(kind != LINEAR for kind in config.active_layer_types)
    if settings.num_blocks is not None or (num_softmax > 0 and not on_cpu):
        return
    num_slots = settings.max_requests_per_batch
    if on_cpu:
        num_slots = min(num_slots, CPU_SLOTS)
    token = 2 * config.num_key_value_heads * config.head_dim * model.dtype.itemsize  # of a layer
    nbytes = num_slots * round_up(layout.nbytes, SECTOR_ALIGNMENT)
    nbytes += num_softmax * token * CPU_PAGED_TOKENS
    block = config.num_hidden_layers * token * settings.page_size
    settings.num_blocks = -(-nbytes // block)


def admission_to(model: PreTrainedModel, cache: PagedAttentionCache) -> Admission:
    """By the model's positions, and a cache in which nothing is."""
    config = model.config
    longest, reason = math.inf, ""
    if "full_attention" in cache.cache_allocators:
        longest, reason = infer_max_single_request_tokens(cache), "for which there are pages"
    is_learned = config.position_embedding_type == "learned"
    if is_learned and config.max_position_embeddings < longest:
        longest, reason = config.max_position_embeddings, "for which there are learned positions"
    return Admission(config.vocab_size, longest, reason, may_be_endless=not is_learned)


def count_no_keys(io: ContinuousBatchingIOs, is_pure: bool) -> None:
    """Lets the inputs of a batch be prepared with a type of layer that has no keys: the arrays that
    other types have are empty for it, and a pure model has no masks.
    """
    io.cumulative_seqlens_k[LINEAR] = io.cumulative_seqlens_q.new_zeros(
        io.max_requests_per_batch + 1
    )
    io.total_seqlen_k[LINEAR] = io.max_length_k[LINEAR] = 0
    if is_pure:
        io.attention_mask = None
    elif io.attention_mask is not None:
        io.attention_mask[LINEAR] = torch.empty(1, 1, 0, 0, dtype=io.model_dtype, device=io.device)


def requests_affected(scheduler: Any) -> list[RequestState]:
    """Those that an error meets: of the batch that was scheduled; or else, where none could be,
    those for which there was no memory.
    """
    batch = [request.state for request in scheduler.batch]
    starved = [state for state, _ in scheduler.starved_requests]
    active = scheduler.active_requests
    return [state for state in batch or starved if state.request_id in active]


def take_outputs(outputs: queue.Queue, request_id: str) -> list[GenerationOutput]:
    """Takes those of one request out of a queue."""
    with outputs.mutex:
        mine = [output for output in outputs.queue if output.request_id == request_id]
        for output in mine:
            outputs.queue.remove(output)
    return mine
