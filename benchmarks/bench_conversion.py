# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Softmax models trained here, made linear, and what that cost.

    python benchmarks/bench_conversion.py --full                    # some two hours of a core
    python benchmarks/bench_conversion.py --full --originals Llama  # half of it

Trains softmax models of more than 10 M weights, the package's own and a Llama, each for about half
an hour of one core: on texts that ask for what they have said first, on Python's sources and such
texts then. Makes a linear model of each, and a hybrid, in which one layer in four stays softmax,
that which recall gains most from, by examples/convert.py with at most a fifth of the tokens that
the original was trained with. Then compares them as examples/convert_report.py does.

What is there already in --runs is not done again: a killed run goes on. At the end results/ gets
the figures and the plot, for docs/converting.md.
"""

import json
import shlex
import sys
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import harness

EXAMPLES = Path(__file__).parents[1] / "examples"
OUTPUTS = Path(__file__).parents[1] / "outputs" / "conversion"
sys.path.append(str(EXAMPLES))

import convert  # noqa: E402
import convert_report  # noqa: E402
import train_causal_lm  # noqa: E402


@dataclass(frozen=True)
class Setting:
    """Flags of the scripts in examples/.

    data: of all of them, but for recall_share, of those that train.
    recall, training: an original's, on recall texts in short blocks alone, then on the text.
    originals, conversions: by name; {NAME} in the latter is the folder of another conversion.
    report: on other text than what the scripts show of their training, by which rates were chosen.
    """

    data: str
    recall_share: float
    shape: str
    recall: str
    training: str
    originals: dict[str, str]
    conversion: str
    conversions: dict[str, str]
    report: str


SETTINGS = {
    "full": Setting(
        data="--block_size 256 --max_train_bytes 6000000 --max_eval_bytes 100000",
        recall_share=0.4,
        shape="--vocab_size 2048 --hidden_size 448 --num_hidden_layers 4 --num_attention_heads 7 "
        "--intermediate_size 1152",
        recall="--block_size 64 --per_device_train_batch_size 64 "
        "--max_steps 200 --muon true --learning_rate 1e-2 --warmup_steps 30 "
        "--lr_scheduler_type constant_with_warmup --eval_strategy no --save_steps 50",
        # Recall texts give the embeddings of all other tokens a large common part: weights decay.
        training="--per_device_train_batch_size 16 --max_steps 300 --muon true "
        "--learning_rate 1e-2 --weight_decay 2 --warmup_steps 10 --lr_scheduler_type cosine "
        "--eval_strategy no --save_steps 30",
        originals={
            "Llama": "--preset llama --config_overrides "
            """'{"num_key_value_heads": 7, "tie_word_embeddings": true}'""",
            "softmax": """--preset softmax --config_overrides '{"tie_word_embeddings": true}'""",
        },
        conversion="""--per_device_train_batch_size 4 --overrides '{"window_size": 32}' """
        "--transfer_tokens 150000 --transfer_learning_rate 0.1 --distill_tokens 250000 "
        "--distill_learning_rate 2e-4 --eval_strategy no --eval_on_start false --save_steps 0.5",
        conversions={
            "linear": "--softmax_layers none",
            "hybrid": "--softmax_layers gain:1 --calibration_by_recall true "
            "--calibration_tokens 16384 --transferred {linear}/2-transferred",
        },
        report="--questions 160 --window_size 32 --skip_eval_bytes 100000",
    ),
    "smallest": Setting(
        data="--block_size 64 --max_eval_bytes 3000 --max_train_bytes 60000",
        recall_share=0.25,
        shape="--vocab_size 500 --hidden_size 32 --num_hidden_layers 4 "
        "--num_attention_heads 2 --intermediate_size 48",
        recall="--block_size 32 --max_train_bytes 9000 --max_steps 3 "
        "--per_device_train_batch_size 2",
        training="--max_steps 2 --per_device_train_batch_size 2",
        originals={"softmax": "--preset softmax"},
        conversion="--per_device_train_batch_size 2 --transfer_tokens 256 --distill_tokens 256 "
        """--overrides '{"window_size": 16}'""",
        conversions={
            "linear": "--softmax_layers none",
            "hybrid": "--softmax_layers 4 --transferred {linear}/2-transferred",
        },
        report="--questions 8 --contexts 10 30 --window_size 16 --skip_eval_bytes 3000",
    ),
}


def precision() -> str:
    """Flags of all that trains: bfloat16 (autocast) where the processor has a unit for it."""
    capabilities = torch.cpu.get_capabilities()
    has_unit = any(capabilities.get(unit, False) for unit in ("amx_bf16", "avx512_bf16"))
    return "--bf16 true --use_cpu true" if has_unit else ""


def training_flags(setting: Setting) -> str:
    """Of what trains on the text."""
    return f"{setting.data} --recall_share {setting.recall_share} {precision()}"


def train(flags: str, folder: Path) -> dict[str, Any]:
    """Goes on where it was stopped; the metrics."""
    metrics = folder / "metrics.json"
    if not metrics.exists():
        arguments = [*shlex.split(flags), "--output_dir", str(folder)]
        if train_causal_lm.last_checkpoint(folder) is not None:
            arguments += ["--resume_from_checkpoint", "last"]
        train_causal_lm.main(arguments)
    return json.loads(metrics.read_text(encoding="utf-8"))


def train_original(setting: Setting, name: str, folder: Path) -> dict[str, int]:
    """On recall texts, then on the text; parameters, and tokens of both and of the former."""
    first = folder.with_name("recall")
    start = f"{setting.shape} {setting.originals[name]}"
    flags = f"{setting.data} {setting.recall} {start} --recall_share 1 {precision()}"
    recall_tokens = train(flags, first)["train_tokens"]
    start = f"--model {shlex.quote(str(first))}"
    metrics = train(f"{training_flags(setting)} {setting.training} {start}", folder)
    return {
        "parameters": metrics["parameters"],
        "train_tokens": recall_tokens + metrics["train_tokens"],
        "recall_tokens": recall_tokens,
    }


def convert_original(setting: Setting, name: str, original: Path, folders: dict[str, Path]) -> None:
    """One conversion, in the folder of its name."""
    flags = shlex.split(
        f"{training_flags(setting)} {setting.conversion} "
        + setting.conversions[name].format(**folders)
    )
    convert.main([*flags, "--model", str(original), "--output_dir", str(folders[name])])


def compare(setting: Setting, original: Path, folders: dict[str, Path]) -> dict[str, Any]:
    """Rows of the table, by name, without the folders of this machine."""
    stages = {
        f"{name}, {stage[2:]}": folder / stage
        for name, folder in folders.items()
        for stage in (convert.CONVERTED, convert.TRANSFERRED, convert.DISTILLED)
    }
    models = [f"{name}={folder}" for name, folder in stages.items()]
    arguments = [*shlex.split(f"{setting.data} {setting.report}"), "--original", str(original)]
    arguments += ["--models", *models, "--output_dir", str(original.parent / "report")]
    rows = convert_report.main(arguments)
    return {
        name: {key: value for key, value in row.items() if key != "model"}
        for name, row in rows.items()
    }


def run(setting: Setting, name: str, runs: Path) -> dict[str, Any]:
    """All that is done with one original; what the results say of it."""
    original = runs / name / "original"
    folders = {conversion: runs / name / conversion for conversion in setting.conversions}
    training = train_original(setting, name, original)
    for conversion in setting.conversions:
        convert_original(setting, conversion, original, folders)
    return {
        "original": name,
        "training": training,
        "models": compare(setting, original, folders),
    }


def save(folder: Path, name: str, setting: Setting, rows: list[dict[str, Any]]) -> Path:
    """Writes the figures as JSON, and the plot beside it; `name` is the setting's."""
    date, machine = datetime.now(timezone.utc), harness.describe_machine()
    path = harness.result_path(folder, date, machine, "conversion", name)
    document = {
        "bench": "conversion",
        "is_full": name == "full",
        "is_complete": True,
        "date": date.isoformat(timespec="seconds"),
        "commit": harness.commit(),
        "machine": machine,
        "setting": asdict(setting),
        "rows": rows,
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    plot(rows, path.with_suffix(".png"))
    return path


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(rows), 4, figsize=(20, 4.5 * len(rows)), layout="constrained", squeeze=False
    )
    for line, row in zip(axes, rows, strict=True):
        convert_report.draw(line, row["models"])
        line[0].set_ylabel(row["original"])
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def main() -> None:
    assert __doc__ is not None
    parser = harness.parser(__doc__, ("full", "smallest"))
    parser.add_argument(
        "--originals", nargs="+", metavar="NAME", help="only these, in the results too"
    )
    parser.add_argument("--runs", type=Path, default=OUTPUTS, help="folder of models and reports")
    flags = parser.parse_args()
    setting = SETTINGS[flags.setting]
    names = flags.originals or [*setting.originals]
    unknown = set(names) - set(setting.originals)
    if unknown:
        parser.error(f"--originals must be of {[*setting.originals]}, got {sorted(unknown)}")
    torch.set_num_threads(flags.threads)
    rows = [run(setting, name, flags.runs / flags.setting) for name in names]
    print(f"wrote {save(flags.results, flags.setting, setting, rows)} and .png")


if __name__ == "__main__":
    main()
