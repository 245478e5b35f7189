"""Compare all policies on real length distributions: how close to the bound, how much recompute, how long to plan.

    python benchmarks/planner.py --seeds 3 -o planner.jsonl    # one JSON object per case and policy; resumes
    python benchmarks/planner.py --ablations --seeds 3 -o ablations.jsonl
    python benchmarks/planner.py --report planner.jsonl        # tables in Markdown

Shapes and costs are analytic; lengths are drawn from quantiles of real data sets (tests/length_quantiles.json).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from infinipipe.errors import InfeasibleError
from infinipipe.ir import Sequence
from infinipipe.planner.compare import InfeasibleRow, Row, summarize
from infinipipe.planner.compile import plan_step
from infinipipe.planner.epp import Space, plan_epp
from infinipipe.planner.leads import Shape
from infinipipe.planner.partition import partition_layers
from infinipipe.planner.policies import POLICIES, Policy
from infinipipe.planner.problem import Pipeline
from infinipipe.profiles import read_model
from infinipipe.profiles.analytic import analytic_profile
from infinipipe.profiles.cost import logits_tokens

QUANTILES = Path(__file__).parents[1] / "tests" / "length_quantiles.json"
DEVICE = "a800-80g"
BATCHES = {"wikipedia": 512, "mooncake": 64}
MODELS = ("llama-7b", "llama-13b")
STAGES = (4, 8, 16)
CLIPS = (48 * 1024, 96 * 1024, 192 * 1024)
MEMORY_GIB = (80, 40)

ABLATIONS: dict[str, Policy] = {
    "equal tokens": partial(plan_epp, space=Space(attentions=(0.0,))),
    "equal work only": partial(plan_epp, space=Space(attentions=(1.0,), evens=(False,))),
    "no graded chunks": partial(plan_epp, space=Space(grades=(False,))),
    "plain 1F1B depth": partial(plan_epp, space=Space(shapes=(Shape(1.0, 1),))),
    "full recompute": partial(plan_epp, space=Space(full_recompute=True)),
}
"""`epp` without one of its choices."""
PLANNERS = POLICIES | ABLATIONS

Case = dict[str, Any]


def cases(seeds: int) -> Iterator[Case]:
    """Yield every combination."""
    names = ("seed", "model", "data", "clip", "stages", "memory_gib")
    for values in product(range(seeds), MODELS, BATCHES, CLIPS, STAGES, MEMORY_GIB):
        yield dict(zip(names, values, strict=True))


def run(case: Case, policy: str) -> Row | InfeasibleRow:
    """Plan one batch with one policy."""
    profile = analytic_profile(read_model(case["model"]), DEVICE)
    quantiles = json.loads(QUANTILES.read_text())[case["data"]]["quantiles"]
    drawn = np.random.default_rng(case["seed"]).choice(np.array(quantiles), BATCHES[case["data"]])
    lengths = np.minimum(drawn, case["clip"])
    sequences = tuple(Sequence(row, length, length - 1) for row, length in enumerate(lengths.tolist()))
    limits = (case["memory_gib"] * 2**30,) * case["stages"]
    began = time.perf_counter()
    try:
        stages = partition_layers(profile, case["stages"], limits, lengths)
        pipeline = Pipeline(profile, stages, limits, logits_tokens(profile.model.vocabulary_size), case["clip"])
        step = plan_step(pipeline, PLANNERS[policy], 0, sequences, 1, "token")
    except InfeasibleError as error:
        return InfeasibleRow(policy=policy, reason=str(error))
    return summarize(policy, [step], time.perf_counter() - began)


def measure(chosen: list[Case], policies: list[str], output: Path) -> None:
    """Append the rows that the output does not have yet."""
    done = {(json.dumps(row["case"]), row["policy"]) for row in read(output)}
    with output.open("a") as file:
        for case, policy in product(chosen, policies):
            if (json.dumps(case), policy) not in done:
                row = {"case": case} | msgspec.to_builtins(run(case, policy))
                print(json.dumps(row), file=file, flush=True)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of an output, none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def report(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the tables."""
    by_case: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for row in rows:
        by_case[json.dumps(row["case"])][row["policy"]] = row
    policies = [policy for policy in PLANNERS if any(policy in found for found in by_case.values())]
    yield from summary(by_case, policies)
    yield ""
    yield from details(by_case, policies)


