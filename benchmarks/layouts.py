"""Compare layouts on real length distributions: what the choice of a layout is worth.

    # Every case; goes on where it stopped.
    python benchmarks/layouts.py measure --jobs 2 -o layouts.jsonl
    # Tables in Markdown.
    python benchmarks/layouts.py report layouts.jsonl

Shapes and costs are analytic, on servers of eight devices; lengths are drawn from quantiles of real
data sets (tests/length_quantiles.json). What is compared is the makespan, with the gradients'
synchronisation, over pure work: seconds of F and B, unchunked and without recompute, over all
devices. Three families of layouts compete: all; those without sequence parallelism ("pipeline
only": stages and replicas, ZeRO-1 too); one pipeline through all devices.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

# Run as a script, only its own folder is on the path.
sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.planner import BATCHES, QUANTILES
from benchmarks.tables import table
from infinipipe.dataset import Dataset, open_dataset
from infinipipe.ir import Layout
from infinipipe.planner import CompileOptions
from infinipipe.planner.layouts import LayoutSearch, Trial, search_layouts
from infinipipe.planner.systems import SYSTEMS, compare_systems
from infinipipe.planner.workers import ordered_map
from infinipipe.profiles import Profile, read_model
from infinipipe.profiles.analytic import analytic_profile

DEVICE = "a800-80g"
CLIP = 96 * 1024
"""As in LAYOUTS' first measurements and in the middle of the paper's contexts."""
SAMPLES = 4
"""Steps that a layout is chosen by, half of those that it is judged by."""

Case = dict[str, Any]
Row = dict[str, Any]
Family = Callable[[Layout], bool]

FAMILIES: dict[str, Family] = {
    "best": lambda layout: True,
    "pipeline only": lambda layout: layout.sequence_parallel == 1,
    "one pipeline": lambda layout: layout.sequence_parallel == layout.num_replicas == 1,
}


def cases() -> Iterator[Case]:
    """Yield what is measured, each with its kind."""
    shapes = (("llama-7b", 80), ("llama-13b", 80), ("llama-7b", 40))
    for devices, (model, gib), data in product((16, 32, 8, 64), shapes, BATCHES):
        for family in FAMILIES:
            yield _case("family", model, gib, data, devices, CLIP, family)
    for model, data in product(("llama-7b", "llama-13b"), BATCHES):
        for name in ("search", "chosen", "all steps"):
            yield _case("sample", model, 80, data, 16, CLIP, name)
    clips = (48 * 1024, 96 * 1024, 192 * 1024)
    for model, data, clip, devices in product(("llama-7b", "llama-13b"), BATCHES, clips, (8, 32)):
        for system in SYSTEMS:
            yield _case("system", model, 80, data, devices, clip, system)


def _case(kind: str, model: str, gib: int, data: str, devices: int, clip: int, name: str) -> Case:
    return {
        "kind": kind,
        "model": model,
        "memory_gib": gib,
        "data": data,
        "devices": devices,
        "clip": clip,
        "name": name,
    }


def run(case: Case) -> Row:
    """Search the layouts of one case."""
    profile = analytic_profile(read_model(case["model"]), DEVICE)
    num_steps = 2 * SAMPLES if case["kind"] == "sample" else 1
    batch_size = BATCHES[case["data"]]
    options = CompileOptions(
        num_devices=case["devices"],
        memory_limit_bytes=(case["memory_gib"] * 2**30,),
        batch_size=batch_size,
        num_steps=num_steps,
    )
    began_s = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        dataset = make_dataset(Path(folder), profile, case, num_steps * batch_size)
        search = SEARCHES[case["kind"]](dataset, profile, options, case["name"])
    cpu_s = time.process_time() - began_s
    trials = [_trial(trial) for trial in search.trials]
    return {"case": case, "pure_s": search.pure_work_s, "trials": trials, "cpu_s": cpu_s}


def make_dataset(folder: Path, profile: Profile, case: Case, num_rows: int) -> Dataset:
    """Draw lengths and write them as a dataset."""
    quantiles = json.loads(QUANTILES.read_text())[case["data"]]["quantiles"]
    drawn = np.random.default_rng(0).choice(np.array(quantiles), num_rows)
    path = folder / "lengths.jsonl"
    lines = [json.dumps({"length": length}) for length in drawn.tolist()]
    path.write_text("\n".join(lines) + "\n")
    model = profile.model
    return open_dataset(path, model.tokenizer, model.vocabulary_size, case["clip"])


def search_family(
    dataset: Dataset, profile: Profile, options: CompileOptions, name: str
) -> LayoutSearch:
    """Search among the layouts of a family."""
    layouts = [layout for layout in options.layouts(profile) if FAMILIES[name](layout)]
    if not layouts:
        # One pipeline through more devices than there are layers.
        nothing = Trial(name="none", layout=None, reason="no such layout")
        return LayoutSearch(options.num_devices or 0, (nothing,), 0, 0.0)
    return search_layouts(dataset, profile, options, layouts)


def search_sample(
    dataset: Dataset, profile: Profile, options: CompileOptions, name: str
) -> LayoutSearch:
    """Search by a sample of the steps ("search"), plan what that chooses on all steps ("chosen"),
    or search by all of them."""
    layouts = options.layouts(profile)
    assert options.num_steps is not None
    if name == "all steps":
        return search_layouts(dataset, profile, options, layouts, num_steps=options.num_steps)
    found = search_layouts(dataset, profile, options, layouts, num_steps=SAMPLES)
    if name == "search":
        return found
    assert found.best is not None, "these cases fit"
    assert found.best.layout is not None, "what is searched are layouts"
    chosen = [found.best.layout]
    return search_layouts(dataset, profile, options, chosen, num_steps=options.num_steps)


def search_system(
    dataset: Dataset, profile: Profile, options: CompileOptions, name: str
) -> LayoutSearch:
    """Search the layouts of one system."""
    assert options.num_devices is not None
    (contest,) = compare_systems(dataset, profile, options, (options.num_devices,), systems=(name,))
    return contest.searches[name]


SEARCHES = {"family": search_family, "sample": search_sample, "system": search_system}


def _trial(trial: Trial) -> Row:
    return {
        "name": trial.name,
        "step_s": trial.step_s,
        "at_least_s": trial.at_least_s,
        "bound_s": trial.bound_s,
        "reason": trial.reason,
    }


def measure(output: Path, jobs: int) -> None:
    """Append the rows that the output does not have yet."""
    done = {json.dumps(row["case"]) for row in read(output)}
    left = [case for case in cases() if json.dumps(case) not in done]
    with output.open("a") as file:
        for row in ordered_map(run, left, jobs):
            print(json.dumps(row), file=file, flush=True)


def read(path: Path) -> list[Row]:
    """Return the rows of an output, none if there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def report(rows: list[Row]) -> Iterator[str]:
    """Yield the lines of the tables."""
    yield "## What a layout is worth\n"
    yield "Step over pure work, and the layout: stages x sequence parallelism x replicas.\n"
    families = _by_name(rows, "family")
    yield from table(("case", "devices", *FAMILIES, "pipeline only / best"), _family_rows(families))
    yield "\n## Against the targets\n"
    yield from table(("", "target", "found", ""), targets(rows))
    yield "\n## Chosen by a sample\n"
    yield f"By {SAMPLES} of {2 * SAMPLES} steps, on 16 devices of 80 GiB, beside the best of all.\n"
    yield from table(("case", "chosen", "over the best of all"), _sample_rows(rows))
    yield "\n## Every system on its best layout\n"
    yield "Step over that of `epp`; `-` where none fits.\n"
    systems = _by_name(rows, "system")
    yield from table(("case", "devices", "`epp`", *SYSTEMS[1:]), _system_rows(systems))
    yield "\n"
    yield from table(("system", "over `epp`, geometric mean", "range", "cases"), _rivals(systems))


