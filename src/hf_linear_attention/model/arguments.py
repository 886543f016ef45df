# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The arguments of a model's forward, turned into `Tokens`: padding, packing, positions, masks.

Shapes: B batch, T time, N sequences packed into a batch; `past` tokens are cached.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, StaticLayer, StaticSlidingWindowLayer
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.utils.generic import is_flash_attention_requested

from ..cache.layers import count_rows, left_padding_of
from ..ops.checks import can_look_at, is_traced
from ..ops.tokens import Tokens, positions_within, sequence_of_each_token
from ..recurrences.packing import check_rows, shape_of
from ..recurrences.sequence_parallel import share_tokens
from ..recurrences.tree import masks_of_tree
from ..releases import CACHE

# What `forward` takes: (B, T ... past + T), one of four dimensions, or one per type of layer.
AttentionMask = Tensor | dict[str, Tensor | None] | None

# What Transformers and its clients hand to any model, beside the arguments that it names.
HANDED_TO_ALL = frozenset(
    (
        *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"),  # collators
        *("num_items_in_batch", "shift_labels", "ignore_index"),  # Trainer and users, for the loss
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
        *("is_causal", "debug_io", "debug_io_dir", "prune_layers"),  # Transformers' decorators
        "kernel_options",  # users, for flex attention
        "token_type_ids",  # tokenizers like BERT's
        "margin",  # TRL's RewardTrainer, with the rest of its batch
        "attentions",  # the plugin for vLLM, for its attention function, also without a cache
    )
)

SOFTMAX_MASKS = {
    "full_attention": create_causal_mask,
    "sliding_attention": create_sliding_window_causal_mask,
}


def check_arguments(others: Mapping[str, Any]) -> None:
    """Raises a TypeError for an argument of `forward` that nobody would read: it might have changed
    the answer.
    """
    unknown = [name for name in others if name not in HANDED_TO_ALL]
    if unknown:
        raise TypeError(f"forward() got an unexpected keyword argument {unknown[0]!r}")


def check_shapes(
    config: PreTrainedConfig,
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    position_ids: Tensor | None,
) -> None:
    """Raises a ValueError where these are no tensors of (B, T) tokens."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("give either input_ids or inputs_embeds")
    if input_ids is not None:
        if not isinstance(input_ids, Tensor) or input_ids.dim() != 2:
            raise ValueError(f"input_ids must be a tensor (B, T), got {shape_of(input_ids)}")
        if input_ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"input_ids must be of int64 or int32, got {input_ids.dtype}")
        B, T = input_ids.shape
    else:
        shape, C = shape_of(inputs_embeds), config.hidden_size
        if not isinstance(shape, tuple) or len(shape) != 3 or shape[2] != C:
            raise ValueError(f"inputs_embeds must be a tensor (B, T, hidden_size={C}), got {shape}")
        B, T, _ = shape
    if position_ids is not None:
        check_rows("position_ids", position_ids, B, T)


def without_those_of_loss(arguments: Mapping[str, Any], loss: Callable) -> dict[str, Any]:
    """Arguments of a head without what only its loss takes: one of a user's own may name others."""
    named = inspect.signature(loss).parameters.keys() - HANDED_TO_ALL
    return {name: x for name, x in arguments.items() if name not in named}


def count_past(past_key_values: Cache | None) -> int | Tensor:
    """The number of tokens in the cache; that of a static one is a tensor ()."""
    return 0 if past_key_values is None else past_key_values.get_seq_length()


def check_room(past_key_values: Any, B: int, T: int) -> None:
    """Raises a ValueError where a cache has read other rows than B, or has no place for T tokens
    more. What is known on the GPU alone is not asked.
    """
    if not isinstance(past_key_values, Cache) or is_traced():
        return
    rows = count_rows(past_key_values)
    if rows not in (None, B):
        raise ValueError(
            f"{CACHE} must have read as many rows as there are now, a batch of {B}, got one of "
            f"{rows}"
        )
    for layer in past_key_values.layers:
        if isinstance(layer, StaticLayer) and not isinstance(layer, StaticSlidingWindowLayer):
            past = layer.get_seq_length()
            if isinstance(past, Tensor) and not past.is_cpu:
                return
            if past + T > layer.max_cache_len:
                raise ValueError(
                    f"{CACHE} must be made for more tokens, by max_cache_len: it has read "
                    f"{int(past)}, is given {T} more, and has places for {layer.max_cache_len}"
                )


def hide_left_padding(mask: Tensor, past_key_values: Cache | None, T: int) -> Tensor:
    """A mask (B, T ... past + T) without what the cache knows to be padding."""
    padding = left_padding_of(past_key_values)
    assert padding is not None
    first = count_past(past_key_values) + T - mask.shape[1]  # that the mask covers
    columns = torch.arange(mask.shape[1], device=mask.device) + first
    return mask * (columns >= padding.to(mask.device)[:, None])


