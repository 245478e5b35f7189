"""Compare all policies on real length distributions.

How close to the bound do they come, how much do they recompute, how long do they plan?

    # Every case and policy; goes on where it stopped.
    python benchmarks/planner.py measure -o planner.jsonl
    python benchmarks/planner.py measure --ablations -o ablations.jsonl
    # Tables in Markdown.
    python benchmarks/planner.py report planner.jsonl ablations.jsonl

Shapes and costs are analytic; lengths are drawn from quantiles of real data sets
(tests/length_quantiles.json). Systems with fixed shapes pack micro-batches of as many tokens as the
longest sequence of the data set has, clipped.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

# Run as a script, only its own folder is on the path.
sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.ablations import ABLATIONS
from benchmarks.split_backward import split_backwards
from benchmarks.tables import table
from infinipipe.errors import InfeasibleError
from infinipipe.ir import Layout, Sequence, Step
from infinipipe.planner import POLICIES
from infinipipe.planner.batches import Batch
from infinipipe.planner.compare import summarize
from infinipipe.planner.compile import plan_step
from infinipipe.planner.passes.partition import balanced_costs
from infinipipe.planner.passes.schedule import Result, Schedule
from infinipipe.planner.policies import ONE_STAGE, Policy
from infinipipe.planner.policies.baselines import plan_1f1b, plan_gpipe, plan_seq1f1b
from infinipipe.planner.policies.epp import plan_epp
from infinipipe.planner.problem import Pipeline, Problem
from infinipipe.planner.workers import ordered_map
from infinipipe.profiles import read_model
from infinipipe.profiles.analytic import analytic_profile
from infinipipe.reports.plan_view import step_summary

QUANTILES = Path(__file__).parents[1] / "tests" / "length_quantiles.json"
DEVICE = "a800-80g"
BATCHES = {"wikipedia": 512, "mooncake": 64}
LONGEST = {"wikipedia": 1_823_777, "mooncake": 126_527}
"""Of all 1,000,000 and 12,031 sequences that the quantiles were drawn from."""
MODELS = ("llama-7b", "llama-13b")
STAGES = (4, 8, 16)
CLIPS = (48 * 1024, 96 * 1024, 192 * 1024)
MEMORY_GIB = (80, 40)
SEEDS = 3

Case = dict[str, Any]
Row = dict[str, Any]


def of_this_batch(policy: Policy, problem: Problem) -> Result:
    """Plan as if this batch were all data."""
    longest = int(problem.lengths.max())
    return policy(replace(problem, pipeline=replace(problem.pipeline, context_tokens=longest)))


BATCH_TUNED: dict[str, Policy] = {
    "gpipe, of this batch": partial(of_this_batch, plan_gpipe),
    "1f1b, of this batch": partial(of_this_batch, plan_1f1b),
    "seq1f1b, of this batch": partial(of_this_batch, plan_seq1f1b),
}
"""Rivals whose micro-batches are shaped anew for every batch, which their systems cannot do."""
STATIC = ("gpipe", "1f1b", "terapipe", "seq1f1b", "chunkflow")
I_AND_W = "epp, I and W"
"""The schedule of `epp` with B cut where that helps; no runtime runs it."""
PIPELINES = {name: policy for name, policy in POLICIES.items() if name not in ONE_STAGE}
PLANNERS: dict[str, Policy] = PIPELINES | BATCH_TUNED | {I_AND_W: plan_epp} | ABLATIONS


def cases() -> Iterator[Case]:
    """Yield every combination."""
    names = ("seed", "model", "data", "clip", "stages", "memory_gib")
    for values in product(range(SEEDS), MODELS, BATCHES, CLIPS, STAGES, MEMORY_GIB):
        yield dict(zip(names, values, strict=True))


def run(task: tuple[Case, str]) -> Row:
    """Plan one batch with one policy."""
    case, policy = task
    profile = analytic_profile(read_model(case["model"]), DEVICE)
    quantiles = json.loads(QUANTILES.read_text())[case["data"]]["quantiles"]
    drawn = np.random.default_rng(case["seed"]).choice(np.array(quantiles), BATCHES[case["data"]])
    lengths = np.minimum(drawn, case["clip"])
    sequences = tuple(
        Sequence(row, length, length - 1) for row, length in enumerate(lengths.tolist())
    )
    limits = (case["memory_gib"] * 2**30,) * case["stages"]
    row: Row = {"case": case, "policy": policy, "feasible": False}
    began = time.perf_counter()
    try:
        layout = Layout(num_stages=case["stages"])
        costs = balanced_costs(profile, layout, limits, lengths)
        pipeline = Pipeline(costs, limits, min(case["clip"], LONGEST[case["data"]]))
        step = plan_step(pipeline, PLANNERS[policy], Batch(0, sequences), "token")
        if policy == I_AND_W:
            step = split_step(step, pipeline)
    except InfeasibleError:
        return row
    summary: Row = msgspec.to_builtins(summarize(policy, [step], time.perf_counter() - began))
    over_bound = {"feasible": True, "makespan_to_bound": step.makespan_s / step.bound_s}
    return summary | row | over_bound | granularity(step)


def split_step(step: Step, pipeline: Pipeline) -> Step:
    """Plan a step again and cut its B into I and W."""
    found = plan_epp(Problem(pipeline, step.sequences, tuple(range(len(step.sequences)))))
    assert isinstance(found, Schedule)
    replica, makespan_s = split_backwards(found)
    step_s = step.step_s - step.makespan_s + makespan_s
    # The bound stays that of F and B, which I and W may undercut.
    return msgspec.structs.replace(step, replicas=(replica,), makespan_s=makespan_s, step_s=step_s)


def granularity(step: Step) -> Row:
    """Return what was chosen: who won, kinds of chunks, and slices of split sequences."""
    summary = step_summary(step)
    slices = Counter(each.sequence for chunk in step.replicas[0].chunks for each in chunk.slices)
    search = step.replicas[0].search
    return {
        "winner": summary.winners[0],
        "solver": None if search is None else search.solver,
        "batched": summary.num_batched,
        "split": summary.num_split,
        "hybrid": summary.num_hybrid,
        "slices_per_split": [count for count in slices.values() if count > 1],
    }


def measure(ablations: bool, output: Path, jobs: int) -> None:
    """Append the rows that the output does not have yet."""
    done = {(json.dumps(row["case"]), row["policy"]) for row in read(output)}
    chosen = list(cases())
    policies = [*PIPELINES, *BATCH_TUNED, I_AND_W]
    if ablations:
        chosen = [case for case in chosen if case["model"] == MODELS[0] and case["stages"] == 8]
        policies = ["epp", "paper", *ABLATIONS]
    tasks = [
        task for task in product(chosen, policies) if (json.dumps(task[0]), task[1]) not in done
    ]
    with output.open("a") as file:
        for row in ordered_map(run, tasks, jobs):
            print(json.dumps(row), file=file, flush=True)


def read(path: Path) -> list[Row]:
    """Return the rows of an output, none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


