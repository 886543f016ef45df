# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""RWKV's vocabulary ("World") as a tokenizer of the tokenizers library, so that it loads without
code of its own.

Its tokens are strings of bytes; a text is cut into the longest with which it begins, again and
again. Of what the library has, a regular expression does that: a trie, in which each token may go
on to longer ones.
"""

import ast
import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils.hub import cached_file

from .files import read_object
from .rwkv_file import END_OF_TEXT

FILE = "rwkv_vocab_v20230424.txt"  # in folders of RWKV's and in the package rwkv
END = "<|rwkv_tokenizer_end_of_text|>"  # as RWKV's own code for Transformers calls it
SPECIAL = ("bos_token", "eos_token", "pad_token")


def find_vocabulary(model: str) -> Path | None:
    """The file of a folder or a model on the Hub; of a .pth, beside which none need be, that of the
    package rwkv. None: there is none.
    """
    path = Path(model)
    is_weights = path.suffix.lower() == ".pth" and not path.is_dir()
    folder = path.parent if is_weights else path
    if (folder / FILE).is_file():
        return folder / FILE
    if is_weights:
        package = find_spec("rwkv")
        folders = [] if package is None else package.submodule_search_locations or []
        return next((Path(x) / FILE for x in folders if (Path(x) / FILE).is_file()), None)
    if path.exists():
        return None
    found = cached_file(model, FILE, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def rwkv_tokenizer(vocabulary: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a vocabulary, with the template of a tokenizer_config.json beside it. Token
    0, of no text, begins and ends documents, and pads.

    Raises:
        ValueError: a line is none of "number 'token' length", or a byte is no token.
    """
    to_text = bytes_to_unicode()
    numbers = {"".join(to_text[x] for x in token): i for token, i in read(vocabulary).items()}
    missing = [byte for byte in range(256) if to_text[byte] not in numbers]
    if missing:
        raise ValueError(f"{vocabulary} must have each byte as a token, and has not {missing}")
    tokenizer = Tokenizer(models.WordLevel({END: END_OF_TEXT, **numbers}, unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            pre_tokenizers.Split(Regex(longest_of(numbers)), "isolated"),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        **dict.fromkeys(SPECIAL, END),
        **_said_beside(vocabulary),
    )


def _said_beside(vocabulary: Path) -> dict[str, Any]:
    """What else a tokenizer_config.json says: a template, to which its own special tokens, which
    may be any text there, are given by name.
    """
    beside = vocabulary.parent / "tokenizer_config.json"
    said = read_object(beside) if beside.is_file() else {}
    kept: dict[str, Any] = {
        name: said[name] for name in ("chat_template", "model_max_length") if name in said
    }
    for name in SPECIAL:
        value = said.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str) and name in str(kept.get("chat_template")):
            kept["chat_template"] = (
                f"{{%- set {name} = {json.dumps(value)} -%}}{kept['chat_template']}"
            )
    return kept


def read(vocabulary: Path) -> dict[bytes, int]:
    """Tokens and their numbers."""
    tokens = {}
    for at, line in enumerate(vocabulary.read_text("utf-8").rstrip("\n").split("\n"), 1):
        found = re.fullmatch(r"(\d+) (.+) (\d+)", line)
        try:
            token = ast.literal_eval(found[2]) if found else None
        except (SyntaxError, ValueError):
            token = None
        token = token.encode() if isinstance(token, str) else token
        if found is None or not isinstance(token, bytes) or len(token) != int(found[3]):
            raise ValueError(f"{vocabulary}:{at} must be a number, a token and its bytes: {line!r}")
        tokens[token] = int(found[1])
    return tokens


def longest_of(words: Any) -> str:
    """A regular expression that matches the longest of these words with which a text begins."""
    trie: dict[str, dict] = {}
    for word in words:
        node = trie
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}  # here a word ends
    return _expression(trie)


def _expression(node: dict[str, dict]) -> str:
    rest = {character: _expression(following) for character, following in node.items() if character}
    ends = [re.escape(character) for character, following in rest.items() if not following]
    choices = [
        re.escape(character) + following for character, following in rest.items() if following
    ]
    if ends:
        choices.append(f"[{''.join(ends)}]")
    if not choices:
        return ""
    return f"(?:{'|'.join(choices)})" + ("?" if "" in node else "")
