"""Show how far predictions are from what is measured.

That is a layer's time, a stage's peak bytes, and a step's seconds.

    python benchmarks/accuracy.py -o benchmarks/accuracy-results.md

Needs two cores with nothing else on them, and less than ten minutes. Everything goes through the
command line: for 2 and for 3 stages a profile and six plans, each with every stage's limit at its
predicted peak plus 2 %, and a run of each with one process a stage.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

# Run as a script, only its own folder is on the path.
sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.tables import table
from infinipipe.costs.predict import plan_costs
from infinipipe.ir import open_plan
from infinipipe.profiles import Profile, read_profile
from infinipipe.run_record import Run, read_run

MODEL = "tiny"
STEPS, BATCH, LONGEST = 4, 12, 3072
STAGES = (2, 3)
SLACK = 1.02
PLANS = (("epp", 1.0), ("epp", 0.7), ("epp", 0.5), ("paper", 0.6), ("seq1f1b", 0.7), ("1f1b", 1.0))
"""Policy, and how much of what it takes above the static bytes it is given.

A share that is too little is raised.
"""


@dataclass(frozen=True)
class Case:
    """One plan and its run."""

    name: str
    stages: int
    recomputed: float
    """Share of the layers' activations."""
    predicted: tuple[int, ...]
    limits: tuple[int, ...]
    run: Run

    @property
    def peaks(self) -> list[int]:
        """Measured bytes per stage, the most of all steps."""
        return [
            max(step.peak_bytes[stage] for step in self.run.steps) for stage in range(self.stages)
        ]

    @property
    def peak_errors(self) -> list[float]:
        """Predicted over measured less 1: of every stage and step."""
        return [
            predicted / measured - 1
            for step in self.run.steps
            for predicted, measured in zip(step.predicted_peak_bytes, step.peak_bytes, strict=True)
        ]

    @property
    def time_error(self) -> float:
        """Predicted over measured less 1, by the median step."""
        return 1 / self.run.time_ratio - 1


def main() -> None:
    """Run everything and print a page of results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, help="Markdown to write besides.")
    output: Path | None = parser.parse_args().output
    load, started = os.getloadavg()[0], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="infinipipe-") as scratch:
        folder = Path(scratch)
        write_dataset(folder / "dataset.jsonl")
        cases, profiles = [], []
        for stages in STAGES:
            infinipipe(folder, "profile", MODEL, "--device", "cpu")
            profiles.append(read_profile(folder / "profile.json"))
            cases += [run_case(folder, stages, *plan) for plan in PLANS]
    page = "\n".join(report(profiles, cases, load, time.monotonic() - started))
    print(page)
    if output is not None:
        output.write_text(page + "\n")


def write_dataset(path: Path) -> None:
    """Write sequences whose lengths have a heavy tail."""
    draw = random.Random(1)
    with path.open("w") as file:
        for _ in range(STEPS * BATCH):
            length = min(LONGEST, round(math.exp(draw.gauss(5.6, 1.2))) + 2)
            file.write(
                json.dumps({"input_ids": [draw.randrange(256) for _ in range(length)]}) + "\n"
            )


def infinipipe(folder: Path, *arguments: object) -> int:
    """Run a command; return its exit code if it says that no plan fits."""
    print("infinipipe", *arguments, file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "infinipipe", *map(str, arguments)]
    # The command prints its own errors; one thread a process, as the profile assumes.
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode and "does not fit" not in done.stderr:
        raise SystemExit(done.stderr)
    return done.returncode


def run_case(folder: Path, stages: int, policy: str, share: float) -> Case:
    """Compile within a share of the memory, again within what that plan needs, and run it.

    The second time every stage has 2 % more.
    """
    roomy, static = roomy_plan(folder, stages, policy)
    name = f"{policy}-{stages}-{share}"
    plan = None
    while plan is None:
        assert share <= 1.0, f"{policy} does not fit into the memory it takes"
        limits = [round(s + share * (peak - s)) for s, peak in zip(static, roomy, strict=True)]
        plan = compile_plan(folder, stages, policy, limits)
        share = round(share + 0.1, 1)
    limits = [math.floor(peak * SLACK) for peak in plan]
    predicted = compile_plan(folder, stages, policy, limits)
    assert predicted is not None, "a plan of the same limits existed"
    infinipipe(folder, "run", "plan.msgpack", "--device", "cpu", "--output", name)
    label = f"{policy}, {share - 0.1:.0%}"
    return Case(
        label, stages, recomputed(folder), tuple(predicted), tuple(limits), read_run(folder / name)
    )


@cache
def roomy_plan(folder: Path, stages: int, policy: str) -> tuple[list[int], list[int]]:
    """Return every stage's predicted peak without a limit, and its static bytes."""
    roomy = compile_plan(folder, stages, policy, None)
    assert roomy is not None, f"{policy} finds no plan although there is no limit"
    with open_plan(folder / "plan.msgpack") as plan:
        costs = plan_costs(plan.header)
    return roomy, [costs.static_bytes(stage) for stage in range(stages)]


