# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Checks that several processes make together, each of which has a part of the same sequences, and
say which hold: python shared_sequences.py FOLDER RANKS [CHECK...]
"""

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from hf_linear_attention import (
    LinearAttentionForMaskedLM,
    LinearAttentionForSequenceClassification,
    TokenTree,
    split_sequence,
    use_kernels,
)
from hf_linear_attention.mixers.parts import shared_attention
from hf_linear_attention.model.context_parallel import prepare, share_buffers, tell_group
from hf_linear_attention.releases import CACHE
from tiny import HYBRID, NEWER, VARIANTS, random_ids, shallow, tiny_model
from upstream_models import is_here, tiny_upstream

TOLERANCE = 1e-10
T = 16  # of rows of one sequence
HIDDEN = ((0, 5), (0, 6), (0, 9), (1, 3), (1, 8), (1, 9), (1, 10), (1, 11), (1, 15))
# Of packed rows: bounds at a cut and next to one, sequences of one token, and of several pieces.
LENGTHS = [(3, 1, 4, 9, 15), (16, 8, 1, 1, 6)]


def rows() -> dict[str, Tensor]:
    ids = random_ids(2, T)
    return {"input_ids": ids, "labels": ids.clone()}


def padded() -> dict[str, Tensor]:
    batch = rows()
    mask = torch.ones(2, T, dtype=torch.long)
    mask[tuple(zip(*HIDDEN, strict=True))] = 0
    mask[1, :2] = 0
    labels = batch["labels"].masked_fill(mask == 0, -100)  # some follow padding
    return {**batch, "labels": labels, "attention_mask": mask}


def packed(B: int = 1) -> dict[str, Tensor]:
    """Sequences in rows of 32 tokens, as DataCollatorWithFlattening makes them."""
    ids = random_ids(B, 32)
    positions = torch.stack([torch.cat([*map(torch.arange, x)]) for x in LENGTHS[:B]])
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(positions == 0, -100),
        "position_ids": positions,
    }


def by_numbers() -> dict[str, Tensor]:
    batch = packed(2)
    batch["seq_idx"] = (batch.pop("position_ids") == 0).cumsum(1)
    return batch


def by_bounds() -> dict[str, Tensor]:
    batch = packed(2)
    begins = (batch.pop("position_ids") == 0).flatten().nonzero()[:, 0]
    return {**batch, "cu_seq_lens_q": torch.cat([begins, torch.tensor([64])]).int()}


BATCHES: dict[str, Callable[[], dict[str, Tensor]]] = {
    "rows": rows,
    "padded": padded,
    "packed": packed,
    "packed_rows": partial(packed, 2),
    "by_numbers": by_numbers,
    "by_bounds": by_bounds,
}


def averaged_gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        found[name] = parameter.grad.clone()
        dist.all_reduce(found[name])
        found[name] /= dist.get_world_size()
    return found


def assert_equal(actual: Tensor, expected: Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    """But for rounding in float64, beside the largest number there is."""
    error = (actual - expected).abs().max().item() / max(1.0, expected.abs().max().item())
    assert error <= tolerance, f"{what}: {error:.2g}"


def assert_as_one(
    whole: nn.Module, model: nn.Module, batch: dict[str, Tensor], order: str, **others: Any
) -> None:
    """Loss, logits of real tokens, and gradients."""
    expected = whole(**batch, **others)
    expected.loss.backward()
    part = split_sequence(batch, order=order)
    actual = model(**part, **others)
    actual.loss.backward()
    assert_equal(actual.loss, expected.loss, "loss")
    if expected.logits is not None:
        is_real = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
        own = split_sequence({"logits": expected.logits, "is_real": is_real}, order=order)
        for row, want, real in zip(actual.logits, own["logits"], own["is_real"], strict=True):
            for token in real.nonzero()[:, 0]:
                assert_equal(row[token], want[token], "logits")
    gradients = averaged_gradients(model)
    for name, parameter in whole.named_parameters():
        assert_equal(gradients[name], parameter.grad, name)


def sequences_are_shared(
    batch: str, order: str, checkpointing: dict[str, Any] | None = None, **kwargs
) -> None:
    whole, model = tiny_model(**kwargs).train(), tiny_model(**kwargs).train()
    if checkpointing is not None:
        model.gradient_checkpointing_enable(checkpointing)
    assert_as_one(whole, model, BATCHES[batch](), order)


def a_few_queries_at_a_time(batch: str, order: str) -> None:
    before, shared_attention.MASK_ELEMENTS = shared_attention.MASK_ELEMENTS, 3 * 32
    sequences_are_shared(batch, order, **VARIANTS["hybrid"])
    shared_attention.MASK_ELEMENTS = before


def pieces_differ_in_length() -> None:
    for variant in ("gated", "hybrid"):
        whole, model = (tiny_model(**shallow(variant)) for _ in range(2))
        ids = random_ids(2, 9)
        assert_as_one(whole, model, {"input_ids": ids, "labels": ids}, "contiguous")


def cross_attention_is_shared() -> None:
    memory = torch.randn(2, 5, 32, dtype=torch.float64)
    assert_as_one(
        *(tiny_model(add_cross_attention=True) for _ in range(2)),
        *(rows(), "head_tail"),
        encoder_hidden_states=memory,
    )


def an_encoder_shares_sequences(order: str, **kwargs) -> None:
    fields = {"is_causal": False, "num_key_value_heads": 2, "conv_kernel_size": 3, **kwargs}
    whole, model = (tiny_model(LinearAttentionForMaskedLM, **fields) for _ in range(2))
    for batch in (rows(), padded()):
        labels = batch["labels"].masked_fill(batch["labels"] % 3 == 0, -100)
        assert_as_one(whole, model, {**batch, "labels": labels}, order)
        whole.zero_grad()
        model.zero_grad()


def no_logits_are_made() -> None:
    fields = {**shallow("gated"), "fuse_linear_cross_entropy": True}
    models = (tiny_model(**fields).train() for _ in range(2))
    assert_as_one(*models, packed(), "head_tail")


def a_given_number_of_labels_divides_the_sum() -> None:
    model, batch = tiny_model(), rows()
    expected = model(**batch, num_items_in_batch=20).loss
    loss = model(**split_sequence(batch), num_items_in_batch=20).loss.detach()
    dist.all_reduce(loss)
    assert_equal(loss, expected, "loss")


def buffers_are_cut_in_place_and_put_back() -> None:
    model, batch = tiny_model(), rows()
    expected, ids = model(**batch), batch["input_ids"].clone()
    hook = model.register_forward_pre_hook(tell_group, with_kwargs=True)
    names = list(batch)
    for group in (dist.group.WORLD, split_sequence(batch, order="head_tail")["sequence_group"]):
        batch = {**rows(), "positions": torch.arange(T)}
        kept = {batch["labels"]}
        options = {"buffers": list(batch.values()), "buffer_seq_dims": [1, 1, 0]}
        with share_buffers(group, **options, no_restore_buffers=kept):
            own = T // dist.get_world_size()
            assert all(batch[name].shape == (2, own) for name in names)
            assert batch["positions"].shape == (own,)
            assert_equal(model(**{n: batch[n] for n in names}).loss, expected.loss, "loss")
        assert torch.equal(batch["input_ids"], ids) and batch["labels"].shape == (2, own)
        assert torch.equal(batch["positions"], torch.arange(T))
    with share_buffers(dist.group.WORLD), pytest.raises(ValueError, match="label_smoothing_factor"):
        model(ids, shift_labels=ids)
    with pytest.raises(ValueError, match="tensor 1 of the batch must have a dimension 1"):
        with share_buffers(dist.group.WORLD, buffers=[ids, ids[:, 1:]], buffer_seq_dims=[1, 1]):
            pass
    with pytest.raises(ValueError, match="buffer_seq_dims must have a dimension for each of 1"):
        with share_buffers(dist.group.WORLD, buffers=[ids], buffer_seq_dims=[]):
            pass
    hook.remove()
    assert_equal(model(**rows()).loss, expected.loss, "loss")


def groups_of_a_mesh_share_their_sequences() -> None:
    """Of four ranks two share sequences, where FSDP2 divides parameters, and two the heads."""
    groups = [dist.new_group([tp, 2 + tp]) for tp in range(2)]
    group = groups[dist.get_rank() % 2]
    folder = Path(os.environ["FOLDER_OF_CHECKS"]) / "of_a_mesh"
    whole = tiny_model(vocab_size=42, **shallow("hybrid"))
    if dist.get_rank() == 0:
        whole.save_pretrained(folder)
    dist.barrier()
    config = DistributedConfig(tp_size=2, fsdp_size=2, tp_plan="auto")
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, distributed_config=config
    )
    own = model.model.layers[0].self_attn.o_proj.weight
    assert own.to_local().numel() == own.numel() // 4
    batch = packed(2)
    expected = whole(**batch).loss
    expected.backward()
    actual = model(**split_sequence(batch, group, order="head_tail")).loss
    actual.backward()
    assert_equal(actual, expected, "loss")
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.full_tensor()
        assert_equal(gradient, dict(whole.named_parameters())[name].grad, name)


def what_can_not_be_shared_is_refused() -> None:
    ids, ranks = random_ids(2, T), dist.get_world_size()
    part = split_sequence({"input_ids": ids})
    of_all = {"use_cache": False, "num_items_in_batch": torch.tensor(9), "labels": None}
    assert split_sequence({"input_ids": ids, **of_all}).items() >= of_all.items()
    own = T // ranks
    cases: list[tuple[str, Callable[[], Any]]] = [
        (
            r"sequence_group must be None .*\['full_attention'.* got 'eager'",
            lambda: tiny_model(**VARIANTS["hybrid"], attn_implementation="eager")(**part),
        ),
        (
            f"{CACHE} must be None with sequence_group",
            lambda: tiny_model()(
                **part, past_key_values=tiny_model()(ids, use_cache=True).past_key_values
            ),
        ),
        (
            "sequence_group must be None for LinearAttentionForSeq",
            lambda: tiny_model(LinearAttentionForSequenceClassification, pad_token_id=0)(**part),
        ),
        (
            "attention_mask must hide nothing where sequences are packed",
            lambda: tiny_model()(
                **part,
                attention_mask=torch.tensor([[dist.get_rank()] * own] * 2),
                seq_idx=torch.arange(own).expand(2, -1),
            ),
        ),
        (
            "packed sequences and is_causal=False",
            lambda: tiny_model(LinearAttentionForMaskedLM, is_causal=False)(
                **part, seq_idx=torch.arange(own).expand(2, -1)
            ),
        ),
        (
            "cu_seq_lens_q must be of the tokens of all ranks, B S = 32",
            lambda: tiny_model()(**part, cu_seq_lens_q=torch.tensor([0, own])),
        ),
        (
            "encoder_hidden_states must be None with packed sequences",
            lambda: tiny_model(add_cross_attention=True)(
                **part,
                encoder_hidden_states=torch.randn(2, 5, 32, dtype=torch.float64),
                seq_idx=torch.arange(own).expand(2, -1),
            ),
        ),
        (
            "sequence_group must be None with rope_type='dynamic'",
            lambda: tiny_model(
                **VARIANTS["hybrid"],
                rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
            )(**part),
        ),
        (
            "as many rows, and say in one way",
            lambda: tiny_model()(
                **part,
                seq_idx=torch.arange(own).expand(2, -1) if dist.get_rank() == 0 else None,
            ),
        ),
        (
            "as many tokens, a multiple of 2",
            lambda: tiny_model()(
                ids[:, : 2 + 2 * dist.get_rank()],
                sequence_group=split_sequence({}, order="head_tail")["sequence_group"],
            ),
        ),
        (
            "must have a dimension 1 of as many tokens",
            lambda: split_sequence({"input_ids": ids, "labels": ids[:, 1:]}),
        ),
        (
            "must have a dimension 1 of as many tokens",
            lambda: split_sequence({"input_ids": ids[:, : ranks - 1]}),
        ),
        (
            f"input_ids must have a multiple of {2 * ranks} tokens .* got {T - 2}: pad them",
            lambda: split_sequence({"input_ids": ids[:, 2:]}, order="head_tail"),
        ),
        (
            r"order must be one of \['contiguous', 'head_tail'\], got 'zigzag'",
            lambda: split_sequence({"input_ids": ids}, order="zigzag"),
        ),
    ]
    for message, call in cases:
        with pytest.raises(ValueError, match=message):
            call()
    assert tiny_model()(**part, use_cache=True).past_key_values is None


def gradient_or_zeros(parameter: Tensor) -> Tensor:
    """Of experts that no token has chosen, say."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def changed_models_share_sequences(model_type: str, batch: str, order: str) -> None:
    """Transformers' models after `use_kernels`; parts of some compute in float32 always."""
    whole, model = (tiny_upstream(model_type).double() for _ in range(2))
    for one in (whole, model):
        use_kernels(one)
    assert model.supports_context_parallel and model.order_of_pieces() in ORDERS
    inputs = BATCHES[batch]()
    expected = whole(**inputs, use_cache=False).loss
    expected.backward()
    actual = model(**split_sequence(inputs, order=order)).loss
    actual.backward()
    tolerance = 1e-6 if model_type in IN_FLOAT32 else TOLERANCE
    assert_equal(actual, expected, "loss", tolerance)
    gradients = {name: gradient_or_zeros(x) for name, x in model.named_parameters()}
    for name, parameter in whole.named_parameters():
        dist.all_reduce(gradients[name])
        gradient = gradients[name] / dist.get_world_size()
        assert_equal(gradient, gradient_or_zeros(parameter), name, tolerance)


