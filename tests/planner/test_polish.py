"""Counts for the makespan: never slower, within memory, on small cases the best.

That holds whatever the solvers are allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from infinipipe.aliases import Ints
from infinipipe.costs import CostedChunks, StageMemory
from infinipipe.planner.passes import recompute_program as polish_module
from infinipipe.planner.passes.ladder import Ladder, inputs_only, whole_menu
from infinipipe.planner.passes.order import Window, windowed_order
from infinipipe.planner.passes.polish import Solved, polish
from infinipipe.planner.passes.schedule import (
    CostedChains,
    Schedule,
    fit_schedule,
    fixed_schedule,
    make_replica,
    order_memories,
    price_chains,
    simulate_schedule,
)
from infinipipe.planner.policies.paper import plan_paper
from infinipipe.planner.problem import Problem
from tests.planner.toys import cut, in_whole, toy_problem

LENGTHS = st.lists(st.integers(2, 30), min_size=2, max_size=5)
LAYERS = st.lists(st.integers(1, 3), min_size=1, max_size=3)
ROOM = st.floats(0.02, 0.95)
WINDOWS = st.sampled_from(["adaptive", "uniform"])
EXACT, PROVED = 1 + 1e-9, 1 + 1e-6


MakeLadder = Callable[[CostedChunks], Ladder]
LADDERS = st.sampled_from([inputs_only, whole_menu])


def ordered(
    problem: Problem, parts: int, window: Window, make_ladder: MakeLadder = inputs_only
) -> tuple[CostedChains, tuple[StageMemory, ...]]:
    chunks, _, _ = cut(problem, parts, 1000, even=True)
    num_stages = problem.pipeline.num_stages
    leads = windowed_order(chunks, num_stages, window, num_stages)
    chains = price_chains(problem, chunks, make_ladder)
    return chains, order_memories(problem, chains, leads)


def tight_problem(
    lengths: list[int], layers: list[int], parts: int, room: float, window: Window
) -> Problem:
    """Give every stage what it takes between recompute of everything (a room of 0) and of nothing.

    The latter is a room of 1.
    """
    roomy = toy_problem(lengths, layers, 0)
    least, most = 0.0, 0.0
    for memory, static in zip(ordered(roomy, parts, window)[1], roomy.pipeline.limits, strict=True):
        none = np.zeros(len(memory.activation_bytes), dtype=np.int64)
        least = max(least, float(memory.during(in_whole(none + memory.num_layers)).max()) - static)
        most = max(most, float(memory.during(in_whole(none)).max()) - static)
    return toy_problem(lengths, layers, least + room * (most - least) + 2)


def swept(
    lengths: list[int],
    layers: list[int],
    parts: int,
    room: float,
    window: Window,
    make_ladder: MakeLadder = inputs_only,
) -> Schedule:
    problem = tight_problem(lengths, layers, parts, room, window)
    schedule = fit_schedule(problem, *ordered(problem, parts, window, make_ladder))
    assert isinstance(schedule, Schedule)
    return schedule


def all_layers(problem: Problem, memories: SequenceOf[StageMemory]) -> Ints:
    layers = [[stage.num_layers] for stage in problem.pipeline.stages]
    return np.repeat(np.array(layers, dtype=np.int64), len(memories[0].activation_bytes), axis=1)


def highest(schedule: Schedule) -> Ints:
    return schedule.chains.ladder.num_rungs(schedule.chains.num_layers)


def peak_bytes(schedule: Schedule, memory: StageMemory, levels: Ints) -> float:
    recompute = schedule.chains.ladder.recompute(levels, memory.num_layers)
    return float(memory.during(recompute).max())


def fits(schedule: Schedule, levels: Ints) -> bool:
    limits = schedule.problem.pipeline.limits
    return all(
        peak_bytes(schedule, memory, row) <= limit
        for memory, row, limit in zip(schedule.memories, levels, limits, strict=True)
    )


def best_makespan(schedule: Schedule) -> float:
    """Try all levels of a program: those that fit, and that no lower levels undercut."""
    choices = []
    limits = schedule.problem.pipeline.limits
    for memory, limit, most in zip(schedule.memories, limits, highest(schedule), strict=True):
        levels = np.array(list(product(*(range(rungs + 1) for rungs in most))))
        fitting = [row for row in levels if peak_bytes(schedule, memory, row) <= limit]
        choices.append(
            [
                row
                for row in fitting
                if not any((o <= row).all() and (o < row).any() for o in fitting)
            ]
        )
    return min(
        simulate_schedule(
            schedule.problem, schedule.chains, schedule.memories, np.array(rows)
        ).makespan_s
        for rows in product(*choices)
    )


def check(given_one: Schedule, found: Schedule, solved: Solved | None) -> None:
    """Check all that must hold however far the solvers got."""
    assert found.makespan_s <= given_one.makespan_s
    assert fits(found, found.levels)
    assert found.chains is given_one.chains
    assert found.memories is given_one.memories
    assert ((found.levels >= 0) & (found.levels <= highest(found))).all()
    again = simulate_schedule(found.problem, found.chains, found.memories, found.levels)
    assert found.makespan_s == again.makespan_s
    limits = found.problem.pipeline.limits
    peaks = [stage.peak_bytes for stage in make_replica(found).predicted]
    assert all(peak <= limit for peak, limit in zip(peaks, limits, strict=True))
    if solved is not None and solved.gap is not None:
        assert solved.gap >= 0


@example([2, 8, 13], [1], 3, 0.5, "uniform", whole_menu)
@settings(max_examples=30)
@given(LENGTHS, LAYERS, st.integers(2, 4), ROOM, WINDOWS, LADDERS)
def test_small_cases_are_solved_and_brute_force_confirms_it(
    lengths: list[int],
    layers: list[int],
    parts: int,
    room: float,
    window: Window,
    make_ladder: MakeLadder,
) -> None:
    schedule = swept(lengths, layers, parts, room, window, make_ladder)
    assume(schedule.levels.size <= 12)
    # As many as brute force tries within seconds.
    assume(np.prod(1 + highest(schedule), axis=1).max() <= 300)
    found, solved = polish(schedule)
    check(schedule, found, solved)
    best = best_makespan(schedule)
    if solved is None:
        assert schedule.levels.sum() == 0
        assert best == pytest.approx(schedule.makespan_s)
    else:
        assert solved.status in ("Optimal", "optimal", "gaplimit")
        assert solved.gap is not None
        # With two kinds of rungs the program's rows of memory are a relaxation: what it calls best
        # may not fit, and then the gap says how far what fits may be from it.
        allowed = 1.0 if make_ladder is inputs_only else 1 + solved.gap
        assert found.makespan_s <= best * EXACT * allowed
        assert found.makespan_s / (1 + solved.gap) <= best * PROVED


@settings(max_examples=20)
@given(
    st.lists(st.integers(2, 40), min_size=2, max_size=8),
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.integers(2, 16),
    ROOM,
    WINDOWS,
    LADDERS,
    st.integers(0, 2**32),
)
def test_no_levels_that_fit_beat_the_bound(
    lengths: list[int],
    layers: list[int],
    parts: int,
    room: float,
    window: Window,
    make_ladder: MakeLadder,
    seed: int,
) -> None:
    schedule = swept(lengths, layers, parts, room, window, make_ladder)
    found, solved = polish(schedule)
    check(schedule, found, solved)
    if solved is None:
        return
    assert solved.gap is not None
    bound = found.makespan_s / (1 + solved.gap)
    generator, most = np.random.default_rng(seed), highest(schedule)
    for share in (0.3, 0.7, 0.95):
        # As much again as chance wants, and what is missing besides.
        wanted = generator.binomial(most, share)
        if fits(schedule, wanted):
            other = simulate_schedule(schedule.problem, schedule.chains, schedule.memories, wanted)
            assert bound <= other.makespan_s * PROVED


def test_the_sweep_is_not_the_best_and_the_best_is_found() -> None:
    # The sweep drops what is in flight longest for its bytes: the last chunks, whose B end the
    # step.
    schedule = swept([7, 27, 6, 12, 17], [2, 2, 2], 3, 0.49, "uniform")
    best = best_makespan(schedule)
    assert schedule.makespan_s > 1.1 * best
    found, solved = polish(schedule)
    assert found.makespan_s <= best * EXACT
    assert found.levels.sum() > 0
    assert solved is not None
    assert solved.gap == pytest.approx(0.0, abs=1e-6)


def test_the_papers_own_order_gains() -> None:
    problem = tight_problem([40, 30, 20, 10, 10, 8, 6, 6], [3, 3, 3], 12, 0.1, "uniform")
    schedule = plan_paper(problem)
    assert isinstance(schedule, Schedule)
    found, solved = polish(schedule)
    check(schedule, found, solved)
    assert found.makespan_s < 0.99 * schedule.makespan_s


@pytest.mark.parametrize("most_iterations", [0, 1, 20_000])
@pytest.mark.parametrize("most_nodes", [0, 1])
@pytest.mark.parametrize("parts", [12, 48])
def test_solvers_cut_short_leave_a_valid_plan_and_say_so(
    most_iterations: int, most_nodes: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polish_module, "_MOST_ITERATIONS", most_iterations)
    monkeypatch.setattr(polish_module, "_MOST_NODES", most_nodes)
    schedule = swept([40, 30, 20, 20, 10], [3, 3, 3], parts, 0.1, "uniform")
    found, solved = polish(schedule)
    check(schedule, found, solved)
    assert solved is not None
    assert solved.solver == ("SCIP" if parts == 12 else "HiGHS")
    if solved.solver == "HiGHS" and most_iterations < 2:
        assert solved == Solved("HiGHS", "Iteration limit reached", None)
    if solved.solver == "SCIP" and most_nodes == 0:
        assert solved.status == "nodelimit"
        assert (solved.gap is None) == (most_iterations < 2)


def test_without_recompute_there_is_nothing_to_do() -> None:
    problem = toy_problem([20] * 4, [2, 2])
    schedule = fit_schedule(problem, *ordered(problem, 8, "uniform"))
    assert isinstance(schedule, Schedule)
    assert polish(schedule) == (schedule, None)


def test_recompute_that_memory_does_not_ask_for_goes() -> None:
    problem = toy_problem([20] * 4, [2, 2])
    chains, memories = ordered(problem, 8, "uniform")
    schedule = fixed_schedule(problem, chains, memories, all_layers(problem, memories))
    assert isinstance(schedule, Schedule)
    found, solved = polish(schedule)
    assert found.levels.sum() == 0
    assert solved == Solved("HiGHS", "Optimal", pytest.approx(0.0, abs=1e-6))


@pytest.mark.parametrize("limit", ["_MOST_CELLS", "_MOST_ENTRIES"])
def test_too_many_chunks_for_a_solver_are_still_searched(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polish_module, limit, 0)
    schedule = swept([7, 27, 6, 12, 17], [2, 2, 2], 3, 0.49, "uniform")
    found, solved = polish(schedule)
    check(schedule, found, solved)
    assert solved is None
    assert found.makespan_s < 0.95 * schedule.makespan_s


def test_the_same_again() -> None:
    def counts() -> SequenceOf[SequenceOf[int]]:
        found, solved = polish(swept([40, 30, 20, 20, 10], [3, 3, 3], 12, 0.2, "uniform"))
        return [*found.levels.tolist(), [repr(solved)]]

    assert counts() == counts()