Found = dict[str, dict[str, Row]]
"""Rows by case and policy."""


def report(main_rows: list[Row], ablation_rows: list[Row]) -> Iterator[str]:
    """Yield the lines of the tables."""
    found = by_case(main_rows)
    count = len({json.dumps(row["case"]) for row in main_rows})
    infeasible = f"{count - len(found)} of {count} cases"
    yield f"No policy can plan {infeasible}; they are left out of everything below.\n"
    policies = [policy for policy in PLANNERS if any(policy in rows for rows in found.values())]
    yield "## Against the targets\n"
    yield from table(("", "target", "found", ""), targets(found))
    yield "\n## Policies\n"
    yield (
        "Times over the bound are means over the cases that a policy can plan, so compare by time "
        "over `epp`.\n"
    )
    yield from table(SUMMARY, (summary_cells(found, policy) for policy in policies))
    yield "\n## What each choice is worth\n"
    ablated = by_case(ablation_rows)
    yield "7B on 8 stages, all lengths, limits and seeds.\n"
    yield from table(
        SUMMARY, (summary_cells(ablated, policy) for policy in ("epp", *ABLATIONS, "paper"))
    )
    yield "\n## What `epp` chooses\n"
    yield from choices(found)
    yield "\n## Every case: time over bound, mean of the seeds\n"
    yield from details(found, policies)