def _by_name(rows: list[Row], kind: str) -> dict[tuple[str, int], dict[str, Row]]:
    """Return the rows of a kind by what they are compared under, and by their name; only of what is
    measured under all its names."""
    found: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        case = row["case"]
        if case["kind"] == kind:
            found.setdefault((_label(case), case["devices"]), {})[case["name"]] = row
    num_names = len({row["case"]["name"] for row in rows if row["case"]["kind"] == kind})
    return {key: rows_of for key, rows_of in found.items() if len(rows_of) == num_names}


def _label(case: Case) -> str:
    model = case["model"].removeprefix("llama-").upper()
    return f"{model}, {case['memory_gib']} GiB, {case['data']}, {case['clip'] // 1024}K"


def _best(row: Row) -> Row | None:
    first: Row = row["trials"][0]
    return None if first["step_s"] is None else first


def _step_s(row: Row) -> float:
    best = _best(row)
    return math.inf if best is None else float(best["step_s"])


def _cell(row: Row) -> str:
    best = _best(row)
    if best is None:
        return "-"
    return f"{best['step_s'] / row['pure_s']:.3f} ({best['name'].replace(' ', '')})"


def _family_rows(found: dict[tuple[str, int], dict[str, Row]]) -> Iterator[tuple[str, ...]]:
    for (label, devices), rows in found.items():
        cells = [_cell(rows[name]) for name in FAMILIES]
        ratio = "-"
        if _best(rows["pipeline only"]):
            ratio = f"{_step_s(rows['pipeline only']) / _step_s(rows['best']):.3f}"
        yield (label, str(devices), *cells, ratio)


