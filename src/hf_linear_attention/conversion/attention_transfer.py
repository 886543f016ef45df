# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The first stage after a conversion: each linear layer learns to reproduce the softmax attention
that it replaced.

Zhang et al., "The Hedgehog & the Porcupine", arXiv 2402.04347, and "LoLCATs", arXiv 2410.10254.
Each layer computes both attentions of the same queries, keys and values, and passes on that of
softmax. So the model computes what the original did, no layer sees another's error, and all of them
learn in one forward, without a second model. Only what softmax attention has not is trained:
feature maps, mixing factors, decays, gates, norms.

The loss is the mean over layers of |y - y'|^2 / |y'|^2, y the layer's output, behind its last
projection, and y' that of softmax attention, the squares summed over all real tokens. Layers'
outputs differ in size by orders of magnitude: divided, 0 is exact and 1 as good as no output, in
every layer, and a limit on the gradient's norm does not favour one. To Adam, whose steps don't
depend on a loss's scale, it is the papers' mean squared error.

Shapes: B batch, T time, C hidden size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..mixers.softmax import SoftmaxAttention
from ..mixers.window import WindowedAttention
from ..model.modeling import LinearAttentionForCausalLM
from ..ops.numerics import at_least_float32, without_autocast
from ..ops.tokens import Tokens
from .softmax_form import (
    NORMS,
    PROJECTIONS,
    attention_of,
    attention_replaced,
    check_converted,
    linear_layers,
    softmax_forms,
    types_before,
)

SHARED = ("q_proj", "k_proj", "v_proj")
FSDP1 = "FullyShardedDataParallel"  # a module around those whose weights it shares


def new_parameters(model: LinearAttentionForCausalLM) -> dict[str, nn.Parameter]:
    """What linear layers have and softmax attention has not, by name: as `new` in the report."""
    return {
        f"model.layers.{i}.self_attn.{name}": x
        for i in linear_layers(model.config)
        for name, x in attention_of(model, i).named_parameters()
        if name.split(".")[0] not in PROJECTIONS + NORMS
    }


def relative_error(y: Tensor, expected: Tensor, key_mask: Tensor | None) -> Tensor:
    """|y - expected|^2 / |expected|^2, (B, T, C) each, over the tokens of key_mask (B, T)."""
    y, expected = at_least_float32(y), at_least_float32(expected)
    if key_mask is not None:
        y, expected = (x.masked_fill(~key_mask[..., None], 0) for x in (y, expected))
    size = expected.square().sum()
    return (y - expected).square().sum() / size.clamp(min=torch.finfo(size.dtype).tiny)


class WithGradients(torch.autograd.Function):
    """(loss (), its gradients, the parameters that these are of) -> loss. What it was computed by
    is not kept.
    """

    @staticmethod
    def forward(ctx, loss: Tensor, gradients: tuple[Tensor, ...], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx, dloss: Tensor):
        return None, None, *(dloss.to(x.dtype) * x for x in ctx.gradients)


class Recalled(nn.Module):
    """In the place of a projection: what that has given, once."""

    def __init__(self, out_features: int):
        super().__init__()
        self.out_features = out_features
        self.output: Tensor | None = None

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, out_features)"""
        output, self.output = self.output, None
        assert output is not None
        return output


@contextmanager
def outputs_of(modules: dict[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """What modules give, by their names."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module, args: Any, output: Tensor) -> None:
        outputs[name] = output

    handles = [x.register_forward_hook(partial(keep, name)) for name, x in modules.items()]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def frozen_keys(mixer: nn.Module) -> Iterator[None]:
    """Lets a window compute no gradients for keys and values that nothing trained gives."""
    if not isinstance(mixer, WindowedAttention) or mixer.has_conv:
        yield
        return
    window = mixer.window
    mixer.window = replace(window, learns_keys=False)
    try:
        yield
    finally:
        mixer.window = window


class BothAttentions(nn.Module):
    """A converted layer's attention and the softmax attention that it was, whose output is passed
    on. The error of the other is appended to `errors`.

    Where gradients are wanted, they are computed at once, and what they need of this layer is freed
    before the next one begins: memory grows as the tokens, as with gradient checkpointing, and
    nothing is computed twice. That can be, since nothing behind the layer depends on its
    parameters.
    """

    def __init__(
        self,
        mixer: nn.Module,
        softmax: SoftmaxAttention,
        new: list[nn.Parameter],
        errors: list[Tensor],
    ):
        super().__init__()
        self.mixer, self.softmax, self.errors = mixer, softmax, errors
        self.new = new
        self.head_dim = softmax.head_dim
        self.projections = {name: getattr(mixer, name) for name in SHARED}
        for name in SHARED:
            setattr(softmax, name, Recalled(getattr(softmax, name).out_features))

    def forward(self, hidden_states: Tensor, tokens: Tokens, **kwargs) -> tuple[Tensor, None]:
        """hidden_states (B, T, C) -> (B, T, C)"""
        hidden_states = hidden_states.detach()
        with outputs_of(self.projections) as projected, frozen_keys(self.mixer):
            y, _ = self.mixer(hidden_states, tokens=tokens, **kwargs)
        for name, x in projected.items():
            getattr(self.softmax, name).output = self._heads_of_softmax(name, x, hidden_states)
        with torch.no_grad():
            expected, _ = self.softmax(hidden_states, tokens=tokens, **kwargs)
        error = relative_error(y, expected, tokens.key_mask)
        new = [x for x in self.new if x.requires_grad]
        if torch.is_grad_enabled() and new:
            with without_autocast(error.device.type):
                gradients = torch.autograd.grad(error, new, materialize_grads=True)
            error = WithGradients.apply(error.detach(), gradients, *new)
        self.errors.append(error)
        return expected, None

    def _heads_of_softmax(self, name: str, x: Tensor, hidden_states: Tensor) -> Tensor:
        """What a projection gave, be it one row of packed sequences, as (B, T, features); of heads
        that were repeated one each.
        """
        x = x.detach().view(*hidden_states.shape[:2], -1)
        G = x.shape[-1] // getattr(self.softmax, name).out_features
        return x if G == 1 else x.unflatten(-1, (-1, G, self.head_dim))[..., 0, :].flatten(2)


