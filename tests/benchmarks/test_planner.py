"""The benchmark of the planner: its scripts start, and its ablations take away what they name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.ablations import ABLATIONS
from benchmarks.planner import BATCH_TUNED, I_AND_W, PIPELINES, PLANNERS, cases, report, run
from infinipipe.planner.passes import schedule
from infinipipe.planner.passes.recompute import Shortage
from infinipipe.planner.passes.schedule import Schedule
from infinipipe.planner.policies import paper
from infinipipe.planner.policies.epp import plan_epp, search
from infinipipe.planner.problem import Problem
from tests.planner.toys import draw_lengths, toy_problem

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def lengths() -> list[int]:
    return [max(1, length // 60) for length in draw_lengths("mooncake", 30, 7)]


def planned(name: str, problem: Problem) -> Schedule:
    found = PLANNERS[name](problem)
    assert isinstance(found, Schedule)
    return found


@pytest.mark.parametrize("script", ["planner.py", "accuracy.py", "layouts.py"])
def test_scripts_start_from_the_repository(script: str) -> None:
    command = [sys.executable, f"benchmarks/{script}", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"python benchmarks/{script}" in done.stdout


def test_full_recompute_is_slower_by_what_nothing_else_asks_for(lengths: list[int]) -> None:
    problem = toy_problem(lengths, [2, 2, 2])
    whole = planned("epp", problem)
    full = planned("full recompute", problem)
    assert np.all(full.levels == 2)
    assert full.makespan_s > 1.15 * whole.makespan_s
    # Nothing is left of what was patched.
    assert search.fit_schedule is schedule.fit_schedule
    assert paper._group.__name__ == "_group"


def test_one_recompute_count_is_one_for_all_chunks_of_a_stage(lengths: list[int]) -> None:
    free = toy_problem(lengths, [2, 2, 2])
    kept = max(lengths) * 2 * free.pipeline.costs.profile.bytes.layer_full_per_token
    problem = toy_problem(lengths, [2, 2, 2], 1.2 * kept)
    found = planned("one recompute count", problem)
    assert found.levels.any()
    assert np.all(found.levels == found.levels[:, :1])
    assert found.makespan_s > planned("epp", problem).makespan_s


def test_no_ablation_is_better_than_epp(lengths: list[int]) -> None:
    problem = toy_problem(lengths, [2, 2, 2])
    best = plan_epp(problem)
    assert isinstance(best, Schedule)
    for name in ABLATIONS:
        found = PLANNERS[name](problem)
        assert isinstance(found, Shortage) or found.makespan_s >= best.makespan_s * 0.999, name


def test_a_sequence_by_itself_is_what_is_taken_away() -> None:
    """One that fills a stage, so that running it first is worth much."""
    lengths = [900, *[20] * 30]
    kept = 900 * 2 * toy_problem([1], [2, 2]).pipeline.costs.profile.bytes.layer_full_per_token
    problem = toy_problem(lengths, [2, 2], 1.4 * kept)
    alone = planned("epp alone", problem)
    assert alone.makespan_s <= planned("no sequence by itself", problem).makespan_s
    assert "longest first" not in planned("no sequence by itself", problem).search.winner


def test_the_sweep_alone_asks_no_solver() -> None:
    lengths = [200, 60, 50, 40]
    kept = 2 * 200 * toy_problem([1], [2, 2]).pipeline.costs.profile.bytes.layer_full_per_token
    problem = toy_problem(lengths, [2, 2], 1.2 * kept)
    swept, polished = (
        planned(name, problem) for name in ("recompute by the sweep alone", "epp alone")
    )
    assert swept.search.solver is None
    assert polished.makespan_s <= swept.makespan_s


def test_the_paper_without_groups_runs_one_pipeline() -> None:
    lengths = [600, *[20] * 60]
    kept = 600 * 2 * toy_problem([1], [2] * 4).pipeline.costs.profile.bytes.layer_full_per_token
    problem = toy_problem(lengths, [2, 2, 2, 2], 0.9 * kept)
    whole = planned("paper without grouping", problem)
    assert whole.search.winner.endswith(", 1 groups")
    assert planned("paper", problem).makespan_s <= whole.makespan_s


def test_cases_become_rows_and_rows_a_report() -> None:
    small = {
        "seed": 0,
        "model": "llama-7b",
        "data": "mooncake",
        "clip": 48 * 1024,
        "stages": 4,
        "memory_gib": 80,
    }
    assert small in list(cases())
    row = run((small, "epp"))
    assert (row["case"], row["policy"], row["feasible"]) == (small, "epp", True)
    assert row["makespan_to_bound"] >= 1
    # As if every policy had planned it so, on stages and lengths that the targets are of.
    wanted = small | {"data": "wikipedia", "stages": 8}
    main, ablated = (
        [
            row | {"case": wanted | {"memory_gib": gib}, "policy": policy}
            for policy in policies
            for gib in (80, 40)
        ]
        for policies in ((*PIPELINES, *BATCH_TUNED, I_AND_W), ("epp", "paper", *ABLATIONS))
    )
    page = "\n".join(report(main, ablated))
    for policy in PLANNERS:
        assert f"| {policy} | 0 of 2 |" in page
    assert "No policy can plan 0 of 2 cases" in page
