# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Which of Transformers' classes have a replacement, and for which source of theirs it was written.

A replacement does the work of functions of Transformers as they were then, which a fingerprint of
their source tells. Where they read otherwise, in another version or patched by somebody, it has to
be proved that they compute the same (proof.py); else a module stays as it is, and the report says
so.
"""

import functools
import importlib
import importlib.util
from collections.abc import Mapping
from typing import NamedTuple

import transformers
from torch import nn
from transformers import PreTrainedModel

from .drafts import HEADS
from .experts import Experts
from .fingerprints import fingerprint
from .gated_convolution import GatedConvolution
from .gated_delta import GatedDelta, GatedDeltaOfOlmo, GatedDeltaOfQwen3Next
from .indexer import PackedIndexer
from .kda import KDA, KDAOfBailing
from .lightning import Lightning
from .mamba1 import Mamba1, Mamba1OfZamba, Mamba1WithNorms
from .module_classes import answers_of, device_type_of, why_it_stays
from .norms import (
    GateThenNorm,
    LateRoundedNorm,
    LateRoundedNormThenGate,
    NormOfFalcon,
    NormThenGate,
    OneMoreNorm,
    OneMoreNormOfGroups,
    PlainNorm,
)
from .proof import why_not_proved, why_other_arguments
from .recorded_layers import RecordedLayer
from .residual_convolution import (
    ConvolutionOfTokens,
    EarlierScaledConvolution,
    ResidualConvolution,
    ScaledConvolution,
)
from .rg_lru import GatedUnit, RecurrentBlock
from .ssd import SSD, SSDOfFalcon

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
        self, module: nn.Module, upstream: type[nn.Module], model: PreTrainedModel | None = None
    ) -> str | None:
        """Why it must not replace a module of this class of Transformers, which is in `model`; None
        where it may.
        """
        if (why := why_it_stays(module)) is not None:
            return why
        if (why := self._why_unknown(upstream, model)) is not None:
            known = ", ".join(dict.fromkeys(self.sources.values()))
            version = transformers.__version__
            return f"Transformers {version} computes it otherwise than {known} do; {why}"
        if self.package is not None and importlib.util.find_spec(self.package) is not None:
            if device_type_of(module) not in (None, "cpu", "meta"):
                return f"Transformers runs it on {self.package} there"
        asked = getattr(self.ours, "why_not", None)
        return None if asked is None else asked(module)

    def _why_unknown(self, upstream: type[nn.Module], model: PreTrainedModel | None) -> str | None:
        """None where the source is known, or else proved to compute the same."""
        if self.knows(upstream):
            return None
        if not self.is_recurrent:
            return "this is tried for recurrent layers only"
        return why_not_proved(upstream, self.ours, self.functions, model)


# fmt: off
GATED_DELTA = Replacement(
    GatedDelta, "gated delta rule",
    {"2bc9629c5c0f": "5.17 to 5.20", "93c181e4a987": "5.21 to 5.22", "12096e0293e8": "5.23",
     "797f33769534": "5.24"},
    DELTA_RULE, "fla",
)
GATED_DELTA_OF_QWEN3_NEXT = GATED_DELTA._replace(
    ours=GatedDeltaOfQwen3Next, sources={
        "80b4815c9e55": "5.17 to 5.20", "a30c4c97f167": "5.21 to 5.22", "644a61655baf": "5.23",
        "c58106a3cba5": "5.24",
    },
)
GATED_DELTA_OF_OLMO = GATED_DELTA._replace(
    ours=GatedDeltaOfOlmo, sources={
        "278eb4ca725d": "5.17 to 5.20", "4b5ba2da5026": "5.21 to 5.22", "07b7e99af4a8": "5.23",
        "ee274c947b79": "5.24",
    },
)
KDA_LAYER = Replacement(
    KDA, "Kimi delta attention",
    {"6094d06945a2": "5.17 to 5.20", "d89afa14b01b": "5.21 to 5.23", "f42a1e703a72": "5.24"},
    KIMI_DELTA, "fla",
)
KDA_OF_BAILING = KDA_LAYER._replace(
    ours=KDAOfBailing,
    sources={"0328b9beefc7": "5.20", "571943191a51": "5.21 to 5.23", "62c5b75db11b": "5.24"},
)
PACKED_INDEXER = Replacement(
    PackedIndexer, "indexer of packed sequences",
    {"a6d7941c917e": "5.17", "4c48dba6bf3c": "5.20 to 5.23", "26dc6fea0c90": "5.24"},
    ("Glm5NextTextAttention",), is_recurrent=False,
)
SSD_LAYER = Replacement(
    SSD, "Mamba-2's state space",
    {"9b07f9399435": "5.17", "826a20fe3e97": "5.20", "fae0672b8d3f": "5.21 to 5.23",
     "38be8b96e986": "5.24"},
    STATE_SPACE, "mamba_ssm",
)
SSD_OF_FALCON = SSD_LAYER._replace(
    ours=SSDOfFalcon,
    sources={"6499622a7f34": "5.17", "728bc8a095b3": "5.20", "4ed845dc6c84": "5.21 to 5.23",
             "3fd9b7f72efc": "5.24"},
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
MAMBA1_OF_ZAMBA = MAMBA1_LAYER._replace(
    ours=Mamba1OfZamba,
    sources={"a6f1a6cd9171": "5.17", "91663e2dcaf8": "5.20", "1075f7cf5ed1": "5.21 to 5.23",
             "b28fa86fc771": "5.24"},
)
LIGHTNING = Replacement(
    Lightning, "lightning attention",
    {"c85696f6fdd9": "5.17", "9e144d179b29": "5.20 to 5.23", "b68b0915c82e": "5.24"},
    ("apply_mask_to_padding_states", "MiniMaxCache"),
)

GATED_CONVOLUTION = Replacement(
    GatedConvolution, "short convolution",
    {"995b584918c9": "5.17 to 5.20", "1cfe403c69f7": "5.21", "ef72aad71268": "5.22 to 5.23",
     "14fbfe71e371": "5.24"},
    CONVOLUTION, "causal_conv1d",
)

RESIDUAL_CONVOLUTION = GATED_CONVOLUTION._replace(
    ours=ResidualConvolution, sources={"98aef4d4520d": "5.21 to 5.23", "f78fa1fb9aad": "5.24"},
)
EARLIER_SCALED_CONVOLUTION = GATED_CONVOLUTION._replace(
    ours=EarlierScaledConvolution, sources={"2e0f132603f9": "5.23"},
)
SCALED_CONVOLUTION = GATED_CONVOLUTION._replace(
    ours=ScaledConvolution, sources={"cf0557968c17": "5.24"}, earlier=EARLIER_SCALED_CONVOLUTION,
)
CONVOLUTION_OF_TOKENS = Replacement(
    ConvolutionOfTokens, "short convolution", {"7d87bb668adf": "5.23", "ae9ba3eb5778": "5.24"},
    ("apply_mask_to_padding_states", *CACHE),
)

RG_LRU = Replacement(GatedUnit, "RG-LRU", {"71f2fa348778": "5.17 to 5.24"})
BLOCK_OF_RG_LRU = Replacement(
    RecurrentBlock, "short convolution", {"293cf2e4cdc4": "5.17 to 5.24"},
)

PLAIN_NORM = Replacement(PlainNorm, "norm", {"78ed4555aca3": "5.17 to 5.24"}, is_recurrent=False)
LATE_ROUNDED_NORM = PLAIN_NORM._replace(
    ours=LateRoundedNorm, sources={
        "9974c071f03d": "5.17 to 5.24", "5b82fea17ac1": "5.20 to 5.24",
        "78ed4555aca3": "5.17",  # NemotronHRMSNorm's, which was a plain one
    },
)
ONE_MORE_NORM = PLAIN_NORM._replace(
    ours=OneMoreNorm, sources={"44c45efe22fd": "5.17 to 5.24"},
)
ONE_MORE_NORM_OF_GROUPS = PLAIN_NORM._replace(
    ours=OneMoreNormOfGroups, sources={"e89686c5e50a": "5.17 to 5.24"},
)
NORM_THEN_GATE = Replacement(
    NormThenGate, "gated norm", {"78222cbdcbcb": "5.17 to 5.24"}, is_recurrent=False,
)
LATE_ROUNDED_NORM_THEN_GATE = NORM_THEN_GATE._replace(
    ours=LateRoundedNormThenGate, sources={"cf6976411ac0": "5.17 to 5.24"},
)
GATE_THEN_NORM = NORM_THEN_GATE._replace(
    ours=GateThenNorm, sources={"ff3654df3895": "5.17 to 5.20", "aec0fa17fa67": "5.17 to 5.24"},
)
NORM_OF_FALCON = NORM_THEN_GATE._replace(
    ours=NormOfFalcon, sources={"71372cf4e12c": "5.17 to 5.20", "2f45cd599fdc": "5.21 to 5.24"},
)

EXPERTS = Replacement(
    Experts, "experts", {"ecc6aad1052d": "5.17", "03157df73174": "5.18 to 5.24"},
    is_recurrent=False,
)
EXPERTS_OF_GLM5 = EXPERTS._replace(
    sources={"ec83af9fb078": "5.17", "cf7bd57fab07": "5.18 to 5.24"},
)
EXPERTS_OF_NEMOTRON = EXPERTS._replace(
    sources={"efab15fa11e2": "5.17", "b7b77eedb3e1": "5.18 to 5.24"},
)
EXPERTS_OF_INKLING2 = EXPERTS._replace(sources={"9b059a60b9f7": "5.23 to 5.24"})

# Classes by their names, for each model of Transformers. No two models have one of the same name.
FAMILIES: dict[str, dict[str, Replacement]] = {
    "qwen3_next": {
        "Qwen3NextGatedDeltaNet": GATED_DELTA_OF_QWEN3_NEXT,
        "Qwen3NextRMSNormGated": NORM_THEN_GATE,
        "Qwen3NextRMSNorm": ONE_MORE_NORM,
        "Qwen3NextExperts": EXPERTS,
    },
    "qwen3_5": {
        "Qwen3_5GatedDeltaNet": GATED_DELTA,
        "Qwen3_5RMSNormGated": NORM_THEN_GATE,
        "Qwen3_5RMSNorm": ONE_MORE_NORM,
    },
    "qwen3_5_moe": {
        "Qwen3_5MoeGatedDeltaNet": GATED_DELTA,
        "Qwen3_5MoeRMSNormGated": NORM_THEN_GATE,
        "Qwen3_5MoeRMSNorm": ONE_MORE_NORM,
        "Qwen3_5MoeExperts": EXPERTS,
    },
    "qwen4_exp": {
        "Qwen4ExpTextGatedDeltaNet": GATED_DELTA,
        "Qwen4ExpTextRMSNormGated": NORM_THEN_GATE,
        "Qwen4ExpTextRMSNorm": ONE_MORE_NORM_OF_GROUPS,
        "Qwen4ExpTextExperts": EXPERTS,
    },
    "lara_mini": {
        "LaraMiniGatedDeltaNet": GATED_DELTA,
        "LaraMiniRMSNormGated": LATE_ROUNDED_NORM_THEN_GATE,
        "LaraMiniRMSNorm": LATE_ROUNDED_NORM,
        "LaraMiniExperts": EXPERTS,
    },
    "olmo_hybrid": {
        "OlmoHybridGatedDeltaNet": GATED_DELTA_OF_OLMO,
        "OlmoHybridRMSNormGated": NORM_THEN_GATE,
        "OlmoHybridRMSNorm": LATE_ROUNDED_NORM,
    },
    "kimi_linear": {
        "KimiLinearDeltaAttention": KDA_LAYER,
        "KimiLinearRMSNormGated": LATE_ROUNDED_NORM_THEN_GATE,
        "KimiLinearRMSNorm": PLAIN_NORM,
        "KimiLinearExperts": EXPERTS,
    },
    "glm5_next": {
        "Glm5NextTextLinearAttention": KDA_LAYER,
        "Glm5NextTextIndexer": PACKED_INDEXER,
        "Glm5NextTextRMSNormGated": LATE_ROUNDED_NORM_THEN_GATE,
        "Glm5NextTextRMSNorm": PLAIN_NORM,
        "Glm5NextTextExperts": EXPERTS_OF_GLM5,
    },
    "bailing_hybrid": {
        "BailingHybridDeltaAttention": KDA_OF_BAILING,
        "BailingHybridRMSNormGated": LATE_ROUNDED_NORM_THEN_GATE,
        "BailingHybridRMSNorm": PLAIN_NORM,
        "BailingHybridExperts": EXPERTS,
    },
    "mamba": {
        "MambaMixer": MAMBA1_LAYER,
        "MambaRMSNorm": PLAIN_NORM,
    },
    "falcon_mamba": {
        "FalconMambaMixer": MAMBA1_WITH_NORMS,
        "FalconMambaRMSNorm": PLAIN_NORM,
    },
    "jamba": {
        "JambaMambaMixer": MAMBA1_WITH_NORMS,
        "JambaRMSNorm": PLAIN_NORM,
        "JambaExperts": EXPERTS,
    },
    "zamba": {
        "ZambaMambaMixer": MAMBA1_OF_ZAMBA,
        "ZambaRMSNorm": PLAIN_NORM,
    },
    "mamba2": {
        "Mamba2Mixer": SSD_LAYER,
        "MambaRMSNormGated": GATE_THEN_NORM,
        "Mamba2RMSNorm": PLAIN_NORM,
    },
    "bamba": {
        "BambaMixer": SSD_LAYER,
        "BambaRMSNormGated": GATE_THEN_NORM,
        "BambaRMSNorm": PLAIN_NORM,
    },
    "granitemoehybrid": {
        "GraniteMoeHybridMambaLayer": SSD_LAYER,
        "GraniteMoeHybridRMSNormGated": GATE_THEN_NORM,
        "GraniteMoeHybridRMSNorm": PLAIN_NORM,
        "GraniteMoeHybridExperts": EXPERTS,
    },
    "nemotron_h": {
        "NemotronHMamba2Mixer": SSD_LAYER,
        "NemotronHRMSNormGated": GATE_THEN_NORM,
        "NemotronHRMSNorm": LATE_ROUNDED_NORM,
        "NemotronHExperts": EXPERTS_OF_NEMOTRON,
    },
    "zamba2": {
        "Zamba2MambaMixer": SSD_LAYER,
        "Zamba2RMSNormGated": GATE_THEN_NORM,
        "Zamba2RMSNorm": PLAIN_NORM,
    },
    "falcon_h1": {
        "FalconH1Mixer": SSD_OF_FALCON,
        "FalconH1RMSNormGated": NORM_OF_FALCON,
        "FalconH1RMSNorm": PLAIN_NORM,
    },
    "lfm2": {
        "Lfm2ShortConv": GATED_CONVOLUTION,
        "Lfm2RMSNorm": PLAIN_NORM,
    },
    "lfm2_moe": {
        "Lfm2MoeShortConv": GATED_CONVOLUTION,
        "Lfm2MoeRMSNorm": PLAIN_NORM,
        "Lfm2MoeExperts": EXPERTS,
    },
    "lfm3": {
        "Lfm3ShortConv": GATED_CONVOLUTION,
        "Lfm3RMSNorm": PLAIN_NORM,
    },
    "inkling": {
        "InklingShortConvolution": RESIDUAL_CONVOLUTION,
        "InklingRMSNorm": PLAIN_NORM,
        "InklingExperts": EXPERTS,
    },
    "inkling2": {
        "Inkling2ShortConvolution": SCALED_CONVOLUTION,
        "Inkling2DynamicShortConvolution": CONVOLUTION_OF_TOKENS,
        "Inkling2RMSNorm": LATE_ROUNDED_NORM,
        "Inkling2Experts": EXPERTS_OF_INKLING2,
    },
    "inkling2_loop": {
        "Inkling2LoopShortConvolution": SCALED_CONVOLUTION,
        "Inkling2LoopDynamicShortConvolution": CONVOLUTION_OF_TOKENS,
        "Inkling2LoopRMSNorm": LATE_ROUNDED_NORM,
        "Inkling2LoopExperts": EXPERTS_OF_INKLING2,
    },
    "recurrent_gemma": {
        "RecurrentGemmaRecurrentBlock": BLOCK_OF_RG_LRU,
        "RecurrentGemmaRglru": RG_LRU,
        "RecurrentGemmaRMSNorm": ONE_MORE_NORM,
    },
    "minimax": {
        "MiniMaxLightningAttention": LIGHTNING,
        "MiniMaxRMSNorm": PLAIN_NORM,
        "MiniMaxExperts": EXPERTS,
    },
}
# fmt: on

# Of the same, layers around a recurrent one that remember nothing else.
LAYERS = {
    "qwen3_next": "Qwen3NextDecoderLayer",
    "qwen3_5": "Qwen3_5DecoderLayer",
    "qwen3_5_moe": "Qwen3_5MoeDecoderLayer",
    "qwen4_exp": "Qwen4ExpTextDecoderLayer",
    "lara_mini": "LaraMiniDecoderLayer",
    "olmo_hybrid": "OlmoHybridLinearAttentionDecoderLayer",
    "kimi_linear": "KimiLinearDecoderLayer",
    "glm5_next": "Glm5NextTextDecoderLayer",
    "bailing_hybrid": "BailingHybridDecoderLayer",
    "mamba": "MambaBlock",
    "falcon_mamba": "FalconMambaBlock",
    "jamba": "JambaMambaDecoderLayer",
    "zamba": "ZambaMambaDecoderLayer",
    "mamba2": "Mamba2Block",
    "bamba": "BambaDecoderLayer",
    "granitemoehybrid": "GraniteMoeHybridDecoderLayer",
    "nemotron_h": "NemotronHBlock",
    "zamba2": "Zamba2MambaDecoderLayer",
    "lfm2": "Lfm2DecoderLayer",
    "lfm2_moe": "Lfm2MoeDecoderLayer",
    "lfm3": "Lfm3DecoderLayer",
}

MODELS = "transformers.models."
# (module, name) of every class of Transformers above -> what replaces it
REPLACEMENTS: dict[tuple[str, str], Replacement] = {
    (f"{MODELS}{model}.modeling_{model}", name): replacement
    for model, classes in FAMILIES.items()
    for name, replacement in classes.items()
}
# (module, name) of the layers around those
RECORDED = {(f"{MODELS}{model}.modeling_{model}", name) for model, name in LAYERS.items()}
# the same, and heads that take drafts -> what is put before them
AROUND: dict[tuple[str, str], type] = {**dict.fromkeys(RECORDED, RecordedLayer), **HEADS}
# (module, name) of all classes that are replaced
REPLACED = {*REPLACEMENTS, *AROUND}


def replacement_for(cls: type) -> Replacement | None:
    """What replaces modules of exactly this class; an earlier one if that takes its arguments."""
    replacement = REPLACEMENTS.get((cls.__module__, cls.__name__))
    earlier = None if replacement is None else replacement.earlier
    takes_those = earlier is not None and why_other_arguments(cls, earlier.ours) is None
    return earlier if takes_those else replacement


@functools.cache
def made_class(module: str, name: str) -> type[nn.Module]:
    """The class that replaces one of Transformers: a subclass of it and of ours, of the same name,
    so that whoever asks for the name is not surprised; `replaced` is where pickle finds it.
    """
    upstream = getattr(importlib.import_module(module), name)
    replacement = replacement_for(upstream)
    ours = AROUND[module, name] if replacement is None else replacement.ours
    body = {"__module__": f"{__package__}.replaced", "__doc__": ours.__doc__}
    return type(name, (ours, upstream), body | answers_of(upstream))
