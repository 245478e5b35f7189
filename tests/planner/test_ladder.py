"""The ladder of recompute: what levels stand for, and that no choice frees as much for less."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinipipe.costs import CostedChunks
from infinipipe.planner.passes.ladder import Ladder, inputs_only, whole_menu
from infinipipe.planner.passes.schedule import Schedule, price_chains
from infinipipe.planner.policies import epp
from infinipipe.planner.policies.epp import SearchSpace, longest_first, plan_alone, plan_epp, search
from infinipipe.planner.policies.paper import plan_paper
from infinipipe.planner.problem import Problem
from infinipipe.profiles import read_model
from infinipipe.profiles.analytic import analytic_profile
from tests.planner.toys import cut, roomy_limits, toy_costs, toy_problem, toy_sequences

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=8)


def costs_of(lengths: list[int], parts: int) -> CostedChunks:
    problem = toy_problem(lengths, [2, 2])
    return price_chains(problem, cut(problem, parts)[0]).costs


def seconds_and_bytes(ladder: Ladder, level: int, num_layers: int) -> tuple[float, float]:
    """Return what a level costs and frees of the first chunk."""
    levels = np.full(len(ladder.has_upper), level)
    seconds = ladder.seconds(levels, num_layers)
    return float(seconds[0]), float(ladder.freed_bytes(levels, num_layers)[0])


@given(LENGTHS, st.integers(1, 8), st.integers(1, 5), st.sampled_from([inputs_only, whole_menu]))
def test_levels_stand_for_layers_that_cost_and_free_what_the_ladder_says(
    lengths: list[int], parts: int, num_layers: int, make: object
) -> None:
    costs = costs_of(lengths, parts)
    ladder = make(costs)
    highest = ladder.num_rungs(num_layers)
    for level in range(2 * num_layers + 1):
        levels = np.minimum(level, highest)
        recompute = ladder.recompute(levels, num_layers)
        both = recompute.keep_input + recompute.keep_attention
        assert np.all(recompute.keep_input >= 0)
        assert np.all(recompute.keep_attention >= 0)
        assert np.all(both <= num_layers)
        expected_s = costs.recompute_seconds(recompute)
        assert ladder.seconds(levels, num_layers) == pytest.approx(expected_s, rel=1e-12)
        freed = costs.freed_per_layer_bytes * both
        freed = freed - costs.attention_bytes * recompute.keep_attention
        assert ladder.freed_bytes(levels, num_layers) == pytest.approx(freed, rel=1e-12)
        again = ladder.levels_that_free(ladder.freed_bytes(levels, num_layers), num_layers)
        assert again.tolist() == levels.tolist()
    assert np.all(ladder.recompute(highest, num_layers).keep_input == num_layers)
    # Before there are upper rungs, all layers keep attention's output.
    kept = ladder.recompute(np.full(len(highest), num_layers), num_layers).keep_attention
    assert np.all(kept == num_layers * ladder.has_upper)


@given(LENGTHS, st.integers(1, 8), st.integers(1, 5))
def test_no_choice_of_layers_is_cheaper_than_a_mean_of_two_levels(
    lengths: list[int], parts: int, num_layers: int
) -> None:
    costs = costs_of(lengths, parts)
    ladder = whole_menu(costs)
    highest = int(ladder.num_rungs(num_layers)[0])
    points = [seconds_and_bytes(ladder, level, num_layers) for level in range(highest + 1)]
    level_s = [seconds for seconds, _ in points]
    level_bytes = [freed for _, freed in points]
    per_rung = np.diff(level_bytes) / np.diff(level_s)
    assert np.all(np.diff(per_rung) <= 1e-9 * per_rung[1:])
    freed = float(costs.freed_per_layer_bytes[0])
    seconds = float(costs.recompute_s[0])
    attention = float(costs.attention_bytes[0])
    attention_s = float(costs.attention_s[0])
    for in_whole, without in product(range(num_layers + 1), repeat=2):
        if in_whole + without > num_layers:
            continue
        num_bytes = freed * (in_whole + without) - attention * without
        cost_s = seconds * (in_whole + without) - attention_s * without
        least_s = np.interp(num_bytes, level_bytes, level_s)
        assert cost_s >= least_s * (1 - 1e-12)


def test_only_long_sequences_keep_attention() -> None:
    costs = toy_costs(analytic_profile(read_model("llama-7b"), "a800-80g"), [8, 8, 8, 8])
    problem = toy_problem([1], [1])
    pipeline = replace(problem.pipeline, costs=costs, limits=roomy_limits(costs, 2**40))
    lengths = [500, 60_000]
    problem = Problem(pipeline, toy_sequences(lengths), (0, 1))
    chains = price_chains(problem, cut(problem, 8)[0], whole_menu)
    sizes = chains.costs.sizes
    is_long = sizes.pairs > 10_000 * sizes.tokens
    is_short = sizes.pairs < 500 * sizes.tokens
    assert is_long.any()
    assert chains.ladder.has_upper[is_long].all()
    assert not chains.ladder.has_upper[is_short].any()


def long_problem() -> Problem:
    """Long sequences on stages that hold a part of them."""
    profile = analytic_profile(read_model("llama-7b"), "a800-80g")
    costs = toy_costs(profile, [8, 8, 8, 8], logits_tokens=1024)
    problem = toy_problem([1], [1])
    limits = roomy_limits(costs, 45 * 2**30)
    pipeline = replace(problem.pipeline, costs=costs, limits=limits, context_tokens=65_536)
    lengths = [65_536, 50_000, 30_000, 20_000, 12_000, 4_000]
    return Problem(pipeline, toy_sequences(lengths), tuple(range(len(lengths))))


def test_the_menu_wins_where_memory_is_short_and_sequences_are_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = long_problem()
    found = plan_alone(problem, SearchSpace())
    assert isinstance(found, Schedule)
    recompute = found.chains.recompute(found.levels)
    assert recompute.keep_attention.sum() > 0
    for module in (search, longest_first):
        monkeypatch.setattr(module, "whole_menu", inputs_only)
    without = plan_alone(problem, SearchSpace())
    assert isinstance(without, Schedule)
    assert found.makespan_s < 0.97 * without.makespan_s


def test_rivals_keep_only_inputs_and_epp_plans_theirs_with_the_whole_menu() -> None:
    problem = long_problem()
    rival = plan_paper(problem)
    assert isinstance(rival, Schedule)
    assert rival.levels.any()
    assert not rival.chains.recompute(rival.levels).keep_attention.any()
    on_menu = epp._on_menu(rival)
    assert isinstance(on_menu, Schedule)
    assert on_menu.chains.recompute(on_menu.levels).keep_attention.any()
    assert on_menu.makespan_s <= rival.makespan_s
    assert on_menu.search == rival.search
    best = plan_epp(problem)
    assert isinstance(best, Schedule)
    assert best.makespan_s <= on_menu.makespan_s
