# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What the benchmarks share: interleaved timing, peak memory, the machine's limits, results.

Contenders take turns: a round runs each once, so that whatever else the machine does meets all of
them alike. A figure is the median over the rounds, with the fastest and the slowest; a ratio is one
of medians in one run.
"""

import argparse
import contextlib
import ctypes
import gc
import json
import multiprocessing
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import transformers
from torch import Tensor

from hf_linear_attention.extras import speedup
from hf_linear_attention.ops.backends import backend_report

HERE = Path(__file__).parent
RESULTS = HERE / "results"
COPY_BYTES = 2**28  # far larger than any cache
KEPT_BYTES = 2**30
QUIET = 0.05  # share of the processors' time that other processes may take
SAMPLE_SECONDS = 0.02  # shorter runs are repeated until one sample takes this long
MIN_ROUNDS, MAX_ROUNDS = 3, 40


# ---- time and memory ----


def keep_freed_memory() -> None:
    """Has glibc keep what is freed for the next tensor.

    It would give tensors of many megabytes back to the system after every call, and every
    contender's time would be that of clearing new pages.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            mallopt(parameter, KEPT_BYTES)


class Timing(NamedTuple):
    """Seconds."""

    median: float
    low: float
    high: float
    rounds: int
    disturbance: float  # the largest share of the processors' time that others took in a round


def interleave(
    samples: Mapping[str, Callable[[], float]], budget: float, patience: float = 0
) -> dict[str, Timing]:
    """Lets each contender take one sample (a call that returns seconds) per round.

    There are as many rounds as fit into `budget` seconds, within MIN_ROUNDS and MAX_ROUNDS, after
    one that warms up; that one counts, too, where it took longer than the budget. `patience` is how
    many seconds may be spent beyond that on waiting for other processes to leave the machine alone,
    and on repeating rounds that they disturbed.
    """

    def a_round() -> tuple[dict[str, float], float]:
        others = OtherProcesses()
        seconds = {name: sample() for name, sample in samples.items()}
        return seconds, others.share()

    start = time.perf_counter()
    first = a_round()
    took = time.perf_counter() - start
    num_rounds = int(min(max(budget / took, MIN_ROUNDS), MAX_ROUNDS))
    out_of_patience = start + (1 + num_rounds) * took + patience
    gc.collect()
    rounds = [first] if took > budget else []
    while len(rounds) < num_rounds:
        wait_until_quiet(out_of_patience - time.perf_counter() if patience else 0)
        seconds, share = a_round()
        if share < QUIET or not patience or time.perf_counter() > out_of_patience:
            rounds.append((seconds, share))
    disturbance = max(share for _, share in rounds)
    result = {}
    for name in samples:
        times = [seconds[name] for seconds, _ in rounds]
        result[name] = Timing(
            statistics.median(times), min(times), max(times), num_rounds, disturbance
        )
    return result


class OtherProcesses:
    """How much of the machine's processor time others take from now on (0 without /proc): all but
    this process and those that it has started.
    """

    def __init__(self):
        self.start = self._times()

    def share(self) -> float:
        (busy, total, own), (busy_0, total_0, own_0) = self._times(), self.start
        return max(busy - busy_0 - (own - own_0), 0) / max(total - total_0, 1e-9)

    @staticmethod
    def _times() -> tuple[float, float, float]:
        """Seconds: of all processes, of all processors, of this process and its own."""
        stat = Path("/proc/stat")
        if not stat.exists():
            return 0, 0, 0
        ticks = [int(word) for word in stat.read_text().split("\n")[0].split()[1:9]]
        idle = ticks[3] + ticks[4]
        second = os.sysconf("SC_CLK_TCK")
        this = psutil.Process()
        own = 0.0
        for process in (this, *this.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                own += sum(process.cpu_times()[:4])  # the last two are of children that have ended
        return (sum(ticks) - idle) / second, sum(ticks) / second, own


def wait_until_quiet(patience: float) -> None:
    """Returns when other processes leave the machine alone, or after `patience` seconds."""
    end = time.perf_counter() + patience
    while time.perf_counter() < end:
        others = OtherProcesses()
        time.sleep(0.5)
        if others.share() < QUIET:
            return


def sample_of(run: Callable[[], object]) -> Callable[[], float]:
    """A sample of `run`, repeated as often as the first call has found to be needed."""
    repeats = 0

    def sample() -> float:
        nonlocal repeats
        if repeats == 0:
            repeats = 1 + int(SAMPLE_SECONDS / _seconds(run, 1))
        return _seconds(run, repeats)

    return sample


def within(
    context: Callable[[], contextlib.AbstractContextManager], sample: Callable[[], float]
) -> Callable[[], float]:
    """A sample that is taken within a context."""

    def sample_within() -> float:
        with context():
            return sample()

    return sample_within


def _seconds(run: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - start) / repeats


def peak_memory(
    prepare: Callable[..., Callable[[], object]], *args: Any, here: bool = False
) -> float | None:
    """MiB that `prepare(*args)()` needs beyond what `prepare` itself left in memory.

    In a process of its own, so that nothing is left over from others; `prepare` is a function of
    some module. Or `here`, which is less exact and saves the seconds in which a process starts.
    None where Linux's /proc is missing.
    """
    if not Path("/proc/self/clear_refs").exists():
        return None
    if here:
        return _peak_memory_here(torch.get_num_threads(), prepare, args)
    speedup.give_memory_back()  # the other process may need all of it
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak_memory_here, (torch.get_num_threads(), prepare, args))


