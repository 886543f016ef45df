# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""TRL's trainer over a few texts, with and without packing."""

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from saved_models import word_tokenizer
from tiny import random_ids


def words(*lengths: int) -> list[str]:
    """Texts of so many words."""
    return [
        " ".join(f"w{i}" for i in random_ids(length, seed=length).tolist()) for length in lengths
    ]


def sft_trainer(model, folder, rows: int = 8, **options) -> SFTTrainer:
    """A trainer for one step of SGD over all of eight texts of different lengths."""
    config = SFTConfig(
        str(folder),
        per_device_train_batch_size=rows,
        max_steps=1,
        optim="sgd",
        learning_rate=0.1,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        **options,
    )
    texts = Dataset.from_dict({"text": words(3, 9, 4, 7, 11, 5, 10, 6)})
    return SFTTrainer(
        model=model,
        args=config,
        train_dataset=texts,
        processing_class=word_tokenizer(eos_token="w40"),
    )


PACKED = {
    "bfd": {"packing": True, "packing_strategy": "bfd", "max_length": 16},
    "padding_free": {"padding_free": True, "max_length": None},
}
