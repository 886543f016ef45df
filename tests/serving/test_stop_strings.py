# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Answers end before a stop string, wherever in tokens it begins and ends."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from hf_linear_attention.serving.stop_strings import UntilStop

TEXT = "def f(x):\n    return (x + 1)  # größer, 東京 and so on\n" * 3


def of_bytes():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT] * 9, trainer)
    return tokenizer


def of_pieces():
    """As SentencePiece's: a text begins with a space that is not decoded."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator([TEXT] * 9, trainer)
    return tokenizer


def answer(tokenizer, stops, is_stream, pieces=1, text=TEXT):
    """The text that a client gets, and how often the engine was told to end."""
    tokens, heard, cancelled = tokenizer.encode(text).ids, [], []
    handler = UntilStop(
        heard.append, stops, tokenizer, is_stream, lambda: cancelled.append(len(heard))
    )
    for count in [*range(1, len(tokens), pieces), len(tokens)]:
        is_last = count == len(tokens)
        status = RequestStatus.FINISHED if is_last else RequestStatus.DECODING
        handler(GenerationOutput("x", generated_tokens=tokens[:count], status=status))
    lengths = [len(output.generated_tokens) for output in heard]
    assert lengths == sorted(lengths)
    for before, after in zip(heard, heard[1:], strict=False):  # nothing is taken back
        assert after.generated_tokens[: len(before.generated_tokens)] == before.generated_tokens
    assert [output.is_finished() for output in heard] == [False] * (len(heard) - 1) + [True]
    assert is_stream or len(heard) == 1
    return tokenizer.decode(heard[-1].generated_tokens), len(cancelled)


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("make", [of_bytes, of_pieces])
def test_text_ends_before_the_first_stop_string(make, is_stream):
    tokenizer = make()
    whole = tokenizer.decode(tokenizer.encode(TEXT).ids)
    for stop in (
        "return",
        "turn",
        "(x",
        ":\n",
        "# gr",
        "d",
        "京 an",
        "ef",
        "1)  #",
        "f(x):\n    re",
    ):
        if stop not in whole:  # pieces know no line's end
            continue
        expected = whole[: whole.index(stop)]
        assert answer(tokenizer, [stop], is_stream) == (expected, 1), stop
        assert answer(tokenizer, ["zz", stop, "on"], is_stream, 3)[0] == expected


def test_no_byte_of_a_stop_string_stays():
    """Its first character is several tokens, which alone are none."""
    tokenizer = of_bytes()
    assert all(len(tokenizer.encode(x).ids) > 1 for x in "ň東")
    for text, stop in (("Hi ň, so", "ň"), ("Hello 東京, so", "東")):
        expected = text[: text.index(stop)]
        for is_stream in (True, False):
            assert answer(tokenizer, [stop], is_stream, text=text) == (expected, 1)


def test_text_is_what_clients_see_but_for_those_who_stop_at_a_special_token():
    tokenizer = of_bytes()
    tokenizer.add_special_tokens(["<|end|>"])
    text = "Hello wor<|end|>ld and so on"
    assert answer(tokenizer, ["world"], True, text=text)[0] == "Hello "
    assert answer(tokenizer, ["<|end|>"], True, text=text)[0] == "Hello wor"


def test_without_one_all_of_the_text_comes():
    tokenizer = of_bytes()
    assert answer(tokenizer, ["return -1", "and so on!"], True) == (TEXT, 0)
    assert answer(tokenizer, [TEXT + "."], True) == (TEXT, 0)
    assert answer(tokenizer, [TEXT], True)[0] == ""
