"""Plans that must not change: every policy on twenty inputs, kept by digest in `golden.json`.

    # Plan all of them again, which takes minutes, and print what differs.
    python -m tests.planner.golden check
    # After a change that is meant to change plans.
    python -m tests.planner.golden write

`test_golden.py` plans a few of them in every run of the tests.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from infinipipe.cli import run_command

GOLDEN = Path(__file__).with_name("golden.json")
QUANTILES = Path(__file__).parents[1] / "length_quantiles.json"
MEASURED = "measured"
"""Stands for the profile beside this file, measured on a CPU."""
MEASURED_PROFILE = Path(__file__).with_name("measured_profile.json")
POLICIES = ("epp", "paper", "gpipe", "1f1b", "terapipe", "seq1f1b", "chunkflow")


class Input(NamedTuple):
    """What a plan is made from."""

    model: str
    device: str
    lengths: str
    count: int
    longest: int
    batch_size: int
    stages: int
    memory: str
    more: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What it is called in `golden.json`."""
        more = "".join(self.more).replace("--", " ")
        lengths = f"{self.lengths} {self.count} to {self.longest}"
        return f"{self.model} {lengths}, {self.stages} stages of {self.memory}{more}"


INPUTS = (
    Input("tiny", MEASURED, "wikipedia", 24, 3072, 12, 2, "64MiB"),
    Input("tiny", "a800-80g", "mooncake", 8, 8192, 4, 3, "40MiB,48MiB,56MiB"),
    Input("tiny", "h100-80g", "wikipedia", 64, 4096, 32, 1, "96MiB"),
    Input("tiny", MEASURED, "mooncake", 10, 12000, 10, 3, "160MiB", ("--loss-norm", "sequence")),
    Input("llama-7b", "a800-80g", "wikipedia", 96, 49152, 48, 4, "80GiB"),
    Input("llama-7b", "a800-80g", "wikipedia", 96, 49152, 48, 8, "40GiB"),
    Input("llama-7b", "a800-80g", "wikipedia", 64, 98304, 64, 8, "24GiB"),
    Input("llama-7b", "a800-80g", "mooncake", 16, 98304, 16, 8, "80GiB"),
    Input("llama-7b", "a800-80g", "mooncake", 16, 98304, 8, 4, "80GiB"),
    Input("llama-7b", "a800-80g", "mooncake", 12, 49152, 12, 16, "40GiB"),
    Input("llama-7b", "h200-141g", "mooncake", 12, 131072, 12, 4, "139GiB"),
    Input("llama-13b", "a800-80g", "wikipedia", 64, 98304, 64, 8, "80GiB"),
    Input("llama-13b", "a800-80g", "mooncake", 12, 98304, 12, 8, "80GiB"),
    Input("llama3-8b", "h100-80g", "wikipedia", 64, 65536, 32, 8, "60GiB"),
    Input("qwen3-8b", "h100-80g", "mooncake", 12, 65536, 6, 4, "72GiB"),
    Input("llama-30b", "h200-141g", "wikipedia", 48, 65536, 48, 8, "120GiB"),
    Input("llama-7b", "a800-80g", "wikipedia", 64, 49152, 64, 4, "80GiB", ("--replicas", "2")),
    Input("tiny", "a800-80g", "mooncake", 12, 4096, 6, 2, "64MiB", ("--replicas", "3")),
    Input(
        "llama-7b",
        "a800-80g",
        "wikipedia",
        40,
        32768,
        20,
        8,
        "32GiB,32GiB,32GiB,32GiB,32GiB,32GiB,32GiB,40GiB",
    ),
    Input("llama-7b", "a800-80g", "wikipedia", 30, 16384, 10, 5, "48GiB", ("--seed", "7")),
)