def read_tokens(
    config: PreTrainedConfig,
    inputs_embeds: Tensor,
    past_key_values: Cache | None,
    attention_mask: AttentionMask,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    sequence_group: Any,
    packing: tuple[Tensor | None, Tensor | None, Tensor | None],
    tree: Any = None,
) -> tuple[Tensor, Tensor, Tokens]:
    """Embeddings (B, T, C) with 0 for padding, positions (B or 1, T), and what layers need.

    Arguments as of the model's `forward`; cu_seqlens as `find_bounds` gives it, from `packing`.

    Raises:
        ValueError: they contradict each other.
    """
    B, T, _ = inputs_embeds.shape
    check_room(past_key_values, B, T)
    padding = find_padding(attention_mask, B, T, past_key_values, config)
    key_mask = None
    if padding is not None:
        key_mask = padding[:, padding.shape[1] - T :].to(inputs_embeds.device) != 0
    if key_mask is not None and can_look_at(key_mask, T) and key_mask.all():
        key_mask = None  # all is simpler without
    if key_mask is not None:
        if cu_seqlens is not None:
            raise ValueError("attention_mask must hide nothing where sequences are packed")
        inputs_embeds = inputs_embeds.masked_fill(~key_mask[..., None], 0)  # NaN, too
    within_sequences = None
    if cu_seqlens is not None:
        within_sequences = positions_within(cu_seqlens, B, T)
    if sequence_group is not None:
        shards = share_tokens(sequence_group, inputs_embeds, key_mask, *packing)
        within_sequences = shards.positions(inputs_embeds.device)
    if position_ids is None:
        position_ids = within_sequences
    if tree is not None:
        position_ids = tree.position_ids(inputs_embeds.device)
    if position_ids is None:
        before = count_past(past_key_values)
        if (
            past_key_values is not None
            and (padding_before := left_padding_of(past_key_values)) is not None
        ):
            before = before - padding_before.to(inputs_embeds.device)[:, None]
        position_ids = count_positions(padding, T, before, inputs_embeds.device)
    tokens = Tokens(
        is_causal=config.is_causal,
        key_mask=key_mask,
        cu_seqlens=cu_seqlens,
        # flash attention recognises sequences by their positions
        position_ids=position_ids if within_sequences is None else within_sequences,
    )
    if sequence_group is not None:
        tokens = tokens._replace(shards=shards)
    if tree is not None:
        tokens = tokens._replace(tree=tree.levels(inputs_embeds.device))
    if sequence_group is None and has_softmax_layers(config):
        masks: dict[str, Any]
        if tree is not None:
            masks = masks_of_tree(tree, config, inputs_embeds)
        else:
            given = inputs_embeds, attention_mask, past_key_values, cu_seqlens
            masks = softmax_masks(config, *given)
        tokens = tokens._replace(attention_masks=masks)
    return inputs_embeds, position_ids, tokens


def has_softmax_layers(config: PreTrainedConfig) -> bool:
    return set(config.active_layer_types) != {"linear_attention"}


def find_padding(
    attention_mask: AttentionMask,
    B: int,
    T: int,
    past_key_values: Cache | None,
    config: PreTrainedConfig,
) -> Tensor | None:
    """The mask of real tokens, (B, T ... past + T), for its last tokens; None where all are."""
    if isinstance(attention_mask, dict):  # one per layer type, as generate() may make them
        missing = set(config.active_layer_types) - set(attention_mask)
        if missing:
            raise ValueError(f"attention_mask must have every layer type, and has no {missing}")
        attention_mask = attention_mask.get("linear_attention")
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, Tensor):
        raise ValueError(f"attention_mask must be a tensor, got {shape_of(attention_mask)}")
    if attention_mask.dim() == 4:
        return find_padding_in_4d(attention_mask, B, T, config.is_causal)
    shape, past = tuple(attention_mask.shape), count_past(past_key_values)
    longest = past + T if isinstance(past, int) else shape[-1]
    if len(shape) != 2 or shape[0] != B or not T <= shape[1] <= longest:
        raise ValueError(
            f"attention_mask must have shape (B, T) = {(B, T)}, or (B, past + T) with past = "
            f"{past} tokens in the cache, or 4 dimensions, got {shape}"
        )
    if left_padding_of(past_key_values) is not None:
        return hide_left_padding(attention_mask, past_key_values, T)
    return attention_mask


