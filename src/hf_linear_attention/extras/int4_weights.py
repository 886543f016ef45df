# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Weights of 4 bits in half a byte each. torchao's IntxWeightOnlyConfig, which quantises anywhere,
keeps each in a whole byte; its Int4WeightOnlyConfig packs two, and quantises on GPUs only.
"""

from collections import Counter
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel, TorchAoConfig

from ..model.configuration import LinearAttentionConfig

# Where classes are from whose projections are ours to call; the second of a checkpoint's own code.
OF_OURS = ("hf_linear_attention.", "transformers_modules.", "torch.nn.")


def pack_int4_weights(model: nn.Module) -> int:
    """Makes the 4-bit weights of a model what Int4WeightOnlyConfig would have them: half as large.
    A model of Transformers is saved, and loaded again, as one quantised by that.

        config = IntxWeightOnlyConfig(torch.int4, PerGroup(32), scale_dtype=torch.bfloat16)
        model = AutoModelForCausalLM.from_pretrained(
            name, quantization_config=TorchAoConfig(config)
        )
        pack_int4_weights(model)
        model.save_pretrained("int4")

    Values and scales stay what they are; what zero points add is rounded to the scales' dtype.

    Args:
        model: with weights (torchao's IntxUnpackedToInt8Tensor) of torch.int4 in groups of an even
            number of inputs, without quantised activations. Others stay as they are.

    Returns:
        How many weights were packed.

    Raises:
        ValueError: there is no such weight. ImportError: torchao is not installed.
    """
    from torchao.quantization import Int4WeightOnlyConfig

    not_here = _others_multiply(model)
    places = [
        (module, name, weight)
        for module in model.modules()
        for name, weight in module.named_parameters(recurse=False)
        if _can_be_packed(weight) and module not in not_here
    ]
    if not places:
        raise ValueError(
            "model must have weights of torchao's IntxWeightOnlyConfig(torch.int4, PerGroup(n)) "
            "with an even n, got none"
        )
    packed: dict[Any, nn.Parameter] = {}  # modules may share a weight
    for module, name, weight in places:
        if weight not in packed:
            packed[weight] = nn.Parameter(_packed(weight), requires_grad=False)
        setattr(module, name, packed[weight])
    if isinstance(model, PreTrainedModel) and hasattr(model, "hf_quantizer"):
        sizes = Counter(weight.block_size[1] for weight in packed)
        (size, _), *_ = sizes.most_common()  # only said: each weight is saved with its own
        _say_so(model, TorchAoConfig(Int4WeightOnlyConfig(group_size=size)))
    return len(packed)


def _others_multiply(model: nn.Module) -> set[nn.Module]:
    """The layers of this package's models that others call, as Transformers calls that behind a
    classifier, and a decay of a user's own its projections: there torchao multiplies, which knows
    no packed weights on a CPU.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type != LinearAttentionConfig.model_type or not isinstance(model, PreTrainedModel):
        return set()
    callers = [x for x in model.base_model.modules() if type(x).__module__.startswith(OF_OURS)]
    called = {child for caller in callers for child in caller.children()}
    return {*model.modules()} - called - {model.get_output_embeddings()}


def _can_be_packed(weight: Any) -> bool:
    return (
        type(weight).__name__ == "IntxUnpackedToInt8Tensor"
        and str(weight.target_dtype) == "torch.int4"
        and weight.activation_quantization is None
        and weight.dim() == 2
        and weight.block_size[0] == 1
        and weight.block_size[1] % 2 == 0
    )


def _packed(weight: Any) -> Tensor:
    """An Int4Tensor: the earlier of two values lies in the lower bits of their byte."""
    from torchao.quantization import Int4Tensor

    low, high = weight.qdata.unflatten(-1, (-1, 2)).unbind(-1)
    added = -weight.zero_point.float() * weight.scale.float()
    return Int4Tensor(
        qdata=(low & 15) | (high << 4),
        scale=weight.scale.t().contiguous(),
        zero_point=added.to(weight.scale.dtype).t().contiguous(),
        block_size=list(weight.block_size),
        shape=weight.shape,
    )


def _say_so(model: PreTrainedModel, config: TorchAoConfig) -> None:
    """Has the model's config and its quantizer, by which it is saved, say how it is quantised."""
    before = model.hf_quantizer.quantization_config
    config.modules_to_not_convert = before.modules_to_not_convert
    config.include_input_output_embeddings = before.include_input_output_embeddings
    config.untie_embedding_weights = before.untie_embedding_weights
    model.hf_quantizer.quantization_config = config
    model.config.quantization_config = config