def write_lengths(given: Input, path: Path) -> None:
    """Write a dataset of lengths drawn from the quantiles of real ones."""
    quantiles = json.loads(QUANTILES.read_text())[given.lengths]["quantiles"]
    drawn = np.random.default_rng(given.count).choice(np.array(quantiles), given.count)
    lengths = np.minimum(drawn, given.longest).tolist()
    path.write_text("".join(f'{{"length": {length}}}\n' for length in lengths))


def write_profile(given: Input, path: Path) -> None:
    """Write the analytic profile as it was before gradient synchronisation had a price.

    Plans hold their profile.
    """
    if given.device == MEASURED:
        path.write_bytes(MEASURED_PROFILE.read_bytes())
        return
    _command("profile", given.model, "--analytic", given.device, "-o", str(path))
    profile = json.loads(path.read_text())
    profile["times"].pop("all_reduce_s", None)
    path.write_text(json.dumps(profile))


class Digests(NamedTuple):
    """Of one plan, or of why there is none."""

    exact: str
    """Of every byte. With replicas, seconds of whole steps are left out: synchronising gradients is
    a part of them."""
    rounded: str
    """Of the plan as JSON with nine digits of each float: sums of floats differ in their last
    between processors."""


def plan_digests(given: Input, policy: str) -> Digests:
    """Plan an input in the current folder."""
    write_lengths(given, Path("lengths.jsonl"))
    write_profile(given, Path("profile.json"))
    options = (
        "--stages",
        str(given.stages),
        "--memory",
        given.memory,
        "--batch-size",
        str(given.batch_size),
    )
    try:
        _command(
            "compile", "lengths.jsonl", *options, "--policy", policy, "--workers", "1", *given.more
        )
    except RuntimeError as error:
        return Digests(_sha256(str(error)), _sha256(str(error)))
    lines = _command("inspect", "plan.msgpack", "--all").splitlines()
    documents = [json.loads(line) for line in lines]
    replicated = "--replicas" in given.more
    if replicated:
        documents = [_without_step_s(document) for document in documents]
    exact = json.dumps(documents).encode() if replicated else Path("plan.msgpack").read_bytes()
    return Digests(hashlib.sha256(exact).hexdigest(), _sha256(json.dumps(_rounded(documents))))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _without_step_s(document: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name != "step_s"}


def _rounded(value: Any) -> Any:
    match value:
        case float():
            return f"{value:.9g}"
        case list():
            return [_rounded(each) for each in value]
        case dict():
            # Digests of what holds unrounded floats.
            return {
                name: _rounded(each) for name, each in value.items() if name != "profile_sha256"
            }
    return value


def _command(*arguments: str) -> str:
    """Run a command in this process and return what it prints.

    Raises:
        RuntimeError: it failed; holds the error line.
    """
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run_command(list(arguments))
    if code:
        raise RuntimeError(err.getvalue())
    return out.getvalue()


def _digest_in_folder(task: tuple[Input, str]) -> tuple[str, Digests]:
    given, policy = task
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            return f"{given.name}: {policy}", plan_digests(given, policy)
        finally:
            os.chdir(before)


def all_digests() -> Iterator[tuple[str, Digests]]:
    """Plan everything, on all cores."""
    tasks = [(given, policy) for given in INPUTS for policy in POLICIES]
    with ProcessPoolExecutor() as pool:
        yield from pool.map(_digest_in_folder, tasks)


def main() -> int:
    """Check or write `golden.json`."""
    found = {name: digests._asdict() for name, digests in all_digests()}
    if sys.argv[1:] == ["write"]:
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    expected = json.loads(GOLDEN.read_text())
    differing = [name for name in expected if found.get(name) != expected[name]]
    print(f"{len(expected) - len(differing)} of {len(expected)} plans are as they were")
    for name in differing:
        same = found[name]["rounded"] == expected[name]["rounded"]
        print(f"differs{' beyond nine digits' if same else ''}: {name}")
    return bool(differing)


if __name__ == "__main__":
    sys.exit(main())