def compiled_models_share_sequences() -> None:
    """In graphs that end where ranks exchange something; those too whose heads hand nothing on."""
    for name, order in (("hybrid", "head_tail"), ("mamba2", "contiguous")):
        whole, model = (
            tiny_model(**shallow(name)) if name in VARIANTS else tiny_upstream(name).double()
            for _ in range(2)
        )
        for one in (whole, model):
            use_kernels(one) if name not in VARIANTS else None
        compiled = torch.compile(model, backend="eager")
        for seed in range(2):
            batch = {k: x.roll(seed, 1) for k, x in rows().items()}
            expected = whole(**batch, use_cache=False).loss
            actual = compiled(**split_sequence(batch, order=order), use_cache=False).loss
            assert_equal(actual, expected, name, 1e-6)  # compiled losses are of float32
        assert_equal(compiled(**batch, use_cache=False).loss, expected, f"{name} alone", 1e-6)


def ulysses_is_refused() -> None:
    """DeepSpeed's, which would cut states off, where Accelerate does not know of them."""
    accelerator = SimpleNamespace(parallelism_config=SimpleNamespace(sp_size=2))
    model = tiny_upstream("falcon_h1")
    use_kernels(model)
    for each in (model, tiny_model()):
        with pytest.raises(ValueError, match=r"sp_size must be 1 for \['.*ForCausalLM'\]"):
            Accelerator._prepare_deepspeed(accelerator, each)


