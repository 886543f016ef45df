# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""English text that Debian's packages bring, and chats made of it, as documents to convert with.

    python benchmarks/english_texts.py --chat_template MODEL --output english.jsonl
    python examples/convert.py --model MODEL --dataset_name english.jsonl

Novels, essays, handbooks and manuals, so much of each as `PACKAGES` says. A chat asks for what
comes next in a text, turn by turn: that is the model's own form of a long context, on text that it
has not written. Needs Debian (apt-get and dpkg-deb), and downloads 30 MB.
"""

import argparse
import gzip
import json
import random
import re
import struct
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hf_linear_attention.conversion.model_files import read

CHAT_SHARE = 0.25  # of the documents
TURNS = (2, 8)
BEGINNINGS = (
    "Continue this text:\n\n{}",
    "What comes after this paragraph?\n\n{}",
    "Please go on with it: {}",
)
GO_ON = ("Go on.", "And then?", "What comes next?", "Please continue.", "Next paragraph, please.")


def plain(content: bytes) -> Iterator[str]:
    yield content.decode("utf-8", errors="replace")


def novels(content: bytes) -> Iterator[str]:
    """The chapters of novels in R's database of objects: zlib streams, each behind its length, of
    strings, each behind its type (9) and length.
    """
    while content:
        stream = zlib.decompressobj()
        novel = stream.decompress(content[4:])
        content = stream.unused_data
        lines, position = [], novel.index(b"\x00\x04\x00\x09")
        while novel[position : position + 4] == b"\x00\x04\x00\x09":
            (length,) = struct.unpack(">i", novel[position + 4 : position + 8])
            lines.append(novel[position + 8 : position + 8 + length].decode())
            position += 8 + length
        yield from re.split(r"\n(?=chapter )", "\n".join(lines), flags=re.IGNORECASE)


class Package(NamedTuple):
    """files: a pattern. kilobytes: at most so much of it. read: a file's documents."""

    files: str
    kilobytes: int
    read: Callable[[bytes], Iterator[str]] = plain


PACKAGES = {
    "r-cran-janeaustenr": Package("**/data/Rdata.rdb", 2500, novels),
    "anarchism": Package("**/markdown/*.md.gz", 2500),
    "python3.11-doc": Package("**/_sources/**/*.rst.txt", 2000),
    "git-doc": Package("**/git-doc/*.txt", 1000),
    "jargon-text": Package("**/jargon.txt.gz", 1500),
    "debian-reference-en": Package("**/debian-reference.en.txt.gz", 1000),
    "developers-reference": Package("**/developers-reference.txt.gz", 500),
}
DOCUMENT = 60_000  # characters at most


def documents_of(name: str, package: Package, folder: Path) -> list[str]:
    """Of a package of Debian's, in an order of chance that is the same every time."""
    subprocess.run(["apt-get", "download", name], cwd=folder, check=True, capture_output=True)
    (archive,) = folder.glob(f"{name}_*.deb")
    subprocess.run(["dpkg-deb", "-x", archive, folder / name], check=True)
    texts = []
    for path in sorted((folder / name).glob(package.files)):
        content = path.read_bytes()
        texts += package.read(gzip.decompress(content) if path.suffix == ".gz" else content)
    pieces = [piece for text in texts for piece in in_pieces("\n\n".join(paragraphs(text)))]
    random.Random(name).shuffle(pieces)
    size, kept = 0, []
    for piece in pieces:
        size += len(piece.encode())
        if size > package.kilobytes * 1000:
            break
        kept.append(piece)
    return kept


def paragraphs(text: str) -> list[str]:
    """Without the line breaks of prose; those of lists, tables and code stay."""
    found = []
    for paragraph in re.split(r"\n\s*\n", text.replace("\r\n", "\n")):
        lines = paragraph.strip("\n").split("\n")
        indents = {len(line) - len(line.lstrip()) for line in lines}
        is_prose = (
            len(lines) > 1 and len(indents) == 1 and all(len(line) > 50 for line in lines[:-1])
        )
        found.append(" ".join(map(str.strip, lines)) if is_prose else "\n".join(lines))
    return [paragraph for paragraph in found if paragraph.strip()]


def in_pieces(text: str) -> Iterator[str]:
    """A long document, cut between paragraphs."""
    while len(text) > DOCUMENT:
        cut = text.rfind("\n\n", 1, DOCUMENT)
        cut = cut if cut > 0 else DOCUMENT
        yield text[:cut]
        text = text[cut:].lstrip("\n")
    if len(text) > 500:
        yield text


def chat(document: str, tokenizer: PreTrainedTokenizerBase, chance: random.Random) -> str:
    """A document's paragraphs as a model's answers."""
    parts = [part for part in document.split("\n\n") if 80 < len(part) < 2000]
    if len(parts) < 3:
        return document
    start = chance.randrange(len(parts) - 2)
    first, *rest = parts[start : start + 1 + chance.randint(*TURNS)]
    messages = []
    for turn, answer in enumerate(rest):
        asked = chance.choice(GO_ON) if turn else chance.choice(BEGINNINGS).format(first)
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return tokenizer.apply_chat_template(messages, tokenize=False).removesuffix("\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="a new file of JSON lines")
    parser.add_argument("--chat_template", help="the model, or GGUF file, whose form chats take")
    arguments = parser.parse_args()
    documents = []
    with tempfile.TemporaryDirectory() as folder:
        for name, package in PACKAGES.items():
            found = documents_of(name, package, Path(folder))
            size = sum(len(text.encode()) for text in found)
            print(f"{name}: {len(found)} documents, {size:,} bytes", flush=True)
            documents += found
    chance = random.Random(0)
    chance.shuffle(documents)
    if arguments.chat_template:
        tokenizer = read(AutoTokenizer, arguments.chat_template)
        for i in range(0, len(documents), round(1 / CHAT_SHARE)):
            documents[i] = "\n".join(chat(documents[i], tokenizer, chance) for _ in range(8))
    part = arguments.output.with_suffix(".part")
    part.write_text("".join(f"{json.dumps({'text': text})}\n" for text in documents), "utf-8")
    part.replace(arguments.output)


if __name__ == "__main__":
    main()