def _peak_memory_here(threads: int, prepare: Callable, args: tuple) -> float | None:
    torch.set_num_threads(threads)
    run = prepare(*args)
    return speedup.peak_mib(run)


# ---- numerics ----


def check_close(name: str, actual: Tensor, expected: Tensor, tolerance: float) -> float:
    """The relative error, in the Euclidean norm. Ends the program where it is too large."""
    actual, expected = actual.double(), expected.double()
    error = ((actual - expected).norm() / expected.norm()).item()
    if not error <= tolerance:  # NaN, too
        sys.exit(f"{name} is wrong: relative error {error:.1e}, allowed {tolerance:.0e}")
    return error


# ---- the machine ----


@dataclass
class Limits:
    """What this machine reaches at best, measured here and now, with torch's number of threads."""

    flops: float | None  # float32 multiply-adds in registers, each counted as two, per second
    copy: float  # bytes per second, each counted where it is read and where it is written
    read: float  # bytes per second


def measure_limits(num_bytes: int = COPY_BYTES) -> Limits:
    """`num_bytes` are copied and read."""
    source, copy = torch.zeros(num_bytes // 4), torch.ones(num_bytes // 4)
    best = {
        "copy": min(_seconds(lambda: copy.copy_(source), 1) for _ in range(9)),
        "read": min(_seconds(source.sum, 1) for _ in range(9)),
    }
    flops, read = _measure_peak(num_bytes)
    return Limits(flops, 2 * num_bytes / best["copy"], max(read, num_bytes / best["read"]))


def _measure_peak(num_bytes: int) -> tuple[float | None, float]:
    """What peak.cpp says of multiply-adds and of reading; None and 0 where it could not run."""
    with tempfile.TemporaryDirectory() as directory:
        program = f"{directory}/peak"
        flags = ["-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-pthread"]
        arguments = [str(torch.get_num_threads()), str(num_bytes >> 20)]
        try:
            compiler = os.environ.get("CXX", "c++")
            subprocess.run([compiler, *flags, HERE / "peak.cpp", "-o", program], check=True)
            output = subprocess.check_output([program, *arguments])
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"No share of the peak is given, because peak.cpp could not run: {error}")
            return None, 0
    flops, read = output.split()
    return float(flops) * 1e9, float(read) * 1e9