def by_case(rows: Iterable[Row]) -> Found:
    """Return the rows of the cases that any policy can plan, by case and policy."""
    found: Found = defaultdict(dict)
    for row in rows:
        found[json.dumps(row["case"])][row["policy"]] = row
    return {
        case: rows for case, rows in found.items() if any(row["feasible"] for row in rows.values())
    }


def ratios(found: Found, slower: str, faster: str = "epp") -> list[float]:
    """Return by how much one policy is slower than another in each case that both can plan."""
    both = [
        (rows[slower], rows[faster]) for rows in found.values() if slower in rows and faster in rows
    ]
    return [
        a["step_seconds"] / b["step_seconds"] for a, b in both if a["feasible"] and b["feasible"]
    ]


def targets(found: Found) -> Iterator[tuple[str, ...]]:
    """Yield what was wanted and what was found."""
    plannable = [rows for rows in found.values() if any(rows[p]["feasible"] for p in PIPELINES)]
    epp = [rows["epp"] for rows in plannable if rows["epp"]["feasible"]]
    best = sum(fastest(rows, ("epp",)) <= fastest(rows, PIPELINES) for rows in plannable)
    static = [
        fastest(rows, STATIC) / rows["epp"]["step_seconds"]
        for rows in plannable
        if rows["epp"]["feasible"]
    ]
    rivals = [ratio for ratio in static if math.isfinite(ratio)]
    planning = [
        row["plan_seconds"]
        for row in epp
        if row["case"]["stages"] == 8 and row["case"]["data"] == "wikipedia"
    ]
    bounds = {
        gib: [r["makespan_to_bound"] for r in epp if r["case"]["memory_gib"] == gib]
        for gib in MEMORY_GIB
    }
    count = len(plannable)
    yield (
        "`epp` best or equal, of the cases that any can plan",
        "all",
        f"{best} of {count}",
        ok(best == count),
    )
    least = (
        ("`paper` / `epp`", 1.05, geometric(ratios(found, "paper"))),
        ("`seq1f1b` / `epp`", 1.30, geometric(ratios(found, "seq1f1b"))),
        ("best static baseline / `epp`", 1.15, geometric(rivals)),
        ("`seq1f1b` / `paper`", 1.20, geometric(ratios(found, "seq1f1b", "paper"))),
    )
    for name, target, value in least:
        yield (
            f"{name}, geometric mean",
            f"at least {target:.2f}",
            f"{value:.3f}",
            ok(value >= target),
        )
    most = (
        ("`epp` / bound at 80 GiB, mean", 1.08, float(np.mean(bounds[80]))),
        ("`epp` / bound at 40 GiB, mean", 1.20, float(np.mean(bounds[40]))),
        ("seconds to plan 512 sequences on 8 stages, mean", 1.0, float(np.mean(planning))),
    )
    for name, target, value in most:
        yield name, f"at most {target:.2f}", f"{value:.3f}", ok(value <= target)


def fastest(rows: dict[str, Row], policies: Iterable[str]) -> float:
    """Return the seconds of the fastest of these policies, infinity if none can plan the case."""
    return min((rows[p]["step_seconds"] for p in policies if rows[p]["feasible"]), default=math.inf)


def geometric(values: list[float]) -> float:
    """Return the geometric mean."""
    return float(np.exp(np.mean(np.log(values))))


def ok(reached: bool) -> str:
    """Say whether a target is reached."""
    return "ok" if reached else "MISSED"


SUMMARY = (
    "policy",
    "infeasible",
    "time / bound, 80 GiB",
    "40 GiB",
    "time / `epp`, geometric mean",
    "range",
    "bubble",
    "recompute",
    "peak / limit",
    "planning, median s",
    "95th percentile",
    "most",
)


