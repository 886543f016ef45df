# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Checks that two processes make together, and say which hold: python two_ranks.py FOLDER"""

import copy
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from torchao.utils import TorchAOBaseTensor
from transformers import AutoModelForCausalLM, PreTrainedModel, TorchAoConfig
from transformers.distributed import DistributedConfig

from hf_linear_attention import (
    FeatureMap,
    LinearAttentionPreTrainedModel,
    register_feature_map,
    share_prompts,
    use_kernels,
)
from tiny import NEWER, VARIANTS, assert_near, random_ids, shallow, tiny_model
from upstream_models import ONE_OF_EACH, tiny_upstream

SIZES = {"vocab_size": 42}  # transformers 5.17 gathers logits of even numbers of words only


class PerFeature(FeatureMap):
    """exp(x w), with a weight for each feature of a head."""

    def __init__(self, num_heads: int, num_key_value_heads: int, head_dim: int):
        super().__init__(num_heads, num_key_value_heads, head_dim)
        self.weight = nn.Parameter(torch.empty(head_dim))

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight)

    def phi(self, x: Tensor) -> Tensor:
        return (x * self.weight).exp()


class PerFeatureOfAllHeads(PerFeature):
    has_parameters_per_head = False


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Whole, by name without what wrappers add."""
    whole = {}
    for name, parameter in model.named_parameters():
        x = parameter.grad
        whole[name.removeprefix("module.")] = x.full_tensor() if hasattr(x, "full_tensor") else x
    return whole


def assert_same_gradients(model: nn.Module, expected: nn.Module) -> None:
    actual = gradients(model)
    assert actual.keys() == gradients(expected).keys()
    for name, gradient in gradients(expected).items():
        assert_near(actual[name], gradient)


def memory_for(model: PreTrainedModel) -> dict[str, Tensor]:
    """What the model's cross attention reads, if it has one."""
    if not model.config.add_cross_attention:
        return {}
    return {"encoder_hidden_states": torch.randn(2, 5, 32, dtype=torch.float64)}


def saved_by_one(folder: Path, **kwargs) -> PreTrainedModel:
    """The same model on all ranks, and in `folder`."""
    model = tiny_model(**kwargs)
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    return model


def load_in_parallel(folder: Path, dtype=torch.float64, **kwargs) -> PreTrainedModel:
    config = DistributedConfig(tp_size=2, tp_plan="auto")
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, distributed_config=config, **kwargs
    ).eval()


# Tensor parallelism


def heads_are_shared(folder: Path, **kwargs) -> None:
    whole = saved_by_one(folder / "whole", **SIZES, **kwargs)
    ids, memory = random_ids(2, 9), memory_for(whole)
    expected = whole(ids, labels=ids, **memory)
    expected.loss.backward()

    model = load_in_parallel(folder / "whole")
    own, all_heads = (m.model.layers[0].self_attn.o_proj.weight for m in (model, whole))
    assert own.to_local().shape[1] == all_heads.shape[1] // 2
    outputs = model(ids, labels=ids, **memory)
    assert_near(outputs.logits, expected.logits)
    outputs.loss.backward()
    assert_same_gradients(model, whole)
    with torch.no_grad():  # Transformers multiplies in another way then
        assert_near(model(ids, **memory).logits, expected.logits)
    wanted = {"max_new_tokens": 6, "do_sample": False, **memory}
    assert torch.equal(model.generate(ids, **wanted), whole.generate(ids, **wanted))

    model.save_pretrained(folder / "saved")
    dist.barrier()
    loaded = AutoModelForCausalLM.from_pretrained(folder / "saved", dtype=torch.float64)
    for name, weight in whole.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight)


def is_quantised(module: nn.Module) -> bool:
    return isinstance(getattr(module, "weight", None), TorchAOBaseTensor)


def rounded(weight: Tensor) -> Tensor:
    """What torchao makes of a weight in int8, as numbers again."""
    linear = nn.Linear(*weight.shape[::-1], bias=False)
    linear.weight = nn.Parameter(weight.contiguous())
    quantize_(linear, Int8WeightOnlyConfig())
    return linear.weight.dequantize()