def summary(by_case: dict[str, dict[str, dict[str, Any]]], policies: list[str]) -> Iterator[str]:
    """Yield one line per policy over all cases."""
    yield (
        "| policy | infeasible | time / bound, 80 GiB | 40 GiB | time / `epp` (geometric mean) | range "
        "| best or equal | bubble | recompute | planning, mean s | max s |"
    )
    yield "|---" * 11 + "|"
    possible = [found for found in by_case.values() if any(row["feasible"] for row in found.values())]
    for policy in policies:
        found = [case[policy] for case in possible if policy in case and case[policy]["feasible"]]
        pairs = [
            case[policy]["step_seconds"] / case["epp"]["step_seconds"]
            for case in possible
            if policy in case and case[policy]["feasible"] and case["epp"]["feasible"]
        ]
        best = sum(
            row["step_seconds"]
            <= 1.0005 * min(r["step_seconds"] for r in by_case[json.dumps(row["case"])].values() if r["feasible"])
            for row in found
        )
        cells = [
            policy,
            f"{len(possible) - len(found)} of {len(possible)}",
            *(mean(row["ratio_to_bound"] for row in found if row["case"]["memory_gib"] == gib) for gib in MEMORY_GIB),
            f"{math.exp(np.mean(np.log(pairs))):.3f}" if pairs else "-",
            f"{min(pairs):.3f} - {max(pairs):.3f}" if pairs else "-",
            str(best),
            *(mean(row[name] for row in found) for name in ("bubble_fraction", "recompute_fraction", "plan_seconds")),
            f"{max((row['plan_seconds'] for row in found), default=math.nan):.1f}",
        ]
        yield "| " + " | ".join(cells) + " |"


def details(by_case: dict[str, dict[str, dict[str, Any]]], policies: list[str]) -> Iterator[str]:
    """Yield time over bound of every policy, averaged over seeds."""
    grouped: dict[tuple[Any, ...], list[dict[str, dict[str, Any]]]] = defaultdict(list)
    for key, found in by_case.items():
        case = json.loads(key)
        grouped[tuple(case[name] for name in ("model", "data", "memory_gib", "clip", "stages"))].append(found)
    yield "| model | lengths | GiB | clip | stages | " + " | ".join(policies) + " |"
    yield "|---" * (5 + len(policies)) + "|"
    for (model, data, gib, clip, stages), group in sorted(grouped.items(), key=str):
        ratios = [
            mean(case[policy]["ratio_to_bound"] for case in group if policy in case and case[policy]["feasible"])
            for policy in policies
        ]
        yield f"| {model} | {data} | {gib} | {clip // 1024}K | {stages} | " + " | ".join(ratios) + " |"


def mean(values: Iterator[float]) -> str:
    """Return the mean with three digits, a dash for none."""
    listed = list(values)
    return f"{np.mean(listed):.3f}" if listed else "-"


def main() -> None:
    """Run the benchmark or print its report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("planner.jsonl"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--ablations", action="store_true", help="epp and its ablations, on the 7B shape only")
    parser.add_argument("--report", type=Path, metavar="ROWS")
    options = parser.parse_args()
    if options.report:
        print("\n".join(report(read(options.report))))
    elif options.ablations:
        chosen = (case for case in cases(options.seeds) if case["model"] == MODELS[0] and case["stages"] == 8)
        measure(list(chosen), ["epp", *ABLATIONS], options.output)
    else:
        measure(list(cases(options.seeds)), options.policies.split(","), options.output)


if __name__ == "__main__":
    main()
