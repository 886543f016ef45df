# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The classes that replace those of Transformers, and the sources of Transformers that they were
written for.

A replacement does the work of functions of Transformers as they were then, which a fingerprint of
their source tells. Where they read otherwise, in another version or patched by somebody, it has to
be proved that they compute the same (proof/proof.py); else a module stays as it is, and the report
says so. Here are those that several families share; families/ has the others.
"""

import importlib.util
from collections.abc import Mapping
from typing import Any, NamedTuple

import transformers
from torch import nn
from transformers import PreTrainedModel

from .experts import Experts
from .layers.gated_convolution import GatedConvolution
from .layers.gated_delta import GatedDelta
from .layers.kda import KDA
from .layers.mamba1 import Mamba1, Mamba1WithNorms
from .layers.ssd import SSD
from .module_classes import device_type_of, why_it_stays
from .norms import (
    GateThenNorm,
    LateRoundedNorm,
    LateRoundedNormThenGate,
    NormThenGate,
    OneMoreNorm,
    PlainNorm,
)
from .proof.fingerprints import fingerprint
from .proof.proof import why_not_proved

CACHE = ("transformers.cache_utils.LinearAttentionLayer",)
CONVOLUTION = ("apply_mask_to_padding_states", "causal_conv1d_fn", "causal_conv1d_update", *CACHE)
DELTA_RULE = (
    "l2norm",
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    *CONVOLUTION,
)
KIMI_DELTA = (
    "l2norm",
    "chunk_kimi_delta_attention",
    "recurrent_kimi_delta_attention",
    *CONVOLUTION,
)
SELECTIVE_SCAN = (
    "mamba_inner_fn",
    "mamba_selective_scan",
    "mamba_selective_state_update",
    *CONVOLUTION,
)
STATE_SPACE = ("mamba2_chunk_scan", "mamba2_selective_state_update", *CONVOLUTION)


class Replacement(NamedTuple):
    """One of our classes, which stands in for `forward` of classes of Transformers."""

    ours: type[nn.Module]
    gist: str  # what it is, for reports
    sources: Mapping[str, str]  # fingerprints, and the versions of Transformers that have them
    functions: tuple[str, ...] = ()  # whose work it does, too, of the class's module or by path
    package: str | None = None  # that Transformers runs on other devices, where it is installed
    is_recurrent: bool = True
    earlier: "Replacement | None" = None  # for older sources, that take other arguments

    def knows(self, upstream: type[nn.Module]) -> bool:
        """Whether it was written for the source that a class of Transformers has."""
        return fingerprint(upstream, self.functions) in self.sources

    def why_not(
        self,
        module: nn.Module,
        upstream: type[nn.Module],
        model: PreTrainedModel | None,
        sizes: Mapping[str, Any],
    ) -> str | None:
        """Why it must not replace a module of this class of Transformers, which is in `model`, of
        which there are tiny ones of these sizes; None where it may.
        """
        if (why := why_it_stays(module)) is not None:
            return why
        if (why := self._why_unknown(upstream, model, sizes)) is not None:
            known = ", ".join(dict.fromkeys(self.sources.values()))
            version = transformers.__version__
            return f"Transformers {version} computes it otherwise than {known} do; {why}"
        if self.package is not None and importlib.util.find_spec(self.package) is not None:
            if device_type_of(module) not in (None, "cpu", "meta"):
                return f"Transformers runs it on {self.package} there"
        asked = getattr(self.ours, "why_not", None)
        return None if asked is None else asked(module)

    def _why_unknown(
        self, upstream: type[nn.Module], model: PreTrainedModel | None, sizes: Mapping[str, Any]
    ) -> str | None:
        """None where the source is known, or else proved to compute the same."""
        if self.knows(upstream):
            return None
        if not self.is_recurrent:
            return "this is tried for recurrent layers only"
        return why_not_proved(upstream, self.ours, self.functions, model, sizes)


# fmt: off
GATED_DELTA = Replacement(
    GatedDelta, "gated delta rule",
    {"2bc9629c5c0f": "5.17 to 5.20", "93c181e4a987": "5.21 to 5.22", "12096e0293e8": "5.23",
     "797f33769534": "5.24"},
    DELTA_RULE, "fla",
)

KDA_LAYER = Replacement(
    KDA, "Kimi delta attention",
    {"6094d06945a2": "5.17 to 5.20", "d89afa14b01b": "5.21 to 5.23", "f42a1e703a72": "5.24"},
    KIMI_DELTA, "fla",
)

SSD_LAYER = Replacement(
    SSD, "Mamba-2's state space",
    {"9b07f9399435": "5.17", "826a20fe3e97": "5.20", "fae0672b8d3f": "5.21 to 5.23",
     "38be8b96e986": "5.24"},
    STATE_SPACE, "mamba_ssm",
)

MAMBA1_LAYER = Replacement(
    Mamba1, "Mamba's state space",
    {"b445819ce4d9": "5.17 to 5.20", "8c3b0b447aa8": "5.21 to 5.23", "ecd806476711": "5.24"},
    SELECTIVE_SCAN, "mamba_ssm",
)
MAMBA1_WITH_NORMS = MAMBA1_LAYER._replace(
    ours=Mamba1WithNorms, sources={
        # Falcon-Mamba's
        "4da1c6154d02": "5.17 to 5.20", "6faa82a5020f": "5.21 to 5.23", "fcc699b516ea": "5.24",
        # Jamba's
        "2a2307efd8eb": "5.17 to 5.20", "b4cf110bd4dd": "5.21 to 5.23", "2be3bc4d34dc": "5.24",
    },
)

GATED_CONVOLUTION = Replacement(
    GatedConvolution, "short convolution",
    {"995b584918c9": "5.17 to 5.20", "1cfe403c69f7": "5.21", "ef72aad71268": "5.22 to 5.23",
     "14fbfe71e371": "5.24"},
    CONVOLUTION, "causal_conv1d",
)

PLAIN_NORM = Replacement(PlainNorm, "norm", {"78ed4555aca3": "5.17 to 5.24"}, is_recurrent=False)
LATE_ROUNDED_NORM = PLAIN_NORM._replace(
    ours=LateRoundedNorm,
    sources={"9974c071f03d": "5.17 to 5.24", "5b82fea17ac1": "5.20 to 5.24"},
)
ONE_MORE_NORM = PLAIN_NORM._replace(
    ours=OneMoreNorm, sources={"44c45efe22fd": "5.17 to 5.24"},
)
# Norms that any model may have.
NORMS = (PLAIN_NORM, LATE_ROUNDED_NORM, ONE_MORE_NORM)

NORM_THEN_GATE = Replacement(
    NormThenGate, "gated norm", {"78222cbdcbcb": "5.17 to 5.24"}, is_recurrent=False,
)
LATE_ROUNDED_NORM_THEN_GATE = NORM_THEN_GATE._replace(
    ours=LateRoundedNormThenGate, sources={"cf6976411ac0": "5.17 to 5.24"},
)
GATE_THEN_NORM = NORM_THEN_GATE._replace(
    ours=GateThenNorm, sources={"ff3654df3895": "5.17 to 5.20", "aec0fa17fa67": "5.17 to 5.24"},
)

EXPERTS = Replacement(
    Experts, "experts", {"ecc6aad1052d": "5.17", "03157df73174": "5.18 to 5.24"},
    is_recurrent=False,
)
