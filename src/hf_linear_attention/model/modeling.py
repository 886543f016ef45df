# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Linear-attention language models: the layer around a mixer, the model, and its heads.

docs/architecture.md follows a token through them.

Shapes: B batch, T time, C hidden size, R features that positions turn, M tokens of a memory, N
sequences packed into a batch.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithCrossAttentions,
    MaskedLMOutput,
)
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ..cache.caches import LinearAttentionCache, cache_for_model
from ..cache.layer_state import LayerMemory
from ..cache.slots import SlotCache
from ..decode.models import CountsCasts, RecordsLayers, RecordsSteps
from ..fast.linear import is_bare, project
from ..fast.rms_norm import RMSNorm
from ..fast.sinusoids import add_sinusoids
from ..mixers.cross import CrossAttention
from ..mixers.facts import facts_of
from ..mixers.parts.decays import has_lower_bounds, share_lower_bounds
from ..mixers.parts.rotary import RotaryEmbedding, with_local_positions
from ..mixers.parts.tensor_parallel import keep_meshes
from ..mixers.softmax import SoftmaxAttention
from ..mixers.tables import SHIFTED_MLPS, build_mixer
from ..ops.checks import check_tokens
from ..ops.feature_maps import FavorPlus
from ..ops.tokens import Tokens
from ..recurrences.packing import check_packing, find_bounds
from ..recurrences.sequence_parallel import check_sequence_group
from ..recurrences.tree import check_beside_tree, check_tree
from ..releases import CACHE, CACHE_NAMES, cache_among
from .arguments import (
    AttentionMask,
    check_arguments,
    check_memory,
    check_shapes,
    has_softmax_layers,
    read_tokens,
    without_those_of_loss,
)
from .auto import register_base_model, register_models
from .configuration import LinearAttentionConfig
from .generation import LinearAttentionGenerationMixin
from .loss import causal_lm_loss, linear_causal_lm_loss
from .model_card import TAGS, ModelCardMixin
from .saving import SavedModel

# Parameters whose names have changed since a version: a pattern of the old name, and the new one.
RENAMED = {r"self_attn\.decay\.query": "self_attn.query.weight"}  # 0.1, where Aaren was a decay


