# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""RWKV's vocabulary as a tokenizer.json, beside the tokenizer of the package rwkv."""

import json
import random
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from rwkv.rwkv_tokenizer import TRIE_TOKENIZER
from transformers import AutoTokenizer

from hf_linear_attention import __main__ as command
from hf_linear_attention.checkpoints.rwkv_tokenizer import (
    END,
    FILE,
    find_vocabulary,
    longest_of,
    rwkv_tokenizer,
)

sys.path.append(str(Path(__file__).parents[1] / "data" / "rwkv7_of_authors"))
from weights import weights  # noqa: E402

WHOLE = Path(find_spec("rwkv").submodule_search_locations[0]) / FILE
ALPHABETS = [
    *((32, 127), (0x80, 0x300), (0x400, 0x3000), (0x4E00, 0x9FFF), (0x1F300, 0x1F6FF)),
    *((0, 32), (32, 33), (32, 33), (97, 123), (97, 123)),
]


def some_texts(number):
    """Of all scripts, spaces and control characters."""
    rng = random.Random(0)
    for _ in range(number):
        ranges = rng.choices(ALPHABETS, k=rng.randrange(60))
        yield "".join(chr(rng.randrange(*one)) for one in ranges)


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """Saved and loaded."""
    folder = tmp_path_factory.mktemp("tokenizer")
    rwkv_tokenizer(WHOLE).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_it_has_the_numbers_of_the_package_rwkv(ours):
    theirs = TRIE_TOKENIZER(str(WHOLE))
    source = Path(random.__file__).read_text("utf-8")
    for text in (source, *some_texts(300)):
        ids = ours(text).input_ids
        assert ids == theirs.encode(text)
        assert ours.decode(ids) == text


def test_documents_end_with_token_0(ours):
    assert (ours.eos_token, ours.eos_token_id, ours.pad_token_id, len(ours)) == (END, 0, 0, 65530)
    assert ours(f"a{END}b").input_ids == [ours("a").input_ids[0], 0, ours("b").input_ids[0]]


def test_the_longest_word_is_matched_though_a_longer_one_begins_alike():
    expression = re.compile(longest_of(["a", "b", "c", "ab", "abcab", "[", "]^"]))
    assert expression.findall("ababcabcabca[]^") == ["ab", "abcab", "c", "ab", "c", "a", "[", "]^"]


def write_vocabulary(folder, *more):
    lines = [f"{i + 1} {bytes([i])!r} 1" for i in range(256)]
    lines += [f"{257 + i} {token!r} {len(token.encode())}" for i, token in enumerate(more)]
    (folder / FILE).write_text("\n".join(lines) + "\n", "utf-8")


def test_import_writes_it_with_the_template_of_the_folder(tmp_path, monkeypatch, capsys):
    torch.save(weights(), tmp_path / "model.pth")
    write_vocabulary(tmp_path, "ab", "\n\n", "ü")
    template = "{% for message in messages %}{{ message.content + eos_token }}{% endfor %}"
    said = {"eos_token": "\n\n", "pad_token": "nowhere", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    arguments = ["import", str(tmp_path / "model.pth"), str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["python -m hf_linear_attention", *arguments])
    command.main()
    assert f"tokenizer: RWKV's, of {FILE}, with a chat template" in capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("abaü\n\n").input_ids == [257, 98, 259, 258]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (0, 0, 260)
    chat = [{"role": "user", "content": "ab"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "ab\n\n"


def test_where_vocabularies_are_looked_for(tmp_path):
    assert find_vocabulary(str(tmp_path)) is None
    assert find_vocabulary(str(tmp_path / "model.pth")) == WHOLE
    write_vocabulary(tmp_path)
    assert find_vocabulary(str(tmp_path)) == tmp_path / FILE
    assert find_vocabulary(str(tmp_path / "model.pth")) == tmp_path / FILE
    (tmp_path / "folder.pth").mkdir()
    assert find_vocabulary(str(tmp_path / "folder.pth")) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 'a' 1\n2 bc 2\n", ":2 must be a number, a token and its bytes: '2 bc 2'"),
        ("1 'a' 2\n", ":1 must be"),
        ("1 'a' 1\n", "must have each byte as a token, and has not"),
    ],
)
def test_files_of_another_kind_are_refused(tmp_path, text, message):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ValueError, match=message):
        rwkv_tokenizer(tmp_path / FILE)