def quantised_heads_are_shared(folder: Path, **kwargs) -> None:
    whole = saved_by_one(folder, dtype=torch.float32, **SIZES, **kwargs)
    config = TorchAoConfig(Int8WeightOnlyConfig())
    model = load_in_parallel(folder, torch.float32, quantization_config=config)
    names = {name for name, module in model.named_modules() if is_quantised(module)}
    assert {name for name in model.tp_plan if name.endswith("proj")} <= {
        ".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names
    }
    for name in names:  # each rank has scales of its own for its columns
        weight = whole.get_submodule(name).weight.data
        halves = weight.chunk(2, dim=1) if name.endswith(("o_proj", "down_proj")) else [weight]
        weight.copy_(torch.cat([rounded(half) for half in halves], dim=1))
    ids, memory = random_ids(2, 9), {x: y.float() for x, y in memory_for(whole).items()}
    expected = whole(ids, **memory).logits
    assert_near(model(ids, **memory).logits, expected)
    with torch.no_grad():
        assert_near(model(ids, **memory).logits, expected)
        cache = model(ids[:, :5], **memory, use_cache=True).past_key_values
        steps = [model(token, past_key_values=cache).logits for token in ids[:, 5:].split(1, dim=1)]
        assert_near(torch.cat(steps, dim=1), expected[:, 5:])
    wanted = {"max_new_tokens": 6, "do_sample": False, **memory}
    assert torch.equal(model.generate(ids, **wanted), whole.generate(ids, **wanted))


def quantised_heads_that_are_too_few_are_refused(folder: Path) -> None:
    saved_by_one(folder, num_key_value_heads=1, dtype=torch.float32, **SIZES)
    config = TorchAoConfig(Int8WeightOnlyConfig())
    model = load_in_parallel(folder, torch.float32, quantization_config=config)
    with pytest.raises(ValueError, match="num_key_value_heads=1 must be a multiple of the 2"):
        model(random_ids(1, 3))


def unknown_ranks_are_refused(folder: Path) -> None:
    saved_by_one(folder, dtype=torch.float32, **SIZES)
    config = TorchAoConfig(Int8WeightOnlyConfig())
    model = load_in_parallel(folder, torch.float32, quantization_config=config)
    del model.model.layers[0].self_attn.k_proj.mesh_of_weight
    with pytest.raises(RuntimeError, match="to 4 heads has given 16 of its 32 features"):
        model(random_ids(1, 3))


def heads_that_are_too_few_are_refused(folder: Path) -> None:
    for layer_type in ("linear_attention", "full_attention"):
        name = folder / layer_type
        saved_by_one(name, num_key_value_heads=1, layer_types=[layer_type] * 3, **SIZES)
        model = load_in_parallel(name)
        with pytest.raises(ValueError, match="num_key_value_heads=1 must be a multiple of the 2"):
            model(random_ids(1, 3))


def an_undeclared_parameter_is_refused(folder: Path) -> None:
    saved_by_one(folder, feature_map="per_feature", **SIZES)
    model = load_in_parallel(folder)
    with pytest.raises(ValueError, match="PerFeature.has_parameters_per_head must be True"):
        model(random_ids(1, 3))


# Transformers' own models on our kernels


def in_ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def in_fsdp2(model: nn.Module) -> nn.Module:
    """Its layers, its base model and itself, which become of other classes."""
    for part in (*model.base_model.layers, model.base_model, model):
        fully_shard(part)
    return model


def changed_models_train_packed_as_others_do_rows(
    folder: Path, model_type: str, wrap: Callable[[nn.Module], nn.Module], is_wrapped_first: bool
) -> None:
    whole = tiny_upstream(model_type).train()
    parallel = copy.deepcopy(whole)
    if is_wrapped_first:
        parallel = wrap(parallel)
        report = use_kernels(parallel)
    else:
        report = use_kernels(parallel)
        parallel = wrap(parallel)
    assert report.changed and not report.left
    ids = random_ids(4, 9)
    loss_of_rows(whole, ids, input_ids=ids, use_cache=False).backward()
    own = ids[2 * dist.get_rank() :][:2]
    positions = torch.arange(9).repeat(1, 2)
    loss_of_rows(parallel, own, input_ids=own.view(1, -1), position_ids=positions).backward()
    expected = gradients(whole)
    for name, gradient in gradients(parallel).items():
        want = expected[name]
        atol = 2e-3 * want.abs().max().item()
        torch.testing.assert_close(gradient, want, rtol=0, atol=atol, msg=name)