def compile_plan(
    folder: Path, stages: int, policy: str, limits: list[int] | None
) -> list[int] | None:
    """Return every stage's predicted peak, None if nothing fits."""
    memory = ["--memory", ",".join(map(str, limits))] if limits else []
    options = [
        "--stages",
        stages,
        "--batch-size",
        BATCH,
        "--steps",
        STEPS,
        "--policy",
        policy,
        *memory,
    ]
    if infinipipe(folder, "compile", "dataset.jsonl", *options):
        return None
    with open_plan(folder / "plan.msgpack") as plan:
        replicas = [replica for step in plan for replica in step.replicas]
    return [
        max(replica.predicted[stage].peak_bytes for replica in replicas) for stage in range(stages)
    ]


def recomputed(folder: Path) -> float:
    """Return the share of activations that the last plan recomputes."""
    dropped = total = 0
    with open_plan(folder / "plan.msgpack") as plan:
        layers = [stage.num_layers for stage in plan.header.stages]
        for step in plan:
            for replica in step.replicas:
                for row, count in zip(replica.recompute, layers, strict=True):
                    for layers_dropped, chunk in zip(row, replica.chunks, strict=True):
                        dropped += layers_dropped * chunk.num_tokens
                        total += count * chunk.num_tokens
    return dropped / total


def report(
    profiles: list[Profile], cases: list[Case], load: float, seconds: float
) -> Iterator[str]:
    """Yield the lines of the page."""
    yield "# Accuracy of the predictions\n"
    yield "`python benchmarks/accuracy.py -o benchmarks/accuracy-results.md`\n"
    device, software = profiles[0].device, profiles[0].software
    yield (
        f"{device.num_devices} cores of {device.name}, torch {software['torch']}, "
        f"{profiles[0].created}; load average {load:.2f} before, {seconds:.0f} s in all. "
        f"Model `{MODEL}`, {STEPS} steps of {BATCH} sequences of up to {LONGEST:,} tokens.\n"
    )
    yield "## One layer, on chunks held out of the fit\n"
    yield "One profile for the runs on 2 stages and one for those on 3, taken right before them.\n"
    yield from table(
        ("stages", "op", "chunks", "median error", "90th percentile", "worst"),
        (
            (
                str(p),
                a.op,
                str(a.num_samples),
                *(f"{e:.1%}" for e in (a.median_error, a.p90_error, a.worst_error)),
            )
            for p, profile in zip(STAGES, profiles, strict=True)
            for a in profile.accuracy
            if a.held_out
        ),
    )
    yield "\n## Runs\n"
    yield "Predicted over measured, less 1. Every stage's limit is its predicted peak plus 2 %.\n"
    yield from table(
        (
            "policy, memory",
            "stages",
            "recomputed",
            "peak MiB a stage",
            "peak error",
            "below limit",
            "s a step",
            "error",
        ),
        map(row, cases),
    )
    yield "\n## Against the targets\n"
    yield from table(("", "target", "found", ""), targets(profiles, cases))


def row(case: Case) -> tuple[str, ...]:
    """Return the cells of a run."""
    seconds = float(np.median([step.seconds for step in case.run.settled]))
    below = all(peak <= limit for peak, limit in zip(case.peaks, case.limits, strict=True))
    return (
        case.name,
        str(case.stages),
        f"{case.recomputed:.0%}",
        ", ".join(f"{peak / 2**20:.1f}" for peak in case.peaks),
        f"{min(case.peak_errors):+.1%} to {max(case.peak_errors):+.1%}",
        "yes" if below else "NO",
        f"{seconds:.3f}",
        f"{case.time_error:+.1%}",
    )


def targets(profiles: list[Profile], cases: list[Case]) -> Iterator[tuple[str, ...]]:
    """Yield what was wanted and what was found."""
    samples = [s for profile in profiles for s in profile.samples if s.held_out]
    layer = [abs(s.fitted_s / s.seconds - 1) for s in samples]
    peaks = [error for case in cases for error in case.peak_errors]
    times = [abs(case.time_error) for case in cases if case.stages == 2]
    over = [max(peak / limit for peak, limit in zip(c.peaks, c.limits, strict=True)) for c in cases]
    found = (
        ("layer time held out, median", 0.05, float(np.median(layer))),
        ("layer time held out, 90th percentile", 0.12, float(np.quantile(layer, 0.9))),
        ("peak predicted too high, worst", 0.05, max(0.0, *peaks)),
        ("peak predicted too low, worst", 0.02, max(0.0, *(-error for error in peaks))),
        ("peak over the limit, worst", 0.0, max(0.0, max(over) - 1)),
        ("step time on 2 stages, median", 0.10, float(np.median(times))),
    )
    for name, target, value in found:
        yield name, f"{target:.0%}", f"{value:.1%}", "ok" if value <= target else "MISSED"


if __name__ == "__main__":
    main()
