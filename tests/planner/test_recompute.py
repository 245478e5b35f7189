"""Recompute counts: they fit, they agree with bytes counted op by op, and they do not waste."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.split_backward import MemoryCursor
from infinipipe.costs import CostedChunks, Recompute, StageMemory
from infinipipe.planner.passes.ladder import Ladder, inputs_only, whole_menu
from infinipipe.planner.passes.recompute import fit_recompute
from infinipipe.planner.passes.schedule import CostedChains, order_memories, price_chains
from infinipipe.planner.problem import Problem
from tests.planner.toys import (
    TOY_WINDOWS,
    ToyWindow,
    cut,
    drawn_recompute,
    in_whole,
    toy_leads,
    toy_problem,
)

CASES = st.tuples(
    st.lists(st.integers(1, 40), min_size=1, max_size=8),
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
    st.integers(1, 12),
    st.booleans(),
    st.sampled_from(TOY_WINDOWS),
    st.integers(0, 2**32),
)


MakeLadder = Callable[[CostedChunks], Ladder]
LADDERS = st.sampled_from([inputs_only, whole_menu])


def ordered(
    problem: Problem,
    parts: int,
    even: bool,
    window: ToyWindow,
    make_ladder: MakeLadder = inputs_only,
) -> tuple[CostedChains, tuple[StageMemory, ...]]:
    chunks, _, _ = cut(problem, parts, 1000, even)
    num_stages = problem.pipeline.num_stages
    leads = toy_leads(chunks, num_stages, window, num_stages)
    chains = price_chains(problem, chunks, make_ladder)
    return chains, order_memories(problem, chains, leads)


def replayed(
    problem: Problem, chains: CostedChains, stage: int, memory: StageMemory, recompute: Recompute
) -> list[float]:
    """Return the bytes during each op, counted op by op."""
    program = memory.program.unpack()
    cursor = MemoryCursor(problem.pipeline.costs, stage, chains.costs, program, recompute)
    return [cursor.run(op) for op in program]


@given(CASES)
def test_bytes_equal_those_counted_op_by_op(
    case: tuple[list[int], list[int], int, bool, ToyWindow, int],
) -> None:
    lengths, counts, parts, even, window, seed = case
    problem = toy_problem(lengths, counts)
    chains, memories = ordered(problem, parts, even, window)
    generator = np.random.default_rng(seed)
    for stage, memory in enumerate(memories):
        recompute = drawn_recompute(generator, counts[stage], len(memory.activation_bytes))
        expected = replayed(problem, chains, stage, memory, recompute)
        assert memory.during(recompute).tolist() == pytest.approx(expected, rel=1e-12)


@given(CASES)
def test_no_counts_need_less_than_the_least(
    case: tuple[list[int], list[int], int, bool, ToyWindow, int],
) -> None:
    lengths, counts, parts, even, window, seed = case
    chains, memories = ordered(toy_problem(lengths, counts), parts, even, window)
    generator = np.random.default_rng(seed)
    for stage, memory in enumerate(memories):
        least, num_chunks = memory.least(), len(memory.activation_bytes)
        for _ in range(5):
            recompute = drawn_recompute(generator, counts[stage], num_chunks)
            assert np.all(memory.during(recompute) >= least - 1e-3)
        # Each op alone can do with it.
        for position, chunk in enumerate(memory.program.chunks.tolist()):
            others = np.full(num_chunks, counts[stage])
            own = [
                np.where(np.arange(num_chunks) == chunk, count, others)
                for count in range(counts[stage] + 1)
            ]
            assert min(memory.during(in_whole(each))[position] for each in own) == pytest.approx(
                least[position]
            )
        assert isinstance(fit_recompute(memory, chains.ladder, float(least.max()) - 2), float)


@given(CASES, LADDERS)
def test_fits_whenever_full_recompute_does(
    case: tuple[list[int], list[int], int, bool, ToyWindow, int], make_ladder: MakeLadder
) -> None:
    lengths, counts, parts, even, window, seed = case
    problem = toy_problem(lengths, counts)
    chains, memories = ordered(problem, parts, even, window, make_ladder)
    generator = np.random.default_rng(seed)
    for stage, memory in enumerate(memories):
        full = np.full(len(memory.activation_bytes), counts[stage])
        least, most = memory.during(in_whole(full)).max(), memory.during(in_whole(0 * full)).max()
        limit = least + generator.uniform(-0.1, 1.0) * (most - least)
        found = fit_recompute(memory, chains.ladder, limit)
        if isinstance(found, float):
            assert limit - 1 < least
            assert found > limit - 1
        else:
            assert np.all((found >= 0) & (found <= chains.ladder.num_rungs(counts[stage])))
            recompute = chains.ladder.recompute(found, counts[stage])
            assert max(replayed(problem, chains, stage, memory, recompute)) <= limit
            assert found.sum() == 0 or limit < most + 1


def test_nothing_is_recomputed_with_room() -> None:
    problem = toy_problem([20] * 6, [2, 2])
    chains, memories = ordered(problem, 12, True, "uniform")
    for memory in memories:
        nothing = in_whole(np.zeros(12, dtype=int))
        found = fit_recompute(memory, chains.ladder, memory.during(nothing).max() + 1)
        assert not isinstance(found, float)
        assert found.tolist() == [0] * 12


def test_a_steady_window_recomputes_no_more_than_it_must() -> None:
    # Four equal chunks are in flight and one of each chunk's two layers has to go.
    problem = toy_problem([8] * 40, [2, 2, 2, 2])
    chains, memories = ordered(problem, 40, True, "adaptive")
    memory, freed = memories[0], chains.costs.freed_per_layer_bytes[0]
    limit = memory.during(in_whole(np.zeros(40, dtype=int))).max() - 4 * freed + 1
    found = fit_recompute(memory, chains.ladder, limit)
    assert not isinstance(found, float)
    assert 38 <= found.sum() <= 42
