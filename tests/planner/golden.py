"""Plans that must not change: every policy on twenty inputs, kept by digest in `golden.json`.

    python -m tests.planner.golden check    # plan all again, some minutes; prints what differs
    python -m tests.planner.golden write    # after a change that is meant to change plans

`test_golden.py` plans a few of them in every run of the tests.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from infinipipe.cli import run_command

GOLDEN = Path(__file__).with_name("golden.json")
QUANTILES = Path(__file__).parents[1] / "length_quantiles.json"
MEASURED_PROFILE = Path(__file__).with_name("measured_profile.json")
MEASURED = "measured"
"""The device whose profile is `MEASURED_PROFILE`, measured on a CPU; others have analytic ones."""
POLICIES = ("epp", "paper", "gpipe", "1f1b", "terapipe", "seq1f1b", "chunkflow")


class Input(NamedTuple):
    """What a plan is made from."""

    model: str
    device: str
    lengths: str
    """Which of the data sets in `length_quantiles.json`."""
    num_sequences: int
    longest: int
    """Tokens to which longer sequences are cut."""
    batch_size: int
    stages: int
    memory: str
    more: tuple[str, ...] = ()
    """Further options of `infinipipe compile`."""

    @property
    def name(self) -> str:
        """What it is called in `golden.json`."""
        data = f"{self.lengths} {self.num_sequences} to {self.longest}"
        more = "".join(self.more).replace("--", " ")
        return f"{self.model} {data}, {self.stages} stages of {self.memory}{more}"

    @property
    def num_devices(self) -> int:
        """One for each stage of each replica."""
        options = dict(zip(self.more[::2], self.more[1::2], strict=True))
        return self.stages * int(options.get("--replicas", "1"))


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
    draw = np.random.default_rng(seed=given.num_sequences)
    drawn = draw.choice(np.array(quantiles), given.num_sequences)
    lengths = np.minimum(drawn, given.longest).tolist()
    path.write_text("".join(f'{{"length": {length}}}\n' for length in lengths))


def write_profile(given: Input, path: Path) -> None:
    """Write the profile to plan with."""
    if given.device == MEASURED:
        path.write_bytes(MEASURED_PROFILE.read_bytes())
        return
    _command("profile", given.model, "--analytic", given.device, "-o", str(path))


class Digests(NamedTuple):
    """SHA-256 of one plan, or of the error line that says why there is none."""

    exact: str
    """Of the file."""
    rounded: str
    """Of the JSON, each float with nine digits: processors differ in the last digits of a sum."""


def plan_digests(given: Input, policy: str) -> Digests:
    """Plan an input in the current folder."""
    write_lengths(given, Path("lengths.jsonl"))
    write_profile(given, Path("profile.json"))
    try:
        _compile(given, policy)
    except CommandError as error:
        digest = _sha256(str(error).encode())
        return Digests(exact=digest, rounded=digest)
    lines = _command("inspect", "plan.msgpack", "--all").splitlines()
    documents = [json.loads(line) for line in lines]
    exact = Path("plan.msgpack").read_bytes()
    rounded = json.dumps(_rounded(documents)).encode()
    return Digests(exact=_sha256(exact), rounded=_sha256(rounded))


def _compile(given: Input, policy: str) -> None:
    stages = ("--stages", str(given.stages), "--memory", given.memory)
    layout = ("--devices", str(given.num_devices), "--sequence-parallel", "1")
    batches = ("--batch-size", str(given.batch_size))
    # One worker: the tests, and `all_digests`, keep the cores busy with other plans.
    how = ("--policy", policy, "--workers", "1")
    _command("compile", "lengths.jsonl", *stages, *layout, *batches, *how, *given.more)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.9g}"
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    if isinstance(value, dict):
        # A digest of floats that are not rounded.
        rest = _without(value, "profile_sha256")
        return {name: _rounded(each) for name, each in rest.items()}
    return value


def _without(document: dict[str, Any], left_out: str) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name != left_out}


class CommandError(Exception):
    """A command failed; the message is what it wrote to stderr."""


def _command(*arguments: str) -> str:
    """Run a command in this process and return what it prints.

    Raises:
        CommandError: it failed.
    """
    out = io.StringIO()
    err = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run_command(list(arguments))
    if code:
        raise CommandError(err.getvalue())
    return out.getvalue()


def plan_name(given: Input, policy: str) -> str:
    """Return what a plan is called in `golden.json`."""
    return f"{given.name}: {policy}"


def read_golden() -> dict[str, Digests]:
    """Return the digests that plans must have, by their names."""
    golden = json.loads(GOLDEN.read_text())
    return {name: Digests(**digests) for name, digests in golden.items()}


def all_digests() -> dict[str, Digests]:
    """Plan everything, on all cores, and return the digests by the plans' names."""
    tasks = [(given, policy) for given in INPUTS for policy in POLICIES]
    with ProcessPoolExecutor() as pool:
        return dict(pool.map(_digests_in_scratch, tasks))


def _digests_in_scratch(task: tuple[Input, str]) -> tuple[str, Digests]:
    given, policy = task
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        return plan_name(given, policy), plan_digests(given, policy)


def write() -> None:
    """Write `golden.json`."""
    golden = {name: digests._asdict() for name, digests in all_digests().items()}
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")


def check() -> bool:
    """Print which plans differ from the golden ones; return whether none does."""
    expected = read_golden()
    actual = all_digests()
    differing = [name for name in expected if actual.get(name) != expected[name]]
    print(f"{len(expected) - len(differing)} of {len(expected)} plans are as they were")
    for name in differing:
        if name not in actual:
            print(f"no longer planned: {name}")
        elif actual[name].rounded == expected[name].rounded:
            print(f"differs only beyond nine digits: {name}")
        else:
            print(f"differs: {name}")
    return not differing


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["check"]:
            sys.exit(0 if check() else 1)
        case ["write"]:
            write()
        case _:
            sys.exit(__doc__)
