# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Rows that begin alike are read as a tree while a model trains: each prompt once, however many
answers it has. `share_prompts(model)` switches that on, `SharedPrompts` does in TRL's trainers, and
`DataCollatorWithTrees` makes such batches.

Shapes: B rows, T tokens of each, n tokens of their tree, m labels, C hidden size.
"""

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ..model.modeling import LinearAttentionModel
from ..recurrences.folding import SHORTEST, fold_texts
from ..recurrences.tree import TokenTree
from ..upstream.packing import by_name, tell_layers
from ..upstream.report import Undoable
from ..upstream.use_kernels import use_kernels

# Arguments of a forward that say nothing of single tokens: rows with others are read as they are.
OF_NO_TOKEN = {"use_cache", "margin", "num_items_in_batch", "return_dict"}
# Settings by which a forward gives more for each token: then, too.
FOR_EACH_TOKEN = ("output_hidden_states", "output_attentions", "output_router_logits")
# Of the output of a head that TRL lets score labels: what it has for each label, besides losses.
PER_LABEL = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask")
# Attributes of modules between the hooks before a forward and after it.
WANTED, SPREAD = "_places_of_shared_prompts", "_labels_of_shared_prompts"


class FoldedRows(NamedTuple):
    """The tree of rows (B, T)."""

    tree: TokenTree
    input_ids: Tensor  # (1, n)
    places: Tensor  # (B, T) of each token in it; 0 of padding


@dataclass
class PromptsOnce(Undoable):
    """What `share_prompts` returns: `undo()`, or the end of a `with` block, ends it. So far, of
    `tokens_given` in rows that could be shared, `tokens_read` were read.
    """

    shortest: int = SHORTEST
    tokens_given: int = 0
    tokens_read: int = 0
    hooks: list[RemovableHandle] = field(default_factory=list)

    def undo(self) -> None:
        """As before `share_prompts`."""
        while self.hooks:
            self.hooks.pop().remove()

    def add(self, model: nn.Module, before: Any, after: Any) -> None:
        """Hooks before a module's forward, others' hooks included, and after it."""
        first = model.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        self.hooks += [first, model.register_forward_hook(after)]

    def fold(self, model: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Before the forward of a model that holds the layers: a tree in place of rows, of which
        all hidden states are wanted. A head may have made one of them before.
        """
        kwargs = by_name(model, args, kwargs)
        tree = kwargs.get("tree")
        if isinstance(tree, TreeOfLabels):
            vars(model)[WANTED] = tree.places
            return None
        folded = None if tree is not None else self._folded(model, kwargs)
        vars(model)[WANTED] = None if folded is None else folded.places
        return None if folded is None else ((), {**_without_rows(kwargs), **_of_tree(folded)})

    def unfold(self, model: PreTrainedModel, args: tuple, outputs: Any) -> None:
        """After it: the hidden states that are wanted, (B, T, C) or (1, m, C)."""
        places = vars(model).pop(WANTED, None)
        if places is not None:
            chosen = outputs.last_hidden_state[0].index_select(0, places.flatten())
            outputs.last_hidden_state = chosen.view(*places.shape, -1)

    def fold_labels(self, head: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Before the forward of a head that TRL lets score labels (B, T) (`add_fused_lm_head`): a
        tree in place of rows, of which only hidden states that predict a label are wanted.
        """
        vars(head)[SPREAD] = None
        labels = kwargs.get("labels")
        if args or labels is None or not kwargs.get("fused_lm_head"):
            return None
        of_model = {k: x for k, x in kwargs.items() if k not in ("labels", "fused_lm_head")}
        is_label = labels[:, 1:] != -100
        folded = self._folded(head.base_model, {**of_model, "use_cache": False})
        if folded is None or not is_label.any():
            return None
        vars(head)[SPREAD] = is_label
        tree, places = folded.tree, folded.places[:, :-1][is_label][None]
        folded = folded._replace(tree=TreeOfLabels(tree.lengths, tree.parents, places=places))
        of_labels = {"shift_labels": labels[:, 1:][is_label][None], "fused_lm_head": True}
        return (), {**_without_rows(of_model), **_of_tree(folded), **of_labels}

    def spread(self, head: PreTrainedModel, args: tuple, outputs: Any) -> None:
        """After it: what is (1, m) becomes (B, T - 1), 0 where there is no label."""
        is_label = vars(head).pop(SPREAD, None)
        if is_label is None:
            return
        for name in PER_LABEL:
            found = getattr(outputs, name, None)
            if found is not None:
                nothing = found.new_zeros(is_label.shape)
                setattr(outputs, name, nothing.masked_scatter(is_label, found))

    def _folded(self, model: PreTrainedModel, kwargs: Mapping[str, Any]) -> FoldedRows | None:
        """Of rows (B, T) with a mask of padding or none; None where they are to be read as they
        are: where something else is said of tokens, or asked of them, or they share nothing.
        """
        if torch.compiler.is_compiling() or not _reads_trees(model):  # use_kernels may be undone
            return None
        given = {name: x for name, x in kwargs.items() if x is not None}
        ids, mask = given.pop("input_ids", None), given.pop("attention_mask", None)
        may_cache = given.get("use_cache", not torch.is_grad_enabled())
        asked = {name for name, x in given.items() if x is not False}
        if may_cache or not asked <= OF_NO_TOKEN:
            return None
        if any(getattr(model.config, name, False) for name in FOR_EACH_TOKEN):
            return None
        if not isinstance(ids, Tensor) or ids.dim() != 2 or len(ids) < 2:
            return None
        mask = torch.ones_like(ids) if mask is None else mask
        if not isinstance(mask, Tensor) or mask.shape != ids.shape:
            return None
        is_real = mask.bool()
        borders = is_real.cpu().diff(dim=1, prepend=torch.zeros(len(ids), 1, dtype=torch.bool))
        stops = is_real[:, -1].cpu()
        if not (borders.sum(1) + stops == 2).all():  # padding amid tokens counts as a position
            return None
        texts = [row[real] for row, real in zip(ids, is_real, strict=True)]
        folded = fold_texts(texts, self.shortest)
        num_tokens, num_read = int(is_real.sum()), folded.tree.num_tokens
        if num_read == num_tokens:
            return None
        self.tokens_given += num_tokens
        self.tokens_read += num_read
        places = torch.zeros_like(ids).masked_scatter(is_real, torch.cat(folded.places))
        return FoldedRows(folded.tree, folded.input_ids, places)


@dataclass(frozen=True)
class TreeOfLabels(TokenTree):
    """A tree in which only some hidden states are wanted.

    places: theirs, (1, m).
    """

    places: Tensor = field(kw_only=True, compare=False)


def _without_rows(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {k: x for k, x in kwargs.items() if k not in ("input_ids", "attention_mask")}


def _of_tree(folded: FoldedRows) -> dict[str, Any]:
    return {"input_ids": folded.input_ids, "tree": folded.tree, "use_cache": False}


def share_prompts(model: nn.Module, *, shortest: int = SHORTEST) -> PromptsOnce:
    """Lets a model read what rows of a batch begin with once, while it trains: rows (B, T) with
    their padding become a tree (`TokenTree`), and its hidden states the rows' again. Outputs,
    losses and gradients stay the same, but for rounding; and dropout, which draws other numbers.

    That is so for batches of `input_ids`, with an `attention_mask` (B, T) or none, that are not
    cached. Others are read as ever: under torch.compile, with positions or embeddings of their own,
    or where hidden states, attentions or router logits are asked for; `tokens_given` counts only
    rows that were shared. A call ends what an earlier one began for the same model.

        shared = share_prompts(model)
        Trainer(model=model, ...).train()  # or one of TRL's: see SharedPrompts
        print(shared.tokens_read / shared.tokens_given)
        shared.undo()

    Args:
        model: of this package, or of Transformers after `use_kernels`, with any head or none,
            wrapped by PEFT or not.
        shortest: how many tokens rows must have in common, from where they last fork on, to be read
            together.

    Raises:
        ValueError: no part of the model can read trees; or shortest is less than 1.
    """
    shared = PromptsOnce(check_shortest(shortest))
    for hook in [x for part in model.modules() for x in part._forward_pre_hooks.values()]:
        if isinstance(earlier := getattr(hook, "__self__", None), PromptsOnce):
            earlier.undo()
    holders = [part for part in model.modules() if _reads_trees(part)]
    if not holders:
        raise ValueError(
            "model must be one of this package, or one of Transformers with recurrent layers after "
            f"use_kernels(model), got {type(model).__name__}"
        )
    for holder in holders:
        shared.add(holder, shared.fold, shared.unfold)
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and part.base_model in holders and part not in holders:
            shared.add(part, shared.fold_labels, shared.spread)
    return shared


def check_shortest(shortest: Any) -> int:
    """Raises a ValueError where it is no number of tokens."""
    if not isinstance(shortest, int) or shortest < 1:
        raise ValueError(f"shortest must be a whole number of 1 token or more, got {shortest!r}")
    return shortest


def _reads_trees(module: nn.Module) -> bool:
    if isinstance(module, LinearAttentionModel):
        return True
    return tell_layers in module._forward_pre_hooks.values()


class SharedPrompts:
    """Put before one of TRL's trainers (GRPO, RLOO, DPO, Reward): its model, and that of its
    reference, read what rows of a batch begin with once. Transformers' models get `use_kernels`.

        class Trainer(SharedPrompts, GRPOTrainer):
            pass

    Answers that are generated for several batches are dealt out prompt by prompt, in random order,
    so that a batch has the answers of few. Where continuous batching generates them
    (`use_transformers_continuous_batching`), their prompts are read once, too, and forked, and the
    engine gives the log probabilities of their tokens to the trainer.
    """

    model: Any
    accelerator: Any
    args: Any
    _step: int

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.shared_prompts = []
        for model in (self.model, getattr(self, "ref_model", None)):
            if model is not None:
                if not any(map(_reads_trees, model.modules())):
                    use_kernels(model)
                self.shared_prompts.append(share_prompts(model))
        self._engine_settings = getattr(self, "continuous_batching_config", None)
        if self._engine_settings is not None:
            self._engine_settings.return_logprobs = True

    def _prepare_inputs(self, inputs: Any) -> Any:
        before = getattr(self, "_buffered_inputs", None)
        prepared = super()._prepare_inputs(inputs)  # type: ignore[misc]
        batches = getattr(self, "_buffered_inputs", None)
        if batches is None or batches is before or len(batches) < 2:
            return prepared
        self._buffered_inputs = by_prompts(batches)
        return self._buffered_inputs[self._step % len(batches)]

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        generate: Callable = super()._generate_single_turn  # type: ignore[misc]
        if self._engine_settings is None:
            return generate(*args, **kwargs)
        model = self.accelerator.unwrap_model(self.model)
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        outputs: dict[str, Any] = {}
        generate_batch = model.generate_batch

        def generate_and_keep(inputs: list, generation_config: Any, **others: Any) -> dict:
            prompts, number = once_each(inputs)
            settings = copy.copy(generation_config)
            settings.num_return_sequences = number
            outputs.update(generate_batch(prompts, generation_config=settings, **others))
            return outputs

        model.generate_batch = generate_and_keep
        try:
            generated = generate(*args, **kwargs)
        finally:
            del model.generate_batch
        if not isinstance(generated, tuple):  # RLOO's trainer asks for tokens alone
            return generated
        return generated[0], [output.logprobs for output in outputs.values()]


def once_each(prompts: list[list[int]]) -> tuple[list[list[int]], int]:
    """Prompts that follow each other as often each, and how often; or as they are, and 1."""
    groups = [(prompt, len(list(some))) for prompt, some in itertools.groupby(prompts)]
    numbers = {number for _, number in groups}
    if len(numbers) != 1:
        return prompts, 1
    return [prompt for prompt, _ in groups], numbers.pop()


def by_prompts(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """TRL's batches of answers with all those of a prompt in as few as there can be; batches with
    what is not rows of tensors, as images, as they are.
    """
    sizes = [len(batch["prompt_ids"]) for batch in batches]
    for batch, rows in zip(batches, sizes, strict=True):
        for x in batch.values():
            if not (x is None or (isinstance(x, Tensor) and (x.dim() == 0 or len(x) == rows))):
                return batches
    whole = {
        name: torch.cat([batch[name] for batch in batches])
        for name, x in batches[0].items()
        if isinstance(x, Tensor) and x.dim() > 0
    }
    places: dict[tuple[int, ...], list[int]] = {}  # of each prompt's answers
    for row, prompt in enumerate(whole["prompt_ids"].tolist()):
        places.setdefault(tuple(prompt), []).append(row)
    order = torch.tensor([row for rows in places.values() for row in rows])
    moved = {name: x[order.to(x.device)].split(sizes) for name, x in whole.items()}
    return [
        {name: moved[name][number] if name in moved else x for name, x in batch.items()}
        for number, batch in enumerate(batches)
    ]


@dataclass
class DataCollatorWithTrees:
    """Batches for `Trainer` of texts that begin alike, as trees.

    Each text is a dict of its `input_ids`, and perhaps `labels`, -100 where there is none. A batch
    has `input_ids` (1, n) and the `tree`; `labels` and `shift_labels` (1, m) of all texts, those in
    a common part once for each; and `logits_to_keep` (m,), the places that predict them.

    Raises:
        ValueError: a text's labels are not as many as its tokens, or it is padded.
    """

    shortest: int = SHORTEST

    def __post_init__(self):
        check_shortest(self.shortest)

    def __call__(self, texts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        ids = [torch.as_tensor(text["input_ids"]) for text in texts]
        of_texts = [torch.as_tensor(x.get("labels", i)) for x, i in zip(texts, ids, strict=True)]
        for text, tokens, labels_of_text in zip(texts, ids, of_texts, strict=True):
            if tokens.dim() != 1 or labels_of_text.shape != tokens.shape:
                raise ValueError(
                    "input_ids and labels of a text must be lists of as many numbers, got shapes "
                    f"{tuple(tokens.shape)} and {tuple(labels_of_text.shape)}"
                )
            if not all(text.get("attention_mask", ())):
                raise ValueError("attention_mask of a text must hide nothing: leave out padding")
        folded = fold_texts(ids, self.shortest)
        before, labels = [], []
        for of_text, places in zip(of_texts, folded.places, strict=True):
            following = of_text[1:]
            before.append(places[:-1][following != -100])
            labels.append(following[following != -100])
        of_all = torch.cat(labels)[None]
        return {
            "input_ids": folded.input_ids,
            "tree": folded.tree,
            "logits_to_keep": torch.cat(before),
            "labels": of_all,
            "shift_labels": of_all,
        }