def _sample_rows(rows: list[Row]) -> Iterator[tuple[str, ...]]:
    for (label, _), pair in _by_name(rows, "sample").items():
        chosen = _best(pair["chosen"])
        assert chosen is not None
        yield (label, chosen["name"].replace(" ", ""), f"{_chosen_over_best(pair):.4f}")


def _chosen_over_best(pair: dict[str, Row]) -> float:
    """Return what the layout chosen by a sample takes on all steps, over the best."""
    return _step_s(pair["chosen"]) / _step_s(pair["all steps"])


def _system_rows(found: dict[tuple[str, int], dict[str, Row]]) -> Iterator[tuple[str, ...]]:
    for (label, devices), rows in found.items():
        ours = _step_s(rows["epp"])
        rivals = [_over(rows[name], ours) for name in SYSTEMS[1:]]
        yield (label, str(devices), _cell(rows["epp"]), *rivals)


def _over(row: Row, ours: float) -> str:
    best = _best(row)
    if best is None:
        return "-"
    return f"{best['step_s'] / ours:.3f} ({best['name'].replace(' ', '')})"


def _rivals(found: dict[tuple[str, int], dict[str, Row]]) -> Iterator[tuple[str, ...]]:
    for name in SYSTEMS[1:]:
        yield _rival(name, [_step_s(rows[name]) / _step_s(rows["epp"]) for rows in found.values()])
    best = [
        min(_step_s(rows[name]) for name in SYSTEMS[1:]) / _step_s(rows["epp"])
        for rows in found.values()
    ]
    yield _rival("the best of these", best)


def _rival(name: str, ratios: list[float]) -> tuple[str, ...]:
    known = [ratio for ratio in ratios if math.isfinite(ratio)]
    if not known:
        return (name, "-", "-", "0")
    mean = statistics.geometric_mean(known)
    return (name, f"{mean:.3f}", f"{min(known):.3f} - {max(known):.3f}", str(len(known)))


def targets(rows: list[Row]) -> Iterator[tuple[str, ...]]:
    """Yield the targets, and what was found."""
    families = _by_name(rows, "family")
    roomy = {key: found for key, found in families.items() if ", 80 GiB" in key[0]}
    over_pure = [
        _step_s(found["best"]) / found["best"]["pure_s"]
        for (_, devices), found in roomy.items()
        if devices == 16
    ]
    yield _target("best layout over pure work, 16 devices, 80 GiB", 1.13, over_pure, most=True)
    gains = [
        _step_s(found["pipeline only"]) / _step_s(found["best"])
        for (_, devices), found in families.items()
        if devices in (16, 32) and _best(found["pipeline only"])
    ]
    yield _target("pipeline only over best layout, 16 and 32 devices", 1.08, gains, most=False)
    seconds = [found["best"]["cpu_s"] for (_, devices), found in families.items() if devices == 16]
    name = "CPU seconds to search 16 devices, one step, mean"
    yield (name, "", f"{statistics.mean(seconds):.1f}", "")
    sampled = _by_name(rows, "sample").values()
    if not sampled:
        return
    worst = max(map(_chosen_over_best, sampled))
    verdict = "ok" if worst <= 1.02 else "MISSED"
    name = "chosen by a sample over the best of all, worst"
    yield (name, "at most 1.02", f"{worst:.4f}", verdict)
    longest_s = max(pair["search"]["cpu_s"] for pair in sampled)
    verdict = "ok" if longest_s <= 60 else "MISSED"
    name = f"CPU seconds to search 16 devices, {SAMPLES} steps, most"
    yield (name, "at most 60, 30 on each of two cores", f"{longest_s:.1f}", verdict)


def _target(name: str, limit: float, ratios: list[float], *, most: bool) -> tuple[str, ...]:
    found = statistics.geometric_mean(ratios)
    reached = found <= limit if most else found >= limit
    wanted = f"at {'most' if most else 'least'} {limit:.2f}"
    verdict = "ok" if reached else "MISSED"
    return (f"{name}, geometric mean", wanted, f"{found:.3f}", verdict)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command")
    measuring = commands.add_parser("measure")
    measuring.add_argument("-o", "--output", type=Path, required=True)
    measuring.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    reporting = commands.add_parser("report")
    reporting.add_argument("rows", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "measure":
        measure(arguments.output, arguments.jobs)
    else:
        print("\n".join(report(read(arguments.rows))))


if __name__ == "__main__":
    main()
