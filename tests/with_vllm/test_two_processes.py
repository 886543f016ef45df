# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Tensor parallelism: two processes have half of the heads each, and give the same tokens."""

import json
import os
import subprocess
import sys
from pathlib import Path

from in_vllm import PROMPTS, alone, engine, free_port, make_model, outputs, tokens_of

# By model what is changed so that two ranks can share it; each has a norm or state of its own kind.
MODELS = {
    "gated": {},
    "aaren": {},
    "hybrid": {"tie_word_embeddings": True},
    "preset_gated_deltanet": {},
    "preset_mamba2": {},
    "mamba2_one_group": {},
    "preset_minimax": {"num_hidden_layers": 2, "layer_types": None},
    "preset_hgrn2": {},
    "preset_kimi_linear": {},
}
FEW = PROMPTS[:4] + PROMPTS[-1:]


def test_two_processes_answer_as_one(tmp_path):
    expected = {}
    for variant, changes in MODELS.items():
        model = make_model(variant, **changes)
        model.save_pretrained(tmp_path / variant)
        expected[variant] = [alone(model, prompt) for prompt in FEW]
    port = free_port()
    processes = [start(rank, tmp_path, port) for rank in range(2)]
    for process in processes:
        answers, errors = process.communicate(timeout=500)
        assert process.returncode == 0, errors[-3000:]
        assert json.loads(answers.splitlines()[-1]) == expected


def start(rank: int, folder: Path, port: int) -> subprocess.Popen:
    """A process that answers with all models in the folder, as torchrun would start it."""
    environment = {
        **os.environ,
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"},
    }
    return subprocess.Popen(
        [sys.executable, __file__, str(folder)],
        env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answer_all(folder: Path) -> None:
    answers = {}
    for variant in MODELS:
        settings = {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}
        with engine(folder / variant, **settings) as llm:
            answers[variant] = tokens_of(outputs(llm, FEW))
    print(json.dumps(answers))


if __name__ == "__main__":
    answer_all(Path(sys.argv[1]))
