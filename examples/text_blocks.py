# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""From text to training blocks: documents, a held-out split, a byte-pair tokenizer, packed blocks.

A "documents" value is always a `datasets.Dataset` with one string column, "text".
"""

import sysconfig
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from datasets import Dataset, DatasetDict, disable_progress_bars, load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"

# Parts of the standard library's directory that are not the library's own source (installed
# packages, tests) or are tables rather than text (character encodings, generated help).
NOT_LIBRARY_SOURCE = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
}


class InputError(ValueError):
    """Something that the user named is missing or unusable; the message says what."""


disable_progress_bars()  # one progress bar, the Trainer's


def standard_library() -> Dataset:
    """The source of Python's standard library on this machine, one document per file."""
    texts = [text for _, path in library_files() if (text := read_utf8(path))]
    if not texts:
        root = sysconfig.get_paths()["stdlib"]
        raise InputError(f"there is no Python source in {root}; name a text with --text_file")
    return Dataset.from_dict({"text": texts})


def library_files() -> list[tuple[Path, Path]]:
    """Of the standard library's source: where in the library a file is, and its path here."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [(path.relative_to(root), path) for path in sorted(root.rglob("*.py"))]
    return [(place, path) for place, path in files if not NOT_LIBRARY_SOURCE & set(place.parts)]


def text_files(paths: Iterable[str]) -> Dataset:
    """One document per file, each of which must be UTF-8 and not blank."""
    texts = []
    for path in map(Path, paths):
        if not path.is_file():
            raise InputError(f"--text_file: there is no file {path}")
        text = read_utf8(path)
        if text is None:
            raise InputError(f"--text_file: {path} is not UTF-8 text")
        if not text.strip():
            raise InputError(f"--text_file: {path} is empty")
        texts.append(text)
    return Dataset.from_dict({"text": texts})


def hub_or_local_dataset(name: str, config_name: str | None, text_column: str) -> DatasetDict:
    """Every split of a dataset on the Hub, or of a local data file or folder, as documents."""
    path = Path(name)
    try:
        if path.is_file():
            splits = load_dataset(str(path.parent), config_name, data_files=path.name)
        else:
            splits = load_dataset(name, config_name)
    except (OSError, ValueError) as error:  # not found, no network; unknown config or format
        raise InputError(f"--dataset_name {name!r} cannot be loaded: {error}") from error
    for split in splits.values():
        if text_column not in split.column_names:
            raise InputError(
                f"--text_column {text_column!r} is not a column of {name!r}, "
                f"which has {split.column_names}"
            )
        if split.features[text_column].dtype not in ("string", "large_string"):
            raise InputError(f"--text_column {text_column!r} of {name!r} does not hold strings")
    columns = splits.select_columns([text_column])
    return columns if text_column == "text" else columns.rename_column(text_column, "text")


def read_utf8(path: Path) -> str | None:
    """The file's text, or None where it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def hold_out(documents: Dataset, fraction: float, seed: int) -> tuple[Dataset, Dataset]:
    """Documents to train on and others, about `fraction` of them, to test on.

    Whole documents, so that no file is seen in part; a single document loses its tail.
    """
    if len(documents) > 1:
        split = documents.train_test_split(test_size=fraction, seed=seed)
        return split["train"], split["test"]
    text = documents[0]["text"]
    cut = int(len(text) * (1 - fraction))
    cut = text.rfind("\n", 0, cut) + 1 or cut
    return Dataset.from_dict({"text": [text[:cut]]}), Dataset.from_dict({"text": [text[cut:]]})


def take_bytes(documents: Dataset, limit: int | None) -> Dataset:
    """The first `limit` bytes of the documents' UTF-8, the last document cut; None: all."""
    if limit is None:
        return documents
    texts = []
    for row in documents:
        encoded = row["text"].encode()
        texts.append(encoded[:limit].decode(errors="ignore"))
        limit -= len(encoded)
        if limit <= 0:
            break
    return Dataset.from_dict({"text": texts})


def drop_bytes(documents: Dataset, count: int) -> Dataset:
    """The documents without their first `count` bytes of UTF-8.

    Raises:
        InputError: nothing is left.
    """
    if count == 0:
        return documents
    texts = []
    for text in iterate_text(documents):
        encoded = text.encode()
        if count < len(encoded):
            texts.append(encoded[count:].decode(errors="ignore"))
        count = max(count - len(encoded), 0)
    if not texts:
        raise InputError("nothing is left of the held-out text: give a smaller --skip_eval_bytes")
    return Dataset.from_dict({"text": texts})


def train_tokenizer(documents: Dataset, vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level byte-pair encoding: any text can be encoded, and decodes to itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(iterate_text(documents), trainer=trainer, length=len(documents))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def iterate_text(documents: Dataset) -> Iterator[str]:
    return (row["text"] for row in documents)


def bytes_per_token(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """How many bytes of text each token of a byte-level tokenizer stands for; special tokens: 0."""
    # A byte-level token is spelled with one character per byte.
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    return [0 if token in tokenizer.all_special_tokens else len(token) for token in tokens]


def pack(documents: Dataset, tokenizer: PreTrainedTokenizerFast, block_size: int) -> Dataset:
    """The documents, each closed by the end-of-text token, end to end in blocks of `block_size`.

    Returns a dataset with the columns input_ids and labels; the models shift the labels. What is
    left over at the end of a batch of documents is dropped.
    """

    def pack_batch(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encoded = tokenizer(batch["text"], add_special_tokens=False, return_attention_mask=False)
        ids = list(
            chain.from_iterable(
                document + [tokenizer.eos_token_id] for document in encoded["input_ids"]
            )
        )
        starts = range(0, len(ids) - block_size + 1, block_size)
        blocks = [ids[start : start + block_size] for start in starts]
        return {"input_ids": blocks, "labels": blocks}

    blocks = documents.map(pack_batch, batched=True, remove_columns=documents.column_names)
    if len(blocks) == 0:
        raise InputError(
            f"{sum(map(len, iterate_text(documents)))} characters do not fill one block of "
            f"{block_size} tokens; give more text or a smaller --block_size"
        )
    return blocks