class LinearAttentionMLP(nn.Module):
    """Llama's: a gate, a product, and back."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        C, size, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(C, size, bias=bias)
        self.up_proj = nn.Linear(C, size, bias=bias)
        self.down_proj = nn.Linear(size, C, bias=bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        gate = self.act_fn(project(self.gate_proj, x))
        return project(self.down_proj, gate * project(self.up_proj, x))


class CheckpointsGradients:
    """Gradient checkpointing where gradients are recorded, and nowhere else: in training mode, too,
    generate() keeps its cache, as in Transformers since 5.24.
    """

    _is_switched_on = False

    @property
    def gradient_checkpointing(self) -> bool:
        return self._is_switched_on and torch.is_grad_enabled()

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, is_switched_on: bool):
        self._is_switched_on = is_switched_on


# Before and behind the mixer, before and behind the MLP; names are Transformers'.
NORMS: dict[str, tuple[str | None, ...]] = {
    "before": ("input_layernorm", None, "post_attention_layernorm", None),
    "behind": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "around": (
        *("input_layernorm", "post_attention_layernorm"),
        *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
}


class LinearAttentionDecoderLayer(CountsCasts, CheckpointsGradients, GradientCheckpointingLayer):
    """x + mixer(norm(x)), where there is a memory + cross attention, then x + mlp(norm(x)) unless
    the MLP has no features. By the config's `norms` they are also, or only, of what is added.
    """

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.self_attn = build_mixer(config, layer_idx)
        self.has_cross_attn = config.add_cross_attention
        if self.has_cross_attn:
            self.cross_attn = CrossAttention(config, layer_idx)
            self.cross_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.has_mlp = config.intermediate_size > 0
        if self.has_mlp:
            self.mlp = LinearAttentionMLP(config)
        self.norms = NORMS[config.norms]
        for name in filter(None, self.norms if self.has_mlp else self.norms[:2]):
            self.add_module(name, RMSNorm(config.hidden_size, eps=config.rms_norm_eps))

    def _normed(self, x: Tensor, name: str | None) -> Tensor:
        return x if name is None else getattr(self, name)(x)

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,  # by position, for gradient checkpointing
        encoder_attention_mask: Tensor | None = None,
        *,
        tokens: Tokens,
        **kwargs,
    ) -> Tensor:
        """hidden_states (B, T, C) -> (B, T, C); kwargs go to softmax attention. The cache is among
        them by Transformers' name for it, by which gradient checkpointing leaves it out.
        """
        past_key_values = kwargs.pop(CACHE, None)
        mixed, _ = self.self_attn(
            self._normed(hidden_states, self.norms[0]),
            tokens=tokens,
            past_key_values=past_key_values,
            **kwargs,
        )
        hidden_states = hidden_states + self._normed(mixed, self.norms[1])
        if self.has_cross_attn:
            attended = self.cross_attn(
                self.cross_attention_layernorm(hidden_states),
                encoder_hidden_states,
                encoder_attention_mask,
                past_key_values,
            )
            if attended is not None:
                hidden_states = hidden_states + attended
        if self.has_mlp:
            mixed = self.mlp(self._normed(hidden_states, self.norms[2]))
            hidden_states = hidden_states + self._normed(mixed, self.norms[3])
        return hidden_states


class RWKVDecoderLayer(CountsCasts, CheckpointsGradients, GradientCheckpointingLayer):
    """RWKV's: x + mixer(norm(x)), then x + mlp(norm(x)), where both keep the token before in the
    memory of the layer, and the norms are LayerNorms, of embeddings before the first layer, too.
    RWKV-7's mixer takes the first layer's values, which layers hand on.
    """

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        if layer_idx == 0:
            self.pre_norm = nn.LayerNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = build_mixer(config, layer_idx)
        self.has_mlp = config.intermediate_size > 0
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.rms_norm_eps)
        if self.has_mlp:
            self.mlp = SHIFTED_MLPS[config.mixer](config, layer_idx)
            self.post_attention_layernorm = nn.LayerNorm(
                config.hidden_size, eps=config.rms_norm_eps
            )

    def forward(
        self,
        hidden_states: Tensor,
        v_first: Tensor | None = None,  # by position, for gradient checkpointing
        *,
        tokens: Tokens,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states (B, T, C), and the first layer's values, None in the first -> (B, T, C),
        and these values.
        """
        past_key_values = kwargs.get(CACHE)
        cache = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        memory = LayerMemory(cache, tokens, hidden_states.shape[1])
        if self.layer_idx == 0:
            hidden_states = self.pre_norm(hidden_states)
        mixed, v_first = self.self_attn(
            self.input_layernorm(hidden_states), v_first, tokens=tokens, memory=memory
        )
        hidden_states = hidden_states + mixed
        if self.has_mlp:
            x = self.post_attention_layernorm(hidden_states)
            hidden_states = hidden_states + self.mlp(x, tokens=tokens, memory=memory)
        memory.write(mixed.dtype)
        return hidden_states, v_first


# What `output_hidden_states` and `output_attentions` ask for, and the modules that give it.
OUTPUTS_OF: dict[str, type[nn.Module]] = {
    "hidden_states": GradientCheckpointingLayer,
    "attentions": SoftmaxAttention,
}


