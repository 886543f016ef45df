# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Bits per byte as an `evaluate` metric: `evaluate.load("examples/metrics/bits_per_byte.py")`."""

import math

import datasets
import evaluate

_DESCRIPTION = """\
How many bits a language model needs for one byte of text: its negative log-likelihood, in bits,
over the text's size in bytes. Unlike perplexity per token it does not depend on the tokenizer.
8 is what a model that knows nothing about bytes needs; lower is better.
"""

_INPUTS = """\
Args:
    predictions: negative log-likelihoods in nats, one number for each piece of text.
    references: the sizes in bytes of the same pieces of text.
Returns:
    bits_per_byte: float.
"""

_CITATION = ""


class BitsPerByte(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features(
                {"predictions": datasets.Value("float64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions: list[float], references: list[int]) -> dict[str, float]:
        num_bytes = sum(references)
        if num_bytes == 0:
            raise ValueError("bits_per_byte needs at least one byte of text")
        return {"bits_per_byte": math.fsum(predictions) / math.log(2) / num_bytes}