def an_accelerator_tells_changed_models() -> None:
    """Those too whose heads hand nothing on."""
    group = SimpleNamespace(get_group=lambda: dist.group.WORLD)
    for model_type in ("mamba2", "qwen3_5_text"):
        model = tiny_upstream(model_type).double()
        use_kernels(model)
        expected = model(**rows(), use_cache=False).loss
        accelerator = SimpleNamespace(torch_device_mesh={"cp": group})
        assert prepare(accelerator, (model, "an optimizer"))
        batch = rows()
        tensors = {"buffers": list(batch.values()), "buffer_seq_dims": [1, 1]}
        with accelerator._cp_context(**tensors):
            assert_equal(model(**batch).loss, expected, model_type, 1e-6)
        assert_equal(model(**batch, use_cache=False).loss, expected, model_type)


def changed_models_refuse_what_they_can_not_share() -> None:
    part = split_sequence(rows())
    for model_type, changes, why in (
        ("lfm2", {}, "its layers are of no family whose ranks can"),
        ("qwen3_5_text", {"attn_implementation": "eager"}, "need attn_implementation='sdpa'"),
        ("qwen3_next", {"output_router_logits": True}, "output_router_logits"),
    ):
        model = tiny_upstream(model_type, **changes)
        use_kernels(model)
        assert not model.supports_context_parallel
        with pytest.raises(ValueError, match=f"sequence_group must be None for .*{why}"):
            model(**part)
    first = dist.new_group([0])
    if dist.get_rank() > 0:
        with pytest.raises(ValueError, match=r"group must be one that rank [1-3] is in, .* \[0\]"):
            split_sequence(rows(), first)
    tree = TokenTree((T // dist.get_world_size(),), (-1,))
    for model_type in ("qwen3_5_text", "mamba2"):
        model = tiny_upstream(model_type)
        use_kernels(model)
        with pytest.raises(ValueError, match="sequence_group must be None with a tree"):
            model(**part, tree=tree)
    model = tiny_upstream("qwen3_5_text")
    with use_kernels(model):
        model.loss_function = torch.nn.functional.cross_entropy
        with pytest.raises(ValueError, match="the loss of Qwen3_5ForCausalLM is not of this"):
            model(**part)
    assert not model.supports_context_parallel


ORDERS = ("contiguous", "head_tail")
# Of each kind of state one, that runs over all batches and orders.
KINDS = ("dpfp", "aaren", "gated", "hybrid", "preset_hgrn", *NEWER)
CHECKPOINTING = {"reentrant": True, "not_reentrant": False}
SHARED = {
    f"sequences_are_shared[{name}-{batch}-{order}]": partial(
        sequences_are_shared, batch, order, **shallow(name)
    )
    for name in VARIANTS
    for batch in BATCHES
    for order in ORDERS
    if name in KINDS or (batch, order) in (("padded", "contiguous"), ("packed_rows", "head_tail"))
}
OF_FOUR = {
    f"sequences_are_shared[{name}-{batch}-{order}]"
    for name in KINDS
    for batch, order in (
        *(("rows", "head_tail"), ("padded", "contiguous")),
        *(("packed", "head_tail"), ("packed_rows", "contiguous")),
    )
}
UPSTREAM = ("qwen3_5_text", "mamba2", "qwen3_next", "olmo_hybrid", "nemotron_h", "kimi_linear")
UPSTREAM += ("qwen3_5_moe_text", "bamba", "falcon_h1", "zamba2", "granitemoehybrid", "minimax")
UPSTREAM += ("bailing_hybrid", "lara_mini")
IN_FLOAT32 = ("mamba2", "nemotron_h", "kimi_linear", "bailing_hybrid", "lara_mini")
CHECKS: dict[str, Callable[[], None]] = {
    **{
        f"changed_models_share_sequences[{name}-{batch}-{order}]": partial(
            changed_models_share_sequences, name, batch, order
        )
        for name in filter(is_here, UPSTREAM)
        for batch, order in (("packed_rows", "head_tail"), ("padded", "contiguous"))
    },
    **SHARED,
    **{
        f"with_checkpoints[{variant}-{name}]": partial(
            sequences_are_shared,
            *("packed", "head_tail"),
            checkpointing={"use_reentrant": is_reentrant},
            **VARIANTS[variant],
        )
        for variant in ("gated", "hybrid")
        for name, is_reentrant in CHECKPOINTING.items()
    },
    **{
        f"a_few_queries_at_a_time[{batch}-{order}]": partial(a_few_queries_at_a_time, batch, order)
        for batch, order in (("padded", "contiguous"), ("packed_rows", "head_tail"))
    },
    **{
        f"an_encoder_shares_sequences[{name}-{order}]": partial(
            an_encoder_shares_sequences, order, **kwargs
        )
        for name, kwargs in {
            "linear": {},
            "hybrid": {"layer_types": HYBRID, "sliding_window": 5},
        }.items()
        for order in ORDERS
    },
    **{
        check.__name__: check
        for check in (
            pieces_differ_in_length,
            cross_attention_is_shared,
            no_logits_are_made,
            a_given_number_of_labels_divides_the_sum,
            buffers_are_cut_in_place_and_put_back,
            what_can_not_be_shared_is_refused,
            an_accelerator_tells_changed_models,
            compiled_models_share_sequences,
            ulysses_is_refused,
            changed_models_refuse_what_they_can_not_share,
        )
    },
}
OF_A_MESH = "groups_of_a_mesh_share_their_sequences"
CHECKS_OF = {
    2: tuple(CHECKS),
    4: tuple(name for name in CHECKS if name not in SHARED or name in OF_FOUR),
}
CHECKS[OF_A_MESH] = groups_of_a_mesh_share_their_sequences
CHECKS_OF[4] += (OF_A_MESH,)
FIRST = (
    "changed_models_share_sequences[qwen3_5_text-packed_rows-head_tail]",
    "sequences_are_shared[preset_gated_deltanet-packed_rows-head_tail]",
    "sequences_are_shared[hybrid-padded-contiguous]",
    "what_can_not_be_shared_is_refused",
)


def make_checks(rank: int, folder: Path, ranks: int, names: list[str]) -> None:
    """In one of several processes, as torchrun would start it."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ["FOLDER_OF_CHECKS"] = str(folder)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    meeting = {"init_method": f"file://{folder}/meeting", "rank": rank, "world_size": ranks}
    dist.init_process_group("gloo", timeout=timedelta(seconds=60), **meeting)
    for name in names:
        torch.manual_seed(0)
        CHECKS[name]()
        dist.barrier()
        if rank == 0:
            print(f"holds: {name}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    folder, ranks, *names = sys.argv[1:]
    arguments = Path(folder), int(ranks), names or list(CHECKS_OF[int(ranks)])
    # Forks, since each would import all this again.
    torch.multiprocessing.start_processes(
        make_checks, arguments, nprocs=int(ranks), start_method="fork"
    )