class LinearAttentionPreTrainedModel(SavedModel, ModelCardMixin, PreTrainedModel):
    """What all models here share: a config, and weights' first values. It is not made by itself."""

    config: LinearAttentionConfig
    config_class = LinearAttentionConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LinearAttentionDecoderLayer"]
    _skip_keys_device_placement = list(CACHE_NAMES)
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = OUTPUTS_OF

    def __init__(self, config: LinearAttentionConfig, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        if facts_of(config.mixer).block == "rwkv":
            self._no_split_modules = [RWKVDecoderLayer.__name__]  # the only ones
        self.model_tags = list(TAGS)
        self.card_metadata = {}  # of the model card: license, language, ...
        register_base_model(config, LinearAttentionModel)

    @classmethod
    def from_pretrained(cls, *args, key_mapping: dict[str, str] | None = None, **kwargs):
        """As in Transformers; parameters may also have the names of an earlier version."""
        return super().from_pretrained(
            *args, key_mapping={**RENAMED, **(key_mapping or {})}, **kwargs
        )

    @classmethod
    def maybe_distribute_model(cls, model: nn.Module, *args) -> nn.Module:
        """As in Transformers, which loads and quantises the weights after this."""
        model = super().maybe_distribute_model(model, *args)
        keep_meshes(model)
        return model

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        """Transformers looks for its interface in the file of this class alone."""
        return True

    def order_of_pieces(self) -> str | None:
        """In which ranks share sequences by `cp_size`, one of `split_sequence`'s: that which shares
        softmax layers' work evenly, where there are any. None: they can't.
        """
        if hasattr(type(self).forward, "takes_no_pieces"):
            return None
        return "head_tail" if has_softmax_layers(self.config) else "contiguous"

    @property
    def supports_context_parallel(self) -> bool:
        """As in Transformers, which knows of softmax layers alone."""
        return self.order_of_pieces() is not None

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        reset = getattr(module, "reset_parameters", None)
        if reset is not None and not reset.__module__.startswith("torch."):
            reset()

    def redraw_features(self):
        """Draws the random features of feature_map="favor+" anew, in training and on request.

        Raises:
            RuntimeError: the model is in eval mode, or has none.
        """
        maps = [module for module in self.modules() if isinstance(module, FavorPlus)]
        if not maps:
            raise RuntimeError(
                'redraw_features() needs a model with feature_map="favor+", got '
                f"{self.config.feature_map!r}"
            )
        for feature_map in maps:
            feature_map.redraw()


class LinearAttentionModel(RecordsLayers, CheckpointsGradients, LinearAttentionPreTrainedModel):
    """Embeddings, positions, layers and a last norm: input_ids (B, T) -> last_hidden_state (B, T,
    C).
    """

    def __init__(self, config: LinearAttentionConfig):
        super().__init__(config)
        config.check_for_model()
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        if config.position_embedding_type == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        elif config.position_embedding_type == "rotary":
            self.rotary_emb = RotaryEmbedding(config)
            if config.local_rope_parameters is not None:
                self.local_rotary_emb = RotaryEmbedding(with_local_positions(config))
        self.hands_values_on = facts_of(config.mixer).block == "rwkv"
        if self.hands_values_on:
            numbers = range(config.num_hidden_layers)
            self.layers = nn.ModuleList(RWKVDecoderLayer(config, i) for i in numbers)
            self.norm: nn.Module = nn.LayerNorm(config.hidden_size, eps=config.rms_norm_eps)
        else:
            self.layers = nn.ModuleList(
                LinearAttentionDecoderLayer(config, layer_idx)
                for layer_idx in range(config.num_hidden_layers)
            )
            self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if has_lower_bounds(config):
            self.lower_bounds = share_lower_bounds(self, config)
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: AttentionMask = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        use_cache: bool | None = None,
        sequence_group: Any = None,
        tree: Any = None,
        cache: Cache | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """input_ids (B, T) or inputs_embeds (B, T, C) -> last_hidden_state (B, T, C).

        Args:
            attention_mask: (B, T) or (B, past + T), 0 for padding, anywhere; or (B, 1, T, past + T)
                or that of one row for all, as long as it only hides padding and the future; or a
                dict of one per layer type.
            position_ids: (B, T); by default they count real tokens.
            past_key_values, cache: a LinearAttentionCache or StaticLinearAttentionCache, or an
                empty DynamicCache or StaticCache. Transformers calls it `cache` since 5.24; either
                name will do with every release.
            encoder_hidden_states: the memory (B, M, hidden size or cross_attention_hidden_size) for
                cross attention. A cache keeps what is read of it: later forwards do not look at it.
            encoder_attention_mask: (B, M), 0 for padding in the memory.
            cu_seq_lens_q, seq_idx: bounds (N + 1,) or numbers (B, T) of sequences packed into the
                batch. `position_ids` that restart, without mask and cache, say the same.
            sequence_group: torch.distributed's ProcessGroup of ranks that hold consecutive pieces
                of these sequences, in order, or a HeadTail of one (`split_sequence`).
            tree: how the tokens of one row, (1, T), are a tree of texts that begin alike.

        Raises:
            TypeError: another argument, which Transformers does not hand to every model.
            ValueError: arguments that contradict each other.
        """
        if cache is not None:
            past_key_values = cache_among(past_key_values=past_key_values, cache=cache)
        if not isinstance(past_key_values, SlotCache):  # an engine says more of a batch
            check_arguments(kwargs)
        check_shapes(self.config, input_ids, inputs_embeds, position_ids)
        if input_ids is not None:
            try:
                inputs_embeds = self.embed_tokens(input_ids)
            except IndexError:
                check_tokens(input_ids, self.embed_tokens)
                raise
        assert inputs_embeds is not None
        B, T, _ = inputs_embeds.shape
        bounds, numbers = kwargs.get("cu_seq_lens_q"), kwargs.get("seq_idx")
        check_tree(tree, (B, T), self.config)
        if tree is not None:
            check_beside_tree(
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                encoder_hidden_states=encoder_hidden_states,
                sequence_group=sequence_group,
                cu_seq_lens_q=bounds,
                seq_idx=numbers,
            )
            use_cache = False  # a cache keeps one state a row
        cu_seqlens, counted = None, position_ids if attention_mask is None else None
        check_sequence_group(sequence_group, self.config)
        if sequence_group is None and not isinstance(past_key_values, SlotCache):  # slots know it
            check_packing(B, T, bounds, numbers)
            cu_seqlens = find_bounds(B, T, bounds, numbers, counted if T > 1 else None)
        past_key_values = self._cache(past_key_values, use_cache, cu_seqlens, sequence_group)

        inputs_embeds, position_ids, tokens = read_tokens(
            self.config,
            inputs_embeds,
            past_key_values,
            attention_mask,
            position_ids,
            cu_seqlens,
            sequence_group,
            (bounds, numbers, counted),
            tree,
        )
        if self.config.add_cross_attention:
            memory = encoder_hidden_states, encoder_attention_mask
            check_memory(self.config, B, *memory, is_packed=tokens.is_packed)
        elif encoder_hidden_states is not None:
            raise ValueError("encoder_hidden_states need a config with add_cross_attention=True")
        hidden_states, position_embeddings = self._embed_positions(inputs_embeds, position_ids)
        tokens = tokens._replace(position_embeddings=position_embeddings)
        run: Callable[..., Tensor] = functools.partial(
            self._run_layers,
            memory=(encoder_hidden_states, encoder_attention_mask),
            tokens=tokens,
            **{**kwargs, CACHE: past_key_values},
        )
        if not torch.is_grad_enabled() and self.may_be_recorded(
            hidden_states, tokens, past_key_values
        ):
            hidden_states = self._run_recorded(
                run, hidden_states, tokens, position_embeddings or (), past_key_values
            )
        else:
            hidden_states = run(hidden_states, range(self.config.num_hidden_layers))
        return BaseModelOutputWithPast(last_hidden_state=hidden_states, **{CACHE: past_key_values})

    def _run_layers(
        self,
        hidden_states: Tensor,
        numbers: range,
        memory: tuple[Tensor | None, Tensor | None],
        **kwargs,
    ) -> Tensor:
        """Those layers, and the norm after the last."""
        layers = list(self.layers)
        if self.hands_values_on:
            v_first = None  # `numbers` begin with 0: caches of all layers are of one kind
            for i in numbers:
                handed_on = layers[i](hidden_states, v_first, **kwargs)
                if isinstance(handed_on, Tensor):
                    raise RuntimeError(
                        "layers of RWKV hand on hidden states and values: pipelines can't run "
                        "them, whose stages hand on hidden states alone"
                    )
                hidden_states, v_first = handed_on
        else:
            for i in numbers:
                hidden_states = layers[i](hidden_states, *memory, **kwargs)
        is_last = numbers.stop == self.config.num_hidden_layers
        return self.norm(hidden_states) if is_last else hidden_states

    def _cache(
        self,
        past_key_values: Any,
        use_cache: bool | None,
        cu_seqlens: Tensor | None,
        sequence_group: Any,
    ) -> Any:
        """The cache to read and write, with this model's layers; a new one where that is wanted."""
        without_cache = {  # what goes without one
            "sequence_group": sequence_group is not None,
            "packed sequences": cu_seqlens is not None,
            "is_causal=False": not self.config.is_causal,
        }
        if isinstance(past_key_values, SlotCache):
            return past_key_values
        if past_key_values is not None:
            for what, is_so in without_cache.items():
                if is_so:
                    raise ValueError(f"{CACHE} must be None with {what}")
            return cache_for_model(past_key_values, self.config)
        if use_cache and not any(without_cache.values()):
            return LinearAttentionCache(self.config)
        return None

    def _embed_positions(
        self, inputs_embeds: Tensor, position_ids: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """The first layer's input, and what `rotate` takes, (B, T, R) each."""
        scale = math.sqrt(inputs_embeds.shape[-1]) if self.config.scale_embeddings else None
        if self.config.position_embedding_type == "sinusoidal":
            return add_sinusoids(inputs_embeds, position_ids, scale), None
        if scale is not None:
            inputs_embeds = inputs_embeds * scale
        if self.config.position_embedding_type == "learned":
            limit = self.config.max_position_embeddings
            if not torch.compiler.is_compiling() and (position_ids >= limit).any():
                raise ValueError(
                    f"position_ids must be less than max_position_embeddings={limit} with learned "
                    f"positions, got {position_ids.max().item()}"
                )
            return inputs_embeds + self.embed_positions(position_ids), None
        if self.config.position_embedding_type == "rotary":
            rotary = self.rotary_emb(inputs_embeds, position_ids)
            if self.config.local_rope_parameters is not None:
                rotary = *rotary, *self.local_rotary_emb(inputs_embeds, position_ids)
            return inputs_embeds, rotary
        return inputs_embeds, None


class LinearAttentionForCausalLM(
    RecordsSteps, LinearAttentionGenerationMixin, LinearAttentionPreTrainedModel
):
    """The language model: next-token logits, loss, and `generate()`."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: LinearAttentionConfig):
        if not config.is_causal:
            raise ValueError(
                "a causal language model needs a config with is_causal=True, got is_causal=False; "
                "LinearAttentionModel and the other heads take it"
            )
        super().__init__(config)
        self.model = LinearAttentionModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.loss_function = causal_lm_loss
        self.post_init()

    def _get_name(self) -> str:
        """The same where FSDP2 puts a class of its own before this one: by this name Trainer knows
        that labels are to be shifted for label smoothing.
        """
        return LinearAttentionForCausalLM.__name__

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: AttentionMask = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: Cache | None = None,
        **kwargs,
    ) -> CausalLMOutputWithCrossAttentions:
        """As `LinearAttentionModel.forward`, then logits (B, T, vocab_size).

        Args:
            labels: (B, T), -100 where there is none; token t is compared with logits t - 1. In
                training there are no logits beside the loss, if config.fuse_linear_cross_entropy.
            logits_to_keep: compute logits only for so many last tokens (0: for all), or for the
                positions in a tensor: (n,), (B, n), or bool (B, T).
        """
        if cache is not None:
            past_key_values = cache_among(past_key_values=past_key_values, cache=cache)
        if not torch.is_grad_enabled():  # as in generate()
            self._find_made_cache(past_key_values)
        if not torch.is_grad_enabled() and self.may_be_step(
            input_ids,
            logits_to_keep,
            *(attention_mask, inputs_embeds, encoder_hidden_states, encoder_attention_mask, labels),
            **kwargs,
        ):
            args = input_ids, position_ids, past_key_values, use_cache, logits_to_keep
            outputs = self._step(*args)
            if outputs is not None:
                return outputs
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "past_key_values": past_key_values,
            "inputs_embeds": inputs_embeds,
            "encoder_hidden_states": encoder_hidden_states,
            "encoder_attention_mask": encoder_attention_mask,
            "use_cache": use_cache,
        }
        return self._by_modules(inputs, labels, logits_to_keep, **kwargs)

    def _by_modules(
        self, inputs: dict[str, Any], labels: Tensor | None, logits_to_keep: int | Tensor, **kwargs
    ) -> CausalLMOutputWithCrossAttentions:
        """What `forward` makes of the model's arguments and of its own."""
        of_model = kwargs
        if labels is not None and self.loss_function is not causal_lm_loss:
            of_model = without_those_of_loss(kwargs, self.loss_function)
        outputs: BaseModelOutputWithPast = self.model(**inputs, **of_model)
        hidden_states = slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep)
        loss = None
        if labels is not None and self._makes_no_logits():
            logits = None
            loss = linear_causal_lm_loss(hidden_states, self.lm_head.weight, labels, **kwargs)
        else:
            logits = project(self.lm_head, hidden_states)
            if labels is not None:
                loss = self.loss_function(
                    logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
                )
        cross_attentions = None
        if self.config.add_cross_attention and outputs.attentions is not None:
            cross_attentions = ()  # of no layer
        return CausalLMOutputWithCrossAttentions(  # which EncoderDecoderModel asks for
            loss=loss,
            logits=logits,
            **{CACHE: getattr(outputs, CACHE)},
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            cross_attentions=cross_attentions,
        )

    def _makes_no_logits(self) -> bool:
        """Whether the loss is computed without them: in training, if the config says so, unless
        another module or loss stands where the usual ones do, or a hook waits for the logits or
        their gradient.
        """
        head = self.lm_head
        return (
            self.config.fuse_linear_cross_entropy
            and self.training
            and self.loss_function is causal_lm_loss
            and is_bare(head)
            and head._parameters["bias"] is None
            and type(head.weight) is nn.Parameter
        )


def slice_logits_to_keep(hidden_states: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    """The hidden states (B, T, C) whose logits are wanted, as in transformers' newest releases."""
    if isinstance(logits_to_keep, int):
        return hidden_states[:, -logits_to_keep:]
    if not isinstance(logits_to_keep, Tensor):
        raise ValueError(
            "logits_to_keep must be a number of last tokens or a tensor of their places, got "
            f"{type(logits_to_keep).__name__}"
        )
    if logits_to_keep.dim() == 1:
        return hidden_states[:, logits_to_keep]
    if logits_to_keep.dtype == torch.bool:
        return hidden_states[logits_to_keep]
    return hidden_states.take_along_dim(logits_to_keep[..., None], dim=1)


class LinearAttentionForMaskedLM(LinearAttentionPreTrainedModel):
    """A bidirectional encoder (is_causal=False) that fills in masked tokens."""

    _tied_weights_keys = LinearAttentionForCausalLM._tied_weights_keys
    _tp_plan = LinearAttentionForCausalLM._tp_plan
    _pp_plan = LinearAttentionForCausalLM._pp_plan
    _fsdp_plan = LinearAttentionForCausalLM._fsdp_plan

    def __init__(self, config: LinearAttentionConfig):
        if config.is_causal:
            raise ValueError(
                "a masked language model needs a config with is_causal=False, got is_causal=True"
            )
        super().__init__(config)
        self.model = LinearAttentionModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.loss_function = causal_lm_loss
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: AttentionMask = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs,
    ) -> MaskedLMOutput:
        """As `LinearAttentionModel.forward`, then logits (B, T, vocab_size).

        Args:
            labels: (B, T), the tokens that are hidden in input_ids, -100 elsewhere.
        """
        outputs: BaseModelOutputWithPast = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        logits = project(self.lm_head, outputs.last_hidden_state)
        loss = None
        if labels is not None:  # of the tokens themselves, not of those that follow
            loss = self.loss_function(
                logits=logits,
                labels=None,
                vocab_size=self.config.vocab_size,
                shift_labels=labels,
                **kwargs,
            )
        return MaskedLMOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


def of_whole_sequences(forward: Callable) -> Callable:
    """The forward of a head that can't do with a piece of its input."""

    @functools.wraps(forward)
    def checked(self, *args, **kwargs):
        if kwargs.pop("sequence_group", None) is not None:
            raise ValueError(f"sequence_group must be None for {type(self).__name__}")
        return forward(self, *args, **kwargs)

    checked.takes_no_pieces = True  # type: ignore[attr-defined]
    return checked


class LinearAttentionForSequenceClassification(
    GenericForSequenceClassification, LinearAttentionPreTrainedModel
):
    """One label for a sequence, from its last real token: logits (B, num_labels)."""

    forward = of_whole_sequences(GenericForSequenceClassification.forward)


class LinearAttentionForTokenClassification(
    GenericForTokenClassification, LinearAttentionPreTrainedModel
):
    """One label for each token: logits (B, T, num_labels)."""

    forward = of_whole_sequences(GenericForTokenClassification.forward)


class LinearAttentionForQuestionAnswering(
    GenericForQuestionAnswering, LinearAttentionPreTrainedModel
):
    """The first and the last token of an answer: start_logits and end_logits (B, T)."""

    forward = of_whole_sequences(GenericForQuestionAnswering.forward)


AUTO_CLASSES = {
    AutoModel: LinearAttentionModel,
    AutoModelForCausalLM: LinearAttentionForCausalLM,
    AutoModelForMaskedLM: LinearAttentionForMaskedLM,
    AutoModelForSequenceClassification: LinearAttentionForSequenceClassification,
    AutoModelForTokenClassification: LinearAttentionForTokenClassification,
    AutoModelForQuestionAnswering: LinearAttentionForQuestionAnswering,
}
register_models(LinearAttentionConfig, AUTO_CLASSES)

__all__ = ["LinearAttentionPreTrainedModel", *(model.__name__ for model in AUTO_CLASSES.values())]
