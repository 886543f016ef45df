# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""English text of Debian's packages, as documents (benchmarks/english_texts.py)."""

import gzip
import json
import random
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import english_texts  # noqa: E402
from english_texts import Package  # noqa: E402

PROSE = "It is a truth universally acknowledged, that a single man\nin possession of a good fortune"


def of_r(lines: list[str]) -> bytes:
    """A novel as R's database of objects has it."""
    strings = b"".join(
        b"\x00\x04\x00\x09" + struct.pack(">i", len(line.encode())) + line.encode()
        for line in lines
    )
    stream = zlib.compress(b"X\n\x00\x00\x00\x10" + strings + b"\x00\x00\x00\xfe")
    return struct.pack(">I", len(strings)) + stream


def test_novels_come_chapter_by_chapter():
    content = of_r(["Émile", "", "CHAPTER 1", "It was."]) + of_r(["Emma", "Chapter 2", "She was."])
    assert [*english_texts.novels(content)] == [
        "Émile\n",
        "CHAPTER 1\nIt was.",
        "Emma",
        "Chapter 2\nShe was.",
    ]


def test_prose_loses_its_line_breaks_and_code_does_not():
    code = "def f():\n    return 1"
    text = f"{PROSE}\n\n\n{code}\n \n  * one\n"
    assert english_texts.paragraphs(text) == [PROSE.replace("\n", " "), code, "  * one"]


def test_long_documents_are_cut_between_paragraphs(monkeypatch):
    monkeypatch.setattr(english_texts, "DOCUMENT", 2000)
    paragraphs = [str(i) * 700 for i in range(6)]
    pieces = [*english_texts.in_pieces("\n\n".join(paragraphs))]
    assert pieces == ["\n\n".join(paragraphs[i : i + 2]) for i in (0, 2, 4)]
    assert [*english_texts.in_pieces("short")] == []


def test_a_chat_asks_for_what_comes_next(monkeypatch):
    said = []
    tokenizer = SimpleNamespace(
        apply_chat_template=lambda messages, tokenize: said.extend(messages) or "chat\n"
    )
    parts = [f"{i} " * 60 for i in range(12)]
    assert english_texts.chat("\n\n".join(parts), tokenizer, random.Random(0)) == "chat"
    roles = [message["role"] for message in said]
    assert roles == ["user", "assistant"] * (len(said) // 2) and len(said) >= 4
    answers = [message["content"] for message in said[1::2]]
    first = parts.index(answers[0])
    assert parts[first - 1] in said[0]["content"] and answers == parts[first : first + len(answers)]
    assert english_texts.chat("a\n\nb", tokenizer, random.Random(0)) == "a\n\nb"


def test_documents_come_from_packages_up_to_a_size(tmp_path, monkeypatch, capsys):
    def run(command, **kwargs):
        if command[0] == "apt-get":
            (kwargs["cwd"] / "book_1_all.deb").touch()
        else:
            for i in range(9):
                (command[3] / "doc").mkdir(parents=True, exist_ok=True)
                text = f"{i} " * 1000
                (command[3] / "doc" / f"{i}.txt.gz").write_bytes(gzip.compress(text.encode()))

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(english_texts, "PACKAGES", {"book": Package("**/*.txt.gz", 9)})
    file = tmp_path / "texts.jsonl"
    monkeypatch.setattr(sys, "argv", ["english_texts.py", "--output", str(file)])
    english_texts.main()
    texts = [json.loads(line)["text"] for line in file.read_text().splitlines()]
    assert len({*texts}) == 4 and {len(text) for text in texts} <= {1999, 2000}
    assert "book: 4 documents, " in capsys.readouterr().out
    before = file.read_bytes()
    english_texts.main()
    assert file.read_bytes() == before


def test_the_help_names_what_is_needed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["english_texts.py", "--help"])
    with pytest.raises(SystemExit):
        english_texts.main()
    assert "Needs Debian" in capsys.readouterr().out