def find_padding_in_4d(attention_mask: Tensor, B: int, T: int, is_causal: bool) -> Tensor:
    """The mask of real tokens (B, T) in one of (B or 1, 1, T, past + T), bool or added to the
    scores.

    Raises:
        ValueError: it has another shape, or says more than that. Linear attention can only leave
            out whole tokens.
    """
    shape = tuple(attention_mask.shape)
    if shape[0] not in (1, B) or shape[2] != T or shape[3] < T:
        raise ValueError(
            "attention_mask with 4 dimensions must have shape (B or 1, 1, T, past + T) with "
            f"B = {B} and T = {T}, got {shape}"
        )
    if attention_mask.dtype != torch.bool:
        if not attention_mask.is_floating_point() or (attention_mask > 0).any():
            raise ValueError(
                "attention_mask with 4 dimensions must be bool, True where a token is seen, or "
                "added to scores, 0 there and negative elsewhere, got one of "
                f"{attention_mask.dtype} with {attention_mask.max().item():g} as its largest value"
            )
        attention_mask = attention_mask == 0
    seen = attention_mask[..., -T:]
    key_mask = seen.diagonal(dim1=2, dim2=3)[:, 0]  # a real token sees itself
    expected = key_mask[:, None, None, :].expand(seen.shape)
    if is_causal:
        expected = expected.tril()
    if not torch.equal(seen & key_mask[:, None, :, None], expected & key_mask[:, None, :, None]):
        hidden = "padding and the future" if is_causal else "padding"
        raise ValueError(
            f"attention_mask with 4 dimensions must hide only {hidden} from linear-attention layers"
        )
    return key_mask.expand(B, T)


def count_positions(
    padding: Tensor | None,
    T: int,
    before: int | Tensor,
    device: torch.device,
) -> Tensor:
    """Positions (B, T) or (1, T), counting real tokens: `before` of them were read, (B, 1) or the
    same number in all rows, if `padding` (B, T ... past + T) does not say which of those were none.
    """
    if padding is None:
        return torch.arange(T, device=device)[None] + before
    covered = padding.shape[1] - T  # of those before
    left = before - covered
    if isinstance(left, Tensor) and left.dim() > 0:  # rows of which more is covered than was real
        left = left.clamp(min=0)
    return (left + (padding != 0).cumsum(-1) - 1).clamp(min=0)[:, covered:]


def softmax_masks(
    config: PreTrainedConfig,
    inputs_embeds: Tensor,
    attention_mask: AttentionMask,
    past_key_values: Cache | None,
    cu_seqlens: Tensor | None,
) -> dict[str, Tensor | None]:
    """For each type of softmax layer the mask that its attention function takes."""
    layer_types = set(config.active_layer_types)
    if isinstance(attention_mask, dict):
        return attention_mask
    B, T, _ = inputs_embeds.shape
    attention_mask = mask_of_all_keys(attention_mask, B, T, past_key_values, inputs_embeds.device)
    only_within = None
    if cu_seqlens is not None:
        if B > 1 and is_flash_attention_requested(config):
            raise ValueError("flash attention takes packed sequences in one row only, B = 1")
        sequence = sequence_of_each_token(cu_seqlens, B * T).view(B, T)
        attention_mask = None

        def only_within(b, head, q, k):
            return sequence[b, q] == sequence[b, k]

    return {
        layer_type: make(
            config=config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            and_mask_function=only_within,
            **{CACHE: past_key_values},
        )
        for layer_type, make in SOFTMAX_MASKS.items()
        if layer_type in layer_types
    }


def mask_of_all_keys(
    attention_mask: Tensor | None,
    B: int,
    T: int,
    past_key_values: Cache | None,
    device: torch.device,
) -> Tensor | None:
    """A mask (B, T ... past + T) with the cached tokens that it leaves out: they are real, but for
    what the cache itself knows to be padding. One of four dimensions as it is.
    """
    past = count_past(past_key_values)
    if attention_mask is None and left_padding_of(past_key_values) is not None:
        attention_mask = torch.ones(B, T, dtype=torch.long, device=device)
    is_number = isinstance(past, int) or not is_traced()
    if attention_mask is None or attention_mask.dim() != 2 or not is_number:
        return attention_mask
    left_out = int(past) + T - attention_mask.shape[1]
    attention_mask = F.pad(attention_mask, (left_out, 0), value=1)
    if left_padding_of(past_key_values) is not None:
        return hide_left_padding(attention_mask, past_key_values, T)
    return attention_mask


def check_memory(
    config: PreTrainedConfig, B: int, memory: Tensor | None, mask: Tensor | None, is_packed: bool
) -> None:
    """Raises a ValueError where a memory for cross attention is none for B rows."""
    if memory is None:
        return
    if is_packed:
        raise ValueError("encoder_hidden_states must be None with packed sequences")
    size = config.cross_attention_hidden_size or config.hidden_size
    if memory.dim() != 3 or memory.shape[0] != B or memory.shape[2] != size:
        raise ValueError(
            f"encoder_hidden_states must have shape (B, M, memory size) = ({B}, M, {size}), got "
            f"{tuple(memory.shape)}"
        )
    if mask is not None and mask.shape != memory.shape[:2]:
        raise ValueError(
            f"encoder_attention_mask must have shape (B, M) = {tuple(memory.shape[:2])}, got "
            f"{tuple(mask.shape)}"
        )