def loss_of_rows(model: nn.Module, rows: Tensor, **inputs) -> Tensor:
    logits = model(**inputs).logits.view(*rows.shape, -1)[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


TENSOR_PARALLEL = (
    *("paper", "softmax", "dpfp", "aaren", "gated", "learned", "hybrid"),
    *("preset_t2r", "preset_performer", "preset_retnet", "preset_qwen3_next", *NEWER),
    *("preset_lightning", "per_channel", "mamba2_one_group", "preset_hgrn"),
    *("preset_gated_deltaproduct", "preset_comba", "preset_precond_gdn", "preset_precond_kda"),
)
# Layers whose norms, in float32, magnify each other's rounding.
SMALLER = {"preset_kimi_linear": {"initializer_range": 0.25}}
CROSS = {
    "add_cross_attention": True,
    "feature_map": "t2r",
    "normalizer": "gated_rms_norm",
    "num_key_value_heads": 2,
}
QUANTISED = {
    **{name: shallow(name) for name in ("paper", "dpfp", "aaren", "gated", "hybrid")},
    **{name: shallow(name) for name in ("preset_t2r", "preset_performer", *NEWER)},
    "conv": {"conv_kernel_size": 3},
    "cross": CROSS,
}


def ranks_read_their_prompts_once(
    folder: Path, make: Callable[[], nn.Module], wrap: Callable[[nn.Module], nn.Module]
) -> None:
    whole = make().train()
    parallel = copy.deepcopy(whole)
    if not isinstance(parallel, LinearAttentionPreTrainedModel):
        use_kernels(parallel)
    parallel = wrap(parallel)
    shared = share_prompts(parallel)
    ids = random_ids(4, 40)
    ids[:, :20] = ids[:1, :20]
    whole(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    own = ids[2 * dist.get_rank() :][:2]
    parallel(input_ids=own, labels=own, use_cache=False).loss.backward()
    assert shared.tokens_read == 60
    assert_same_gradients(parallel, whole)


CHECKS: dict[str, Callable[[Path], None]] = {
    **{
        f"heads_are_shared[{name}]": partial(
            heads_are_shared, **shallow(name), **SMALLER.get(name, {})
        )
        for name in TENSOR_PARALLEL
    },
    "heads_are_shared[per_feature]": partial(
        heads_are_shared, feature_map="per_feature_of_all_heads"
    ),
    "heads_are_shared[cross]": partial(heads_are_shared, **CROSS),
    **{
        f"quantised_heads_are_shared[{name}]": partial(quantised_heads_are_shared, **kwargs)
        for name, kwargs in QUANTISED.items()
    },
    **{
        f"changed_models_train[{model_type}-{wrap.__name__}-{is_wrapped_first}]": partial(
            changed_models_train_packed_as_others_do_rows,
            model_type=model_type,
            wrap=wrap,
            is_wrapped_first=is_wrapped_first,
        )
        for model_type in ONE_OF_EACH
        for wrap, is_wrapped_first in ((in_ddp, True), (in_fsdp2, True), (in_fsdp2, False))
    },
    **{
        f"prompts_are_read_once[{name}-{wrap.__name__}]": partial(
            ranks_read_their_prompts_once, make=make, wrap=wrap
        )
        for name, make in {
            "ours": partial(tiny_model, **VARIANTS["preset_gated_deltanet"]),
            "qwen3_5_text": partial(tiny_upstream, "qwen3_5_text"),
        }.items()
        for wrap in (in_ddp, in_fsdp2)
    },
    **{
        check.__name__: check
        for check in (
            heads_that_are_too_few_are_refused,
            quantised_heads_that_are_too_few_are_refused,
            unknown_ranks_are_refused,
            an_undeclared_parameter_is_refused,
        )
    },
}


def make_all_checks(rank: int, folder: Path) -> None:
    """In one of two processes, as torchrun would start it."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    # not where tests import this for the names of its checks
    register_feature_map("per_feature", PerFeature)
    register_feature_map("per_feature_of_all_heads", PerFeatureOfAllHeads)
    meeting = {"init_method": f"file://{folder}/meeting", "rank": rank, "world_size": 2}
    dist.init_process_group("gloo", timeout=timedelta(seconds=60), **meeting)
    for number, (name, check) in enumerate(CHECKS.items()):
        torch.manual_seed(0)
        check(folder / str(number))
        dist.barrier()
        if rank == 0:
            print(f"holds: {name}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    # Forks, since each would import all this again: it takes as long as half of the checks.
    torch.multiprocessing.start_processes(
        make_all_checks, (Path(sys.argv[1]),), nprocs=2, start_method="fork"
    )
