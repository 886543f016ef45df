# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Tiny models of Transformers that put images or sounds before one of its recurrent models."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from packaging.version import Version
from torch import Tensor

from hf_linear_attention.upstream.families import FAMILIES
from hf_linear_attention.upstream.tiny_models import VOCAB_SIZE, fill_weights

# Tokens in whose places images and sounds come, beside them, and beside nothing here.
IMAGE, SOUND, MARK, OTHER = range(VOCAB_SIZE - 1, VOCAB_SIZE - 5, -1)
SEES = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
HEARS = dict(SEES, num_mel_bins=8)
QWEN = dict(FAMILIES["qwen3_5"].sizes, model_type="qwen3_5_text")
NEMOTRON = dict(FAMILIES["nemotron_h"].sizes, model_type="nemotron_h")
MINICPM = dict(
    text_config=QWEN,
    vision_config=dict(SEES, patch_size=4, image_size=32),
    insert_layer_id=0,
    image_token_id=IMAGE,
    tie_word_embeddings=False,
)


class Wrapper(NamedTuple):
    """A model around a recurrent one."""

    class_name: str
    since: str  # release of Transformers
    layer: str  # class of its recurrent layers
    config: dict[str, Any]
    places: tuple[int, int]  # the token in whose places an image or a sound comes, how many times
    inputs: Callable[[Tensor], dict[str, Tensor]]  # what is seen or heard, beside a prompt (1, T)


def of_minicpm(ids: Tensor) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(1, 3, 4, 4 * 32), "target_sizes": torch.tensor([[4, 8]])}


def of_minicpm_with_types(ids: Tensor) -> dict[str, Tensor]:
    return {**of_minicpm(ids), "mm_token_type_ids": (ids == IMAGE).int()}


def of_lfm2(ids: Tensor) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(1, 16, 3 * 4 * 4),
        "spatial_shapes": torch.tensor([[4, 4]]),
        "pixel_attention_mask": torch.ones(1, 16).long(),
    }


def of_lfm3(ids: Tensor) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(16, 2 * 3 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }


def of_nemotron(ids: Tensor) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(16, 3 * 4 * 4), "image_grid_hw": torch.tensor([[4, 4]])}


def heard(ids: Tensor) -> dict[str, Tensor]:
    return {
        "input_features": torch.randn(1, 16, 8),
        "input_features_mask": torch.ones(1, 16).long(),
    }


def questions(ids: Tensor) -> dict[str, Tensor]:
    return {
        "marks": torch.tensor([[7, ids.shape[1] - 1]]),
        "num_options": torch.tensor([[2, 3]]),
        "question_type_ids": torch.tensor([[0, 2]]),
    }


# By types of models.
WRAPPERS = {
    "minicpmv4_6": Wrapper(
        "MiniCPMV4_6ForConditionalGeneration",
        "5.17",
        "Qwen3_5GatedDeltaNet",
        MINICPM,
        (IMAGE, 2),
        of_minicpm,
    ),
    "minicpmv4_7": Wrapper(
        "MiniCPMV4_7ForConditionalGeneration",
        "5.18",
        "Qwen3_5GatedDeltaNet",
        dict(
            MINICPM,
            image_start_id=MARK,
            image_end_id=MARK,
            slice_start_id=OTHER,
            slice_end_id=OTHER,
            newline_id=OTHER,
        ),
        (IMAGE, 2),
        of_minicpm_with_types,
    ),
    "minicpm_ocr": Wrapper(
        "MiniCPMOcrForConditionalGeneration",
        "5.21",
        "Qwen3_5GatedDeltaNet",
        MINICPM,
        (IMAGE, 8),
        of_minicpm,
    ),
    "lfm2_vl": Wrapper(
        "Lfm2VlForConditionalGeneration",
        "5.17",
        "Lfm2ShortConv",
        dict(
            text_config=dict(FAMILIES["lfm2"].sizes, model_type="lfm2"),
            vision_config=dict(SEES, patch_size=4, num_patches=16),
            image_token_id=IMAGE,
            projector_hidden_size=16,
        ),
        (IMAGE, 4),
        of_lfm2,
    ),
    "lfm3_vl": Wrapper(
        "Lfm3VlForConditionalGeneration",
        "5.23",
        "Lfm3ShortConv",
        dict(
            text_config=dict(FAMILIES["lfm3"].sizes, model_type="lfm3"),
            vision_config=dict(SEES, num_key_value_heads=1, patch_size=4),
            image_token_id=IMAGE,
            video_token_id=OTHER,
            projector_hidden_size=16,
        ),
        (IMAGE, 4),
        of_lfm3,
    ),
    "nemotron_h_omni": Wrapper(
        "NemotronH_Omni_Reasoning_V3",
        "5.18",
        "NemotronHMamba2Mixer",
        dict(
            text_config=NEMOTRON,
            vision_config=dict(
                hidden_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                mlp_ratio=1.0,
                patch_size=4,
                image_size=32,
                max_img_size=32,
                model_type="radio",
                video_temporal_patch_size=2,
            ),
            vision_hidden_size=16,
            projector_hidden_size=16,
            image_token_id=IMAGE,
            video_token_id=OTHER,
            audio_token_id=SOUND,
        ),
        (IMAGE, 4),
        of_nemotron,
    ),
    "nemo_speechlm": Wrapper(  # nemotron3_5_transcribe
        "Nemotron3_5TranscribeForConditionalGeneration",
        "5.22",
        "NemotronHMamba2Mixer",
        dict(
            text_config=NEMOTRON,
            audio_config=dict(
                asr_config=HEARS,
                diarization_config=dict(
                    audio_config=HEARS,
                    head_config=dict(hidden_size=8, audio_hidden_size=16),
                    model_type="nemotron3_diarization",
                ),
            ),
            word_timestamp_config=dict(HEARS, vocab_size=9, blank_token_id=8),
            audio_token_id=SOUND,
        ),
        (SOUND, 2),
        heard,
    ),
    "jev": Wrapper(
        "JevForDecision",
        "5.23",
        "Qwen3_5GatedDeltaNet",
        dict(text_config=QWEN, hidden_size=32),
        (MARK, 1),
        questions,
    ),
}
WRAPPERS_HERE = [
    name
    for name, wrapper in WRAPPERS.items()
    if Version(transformers.__version__) >= Version(wrapper.since)
]
GENERATING = [name for name in WRAPPERS_HERE if name != "jev"]


def tiny_wrapper(name: str) -> torch.nn.Module:
    """In evaluation mode; the same weights each time."""
    config = transformers.AutoConfig.for_model(name, **WRAPPERS[name].config)
    torch.manual_seed(0)
    model = getattr(transformers, WRAPPERS[name].class_name)(config).eval()
    fill_weights(model, torch.default_generator)
    return model


def words(length: int) -> Tensor:
    """(1, length) tokens without places for anything else."""
    return torch.randint(2, OTHER, (1, length))


def prompt(name: str, length: int) -> dict[str, Tensor]:
    """Of words around an image, a sound or questions."""
    token, count = WRAPPERS[name].places
    places = torch.tensor([[MARK, *[token] * count, MARK]])
    before, behind = words(3), words(length - 3 - places.shape[1])
    ids = torch.cat([before, places, behind], 1)
    return {"input_ids": ids, **WRAPPERS[name].inputs(ids)}