class AttentionTransfer:
    """What `AttentionTransferTrainer` adds to a model while it runs: for a loop of your own.

        transfer = AttentionTransfer(model)
        with transfer.only_new_parameters():
            with transfer.running():
                model(input_ids).loss.backward()

    Args:
        model: a converted model, whose projections have not been trained since.
        original: the model that was converted, where it has what the converted one has not:
            sliding windows, or norms of q and k that the report lists as left out. It is not kept.

    Raises:
        ValueError: the model is none of this package, it has nothing to be trained, or `original`
            is needed.
    """

    def __init__(self, model: LinearAttentionForCausalLM, original: PreTrainedModel | None = None):
        check_converted(model)
        self.model = model
        self.types = types_before(model.config, original)
        self.errors: list[Tensor] = []
        self.new = new_parameters(model)
        if not self.new:
            raise ValueError(
                "model must have linear layers with parameters that softmax attention has not; "
                f"with feature_map={model.config.feature_map!r} and layer_types="
                f"{model.config.layer_types} it has none, so there is nothing to transfer: go on "
                "with the next stage"
            )
        self.both: dict[int, BothAttentions] = {}
        for i, form in softmax_forms(model, original).items():
            new = [x for name, x in self.new.items() if name.startswith(f"model.layers.{i}.")]
            self.both[i] = BothAttentions(attention_of(model, i), form, new, self.errors)

    @contextmanager
    def running(self) -> Iterator[None]:
        """The model passes on what softmax attention gives, and its loss is the mean of the layers'
        errors. Its logits are the original's.

        Raises:
            ValueError: gradient checkpointing is on, or ranks share the weights.
        """
        check_whole_weights(self.model)
        if any(getattr(x, "gradient_checkpointing", False) for x in self.model.modules()):
            raise ValueError(
                "gradient_checkpointing must be off in attention transfer, which takes the "
                "gradients of each layer before it begins with the next, and computes nothing again"
            )

        def with_loss(module: nn.Module, args: Any, output: Any) -> CausalLMOutputWithPast:
            """An output in which DistributedDataParallel finds the loss."""
            device = output.logits.device
            loss = torch.stack([error.to(device) for error in self.errors]).mean()
            self.errors.clear()
            return CausalLMOutputWithPast(loss=loss, logits=output.logits)

        self.errors.clear()
        handle = self.model.register_forward_hook(with_loss)
        try:
            with attention_replaced(self.model, self.both, self.types):
                yield
        finally:
            handle.remove()

    @contextmanager
    def only_new_parameters(self) -> Iterator[None]:
        """Of the model's parameters only those are trained that softmax attention has not;
        afterwards all that were.
        """
        before = {x: x.requires_grad for x in self.model.parameters()}
        self.model.requires_grad_(False)
        for x in self.new.values():
            x.requires_grad_(True)
        try:
            yield
        finally:
            for x, requires_grad in before.items():
                x.requires_grad_(requires_grad)


class AttentionTransferTrainer(Trainer):
    """A Trainer whose loss is what linear layers give beside what softmax attention gave in their
    place, the mean over layers; labels are not used. All parameters but the new ones are frozen
    while it trains. Checkpoints are the model's own. Errors are relative to what a forward has
    seen: of several processes, or accumulated steps, the mean counts.

    Args:
        original: as of `AttentionTransfer`.
        others: as of Trainer.

    Raises:
        ValueError: as `AttentionTransfer`; or DataParallel would be used, which can't gather it.
    """

    def __init__(
        self,
        model: LinearAttentionForCausalLM,
        args: TrainingArguments | None = None,
        *others: Any,
        original: PreTrainedModel | None = None,
        **kwargs: Any,
    ):
        super().__init__(model, args, *others, **kwargs)
        check_one_device(self.args)
        self.transfer = AttentionTransfer(self.model, original)
        self.model_accepts_loss_kwargs = False  # the loss is a mean, not a sum over labels

    def train(self, *args: Any, **kwargs: Any) -> Any:
        with self.transfer.only_new_parameters():
            return super().train(*args, **kwargs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        check_whole_weights(model)  # where nothing but the whole of it is wrapped
        inputs = {name: x for name, x in inputs.items() if name != "labels"}
        with self.transfer.running():
            # nobody needs the logits
            outputs = model(**inputs, use_cache=False, logits_to_keep=1)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def check_whole_weights(model: nn.Module) -> None:
    """Raises a ValueError where ranks share the weights. Under FSDP the parameters that a layer
    computes with are others than the model's, which would never get a gradient.
    """
    is_shared = any(hasattr(x, "device_mesh") for x in model.parameters())
    if is_shared or any(type(x).__name__ == FSDP1 for x in model.modules()):
        raise ValueError(
            "model must have its weights whole in attention transfer, which takes the gradients of "
            "each layer while it runs; they are shared by ranks, as by FSDP or tensor parallelism: "
            "use DistributedDataParallel"
        )


def check_one_device(args: TrainingArguments) -> None:
    """Raises a ValueError where a Trainer would use DataParallel."""
    if args.n_gpu > 1:
        raise ValueError(
            f"args must be of a process with one device, got {args.n_gpu}: start one for each by "
            "`accelerate launch`"
        )