def summary_cells(found: Found, policy: str) -> tuple[str, ...]:
    """Return one policy's line over all cases."""
    rows = [case[policy] for case in found.values() if policy in case]
    feasible = [row for row in rows if row["feasible"]]
    pairs = ratios(found, policy)
    peaks = [max(row["peak_bytes"]) / (row["case"]["memory_gib"] * 2**30) for row in feasible]
    # With I and W the F and B are planned twice.
    seconds = [row["plan_seconds"] for row in feasible if policy != I_AND_W]
    return (
        policy,
        f"{len(rows) - len(feasible)} of {len(rows)}",
        *(
            mean(row["makespan_to_bound"] for row in feasible if row["case"]["memory_gib"] == gib)
            for gib in MEMORY_GIB
        ),
        f"{geometric(pairs):.3f}" if pairs else "-",
        f"{min(pairs):.3f} - {max(pairs):.3f}" if pairs else "-",
        *(
            mean(row[name] for row in feasible)
            for name in ("bubble_fraction", "recompute_fraction")
        ),
        mean(peaks),
        *(f"{np.quantile(seconds, q):.2f}" if seconds else "-" for q in (0.5, 0.95, 1.0)),
    )


def choices(found: Found) -> Iterator[str]:
    """Yield how often each choice of granularity is taken."""
    rows = [case["epp"] for case in found.values() if "epp" in case and case["epp"]["feasible"]]
    kinds = {kind: sum(row[kind] for row in rows) for kind in ("batched", "split", "hybrid")}
    total = sum(kinds.values())
    yield (
        "* Chunks: "
        + ", ".join(f"{count / total:.0%} {kind}" for kind, count in kinds.items())
        + "."
    )
    counts = [count for row in rows for count in row["slices_per_split"]]
    quantiles = ", ".join(f"{np.quantile(counts, q):.0f}" for q in (0.0, 0.25, 0.5, 0.75, 1.0))
    yield f"* Slices of a split sequence (least, quartiles, most): {quantiles}."
    chunks = [row["num_chunks"] for row in rows]
    yield f"* Chunks of a step: {min(chunks):.0f} to {max(chunks):.0f}."
    winners = Counter(row["winner"].partition(":")[0] for row in rows)
    yield "* The schedule comes from: " + listed(winners) + "."
    own = [
        row["winner"].partition(": ")[2].split(", ")[1:]
        for row in rows
        if row["winner"].startswith("epp")
    ]
    for place, name in enumerate(
        ("attention that counts as work", "cuts", "sizes", "depth", "bursts")
    ):
        yield f"* {name.capitalize()}: {listed(Counter(settings[place] for settings in own))}."
    solvers = Counter(row["solver"] or "no solver (nothing recomputed)" for row in rows)
    yield "* Recompute by: " + listed(solvers) + "."


def listed(counts: Counter[str]) -> str:
    """Return what was counted, most first."""
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())


def details(found: Found, policies: list[str]) -> Iterator[str]:
    """Yield time over bound of every policy."""
    grouped: dict[tuple[Any, ...], list[dict[str, Row]]] = defaultdict(list)
    for key, rows in found.items():
        case = json.loads(key)
        grouped[
            tuple(case[name] for name in ("model", "data", "memory_gib", "clip", "stages"))
        ].append(rows)
    lines = []
    for (model, data, gib, clip, stages), group in sorted(grouped.items(), key=str):
        cells = [
            mean(c[p]["makespan_to_bound"] for c in group if p in c and c[p]["feasible"])
            for p in policies
        ]
        lines.append((model, data, str(gib), f"{clip // 1024}K", str(stages), *cells))
    yield from table(("model", "lengths", "GiB", "clip", "stages", *policies), lines)


def mean(values: Iterable[float]) -> str:
    """Return the mean with three digits, a dash for none."""
    numbers = list(values)
    return f"{np.mean(numbers):.3f}" if numbers else "-"


def main() -> None:
    """Run the benchmark or print its report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("-o", "--output", type=Path, required=True)
    measuring.add_argument("--ablations", action="store_true")
    measuring.add_argument("--jobs", type=int, default=1)
    reporting = commands.add_parser("report")
    reporting.add_argument("rows", type=Path)
    reporting.add_argument("ablations", type=Path)
    options = parser.parse_args()
    if options.command == "measure":
        measure(options.ablations, options.output, options.jobs)
    else:
        print("\n".join(report(read(options.rows), read(options.ablations))))


if __name__ == "__main__":
    main()