def describe_machine() -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", cpuinfo.read_text() if cpuinfo.exists() else "")
    return {
        "cpu": model[1] if model else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "kernels": backend_report()["cpu"] or _instruction_set(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _instruction_set() -> str:
    from hf_linear_attention.ops.compiled import library

    return library.cpu_instruction_set()


def commit() -> str | None:
    try:
        command = ["git", "-C", HERE, "describe", "--always", "--dirty", "--exclude", "*"]
        return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return None


# ---- results ----


def result_path(
    folder: Path, date: datetime, machine: dict[str, Any], bench: str, setting: str
) -> Path:
    """<folder>/<date>-<machine>-<bench>.json, <bench>-<setting> where that is not the full one."""
    folder.mkdir(exist_ok=True)
    cpu = re.sub(r"[^a-z0-9]+", "-", machine["cpu"].lower()).strip("-")
    name = bench if setting == "full" else f"{bench}-{setting}"
    return folder / f"{date:%Y-%m-%d}-{cpu}-{machine['threads']}-threads-{name}.json"


def write_result(
    folder: Path, bench: str, setting: str, commits: Iterable[str], figures: dict[str, Any]
) -> Path:
    """The JSON of figures that no `Report` made, with what every result says of itself."""
    date, machine = datetime.now(timezone.utc), describe_machine()
    path = result_path(folder, date, machine, bench, setting)
    document = {
        "bench": bench,
        "is_full": setting == "full",
        "date": date.isoformat(timespec="seconds"),
        "commits": sorted(commits),
        "machine": machine,
        **figures,
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def plotter() -> Any:
    """matplotlib.pyplot, which draws without a display. It takes a second to load."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


class Work(NamedTuple):
    """The least that a computation must do: flops, and bytes read or written once."""

    flops: float | None
    bytes: float | None
    bandwidth: str = "copy"  # which of the machine's, "copy" or "read"


@dataclass
class Row:
    panel: str  # of the plot: rows with different x, such as all forward passes in float32
    case: str
    x: int
    contender: str
    milliseconds: float
    low: float
    high: float
    rounds: int
    ratio: float  # to the report's baseline in the same case
    disturbance: float
    share_of_peak: float | None = None
    share_of_bandwidth: float | None = None
    peak_mib: float | None = None


@dataclass
class Report:
    """Collects rows, prints each case as it comes, and writes the JSON and the plot."""

    bench: str
    x_label: str
    baseline: str  # contender that ratios refer to
    flags: argparse.Namespace  # of `parser`
    is_resumed: bool = False  # goes on with a run of today that was interrupted
    notes: list[str] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)  # relative, before timing
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self):
        self.is_smallest = self.flags.setting == "smallest"
        torch.set_num_threads(self.flags.threads)
        wait_until_quiet(self.flags.patience)
        self.date = datetime.now(timezone.utc)
        self.commit = commit()
        self.machine = describe_machine()
        self.result_path = result_path(
            self.flags.results, self.date, self.machine, self.bench, self.flags.setting
        )
        if self.is_resumed:
            self._take_interrupted()
        self.limits = measure_limits(COPY_BYTES >> 4 if self.is_smallest else COPY_BYTES)
        print(", ".join(f"{name} {value}" for name, value in self.machine.items()))
        print(
            f"peak {_scaled(self.limits.flops)} GFLOP/s, copy {_scaled(self.limits.copy)} GB/s, "
            f"read {_scaled(self.limits.read)} GB/s"
        )

    def _take_interrupted(self) -> None:
        """Takes what a run of today has saved that was interrupted on this machine."""
        path = self.result_path
        saved = json.loads(path.read_text()) if path.exists() else {"is_complete": True}
        if saved["is_complete"] or saved["machine"] != self.machine:
            raise SystemExit(f"{path} is not of a run that was interrupted on this machine")
        self.rows = [Row(**row) for row in saved["rows"]]
        self.notes, self.errors = saved["notes"], saved["relative_errors"]
        if saved["commit"] != self.commit:
            self.commit = f"{saved['commit']}, {self.commit}"

    def has(self, panel: str, case: str) -> bool:
        """Whether an interrupted run has measured this."""
        return any((row.panel, row.case) == (panel, case) for row in self.rows)

    def time(self, samples: Mapping[str, Callable[[], float]], budget: float) -> dict[str, Timing]:
        """`interleave`, by the flags. In the smallest setting, of as few rounds as can be."""
        if self.is_smallest:
            budget = 0
        return interleave(samples, self.flags.budget or budget, self.flags.patience)

    def peak_memory(
        self, prepare: Callable[..., Callable[[], object]], names: Sequence[str], *args: Any
    ) -> dict[str, float | None]:
        """`peak_memory` of prepare(name, *args), by name."""
        return {name: peak_memory(prepare, name, *args, here=self.is_smallest) for name in names}

    def add(
        self,
        panel: str,
        case: str,
        x: int,
        timings: Mapping[str, Timing],
        work: Mapping[str, Work],
        peak_mib: Mapping[str, float | None] | None = None,
        reference: Timing | None = None,
    ) -> None:
        """One case: every contender's time, `work` by contender, and memory where it was asked for.
        Ratios refer to the baseline, or to another timing from the same rounds.
        """
        reference = reference or timings[self.baseline]
        rows = []
        for name, timing in timings.items():
            row = Row(
                panel,
                case,
                x,
                name,
                timing.median * 1e3,
                timing.low * 1e3,
                timing.high * 1e3,
                timing.rounds,
                timing.median / reference.median,
                timing.disturbance,
                peak_mib=(peak_mib or {}).get(name),
            )
            least = work.get(name, Work(None, None))
            if least.flops and self.limits.flops:
                row.share_of_peak = least.flops / timing.median / self.limits.flops
            if least.bytes:
                bandwidth = getattr(self.limits, least.bandwidth)
                row.share_of_bandwidth = least.bytes / timing.median / bandwidth
            rows.append(row)
        self.rows += rows
        _print_table(rows)
        self.save(is_complete=False)  # so that an interruption does not lose it

    def save(self, is_complete: bool = True) -> None:
        """Writes the JSON of `result_path`, and the plot beside it."""
        path = self.result_path
        document = {
            "bench": self.bench,
            "is_full": self.flags.setting == "full",
            "is_complete": is_complete,
            "date": self.date.isoformat(timespec="seconds"),
            "commit": self.commit,
            "machine": self.machine,
            "limits": asdict(self.limits),
            "baseline": self.baseline,
            "notes": self.notes,
            "relative_errors": self.errors,
            "rows": [asdict(row) for row in self.rows],
        }
        path.write_text(json.dumps(document, indent=1) + "\n")
        if not is_complete:
            return
        self._plot(path.with_suffix(".png"))
        for note in self.notes:
            print(f"- {note}")
        print(f"wrote {path} and .png")

    def _plot(self, path: Path) -> None:
        """Time against x, a panel for each group of cases, on logarithmic axes."""
        pyplot = plotter()
        panels = list(dict.fromkeys(row.panel for row in self.rows))
        curves = [p for p in panels if len({row.x for row in self.rows if row.panel == p}) > 1]
        panels = curves or panels  # one point is worth a line of the table only
        if self.is_smallest:
            panels = panels[:1]  # each takes a second to draw
        contenders = list(dict.fromkeys(row.contender for row in self.rows))
        columns = min(len(panels), 3)
        lines = -(-len(panels) // columns)
        figure, axes = pyplot.subplots(
            lines,
            columns,
            figsize=(4.5 * columns, 3.6 * lines),
            squeeze=False,
            layout="constrained",
        )
        for axis, panel in zip(axes.flat, panels, strict=False):
            for index, contender in enumerate(contenders):
                points = [
                    (row.x, row.milliseconds)
                    for row in self.rows
                    if (row.panel, row.contender) == (panel, contender)
                ]
                if points:
                    is_ours = contender == self.baseline
                    axis.plot(
                        *zip(*sorted(points), strict=True),
                        marker="o",
                        markersize=4,
                        linewidth=2.5 if is_ours else 1.2,
                        color="black" if is_ours else f"C{index % 10}",
                        label=contender,
                    )
            axis.set(xscale="log", yscale="log", title=panel, xlabel=self.x_label, ylabel="ms")
            axis.set_xscale("log", base=2)
            low, high = axis.get_ylim()
            if high < 3 * low:  # noise must not look like a trend
                axis.set_ylim(low / 3, high * 3)
            axis.grid(True, which="major", alpha=0.3)
        for axis in axes.flat[len(panels) :]:
            axis.remove()
        handles = {}
        for axis in axes.flat[: len(panels)]:
            handles |= {
                label: h for h, label in zip(*axis.get_legend_handles_labels(), strict=True)
            }
        figure.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=columns + 1
        )
        figure.savefig(path, dpi=110)
        pyplot.close(figure)


def _scaled(rate: float | None) -> str:
    return "unknown" if rate is None else f"{rate / 1e9:.1f}"


def _print_table(rows: list[Row]) -> None:
    print(f"\n{rows[0].panel}: {rows[0].case}")
    if rows[0].disturbance > QUIET:
        print(f"(disturbed: other processes took {rows[0].disturbance:.0%} of the machine)")
    print(f"{'':34} {'ms':>9} {'min - max':>19} {'ratio':>7} {'peak':>5} {'band':>5} {'MiB':>7}")
    for row in rows:
        print(
            f"{row.contender:34} {row.milliseconds:9.2f} {row.low:8.2f} - {row.high:8.2f} "
            f"{row.ratio:6.2f}x {_percent(row.share_of_peak)} {_percent(row.share_of_bandwidth)} "
            f"{'' if row.peak_mib is None else f'{row.peak_mib:.0f}':>7}",
            flush=True,
        )


def _percent(share: float | None) -> str:
    return f"{'' if share is None else f'{share:.0%}':>5}"


SETTINGS = {
    "short": "the short set, as without this flag",
    "full": "everything, not only the short set",
    "smallest": "one tiny case of everything, to see that the script runs",
    "gpu": "the settings for a GPU",
    "medium": "at a size that counts, in hours",
    "large": "the same, in days",
}


def parser(
    description: str, settings: Sequence[str] = ("short", "full", "smallest")
) -> argparse.ArgumentParser:
    """The flags that all benchmarks have; `flags.setting` is one of the settings."""
    flags = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    choice = flags.add_mutually_exclusive_group()
    for name in settings:
        choice.add_argument(
            f"--{name}", action="store_const", dest="setting", const=name, help=SETTINGS[name]
        )
    flags.set_defaults(setting=settings[0])
    flags.add_argument("--results", type=Path, default=RESULTS, help="folder to write them to")
    flags.add_argument("--threads", type=int, default=torch.get_num_threads())
    flags.add_argument("--budget", type=float, help="seconds for the rounds of one case")
    flags.add_argument(
        "--patience",
        type=float,
        default=0,
        help="seconds to wait, for each case, for other processes to leave the machine alone",
    )
    return flags
