"""Quick bounds: none is above what any schedule takes, and each knows more than the one before."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinipipe.aliases import Ints
from infinipipe.costs import Work
from infinipipe.planner.passes.chunking import cut_chunks
from infinipipe.planner.passes.least import (
    least_in_order_s,
    least_of_size_s,
    least_with_levels_s,
)
from infinipipe.planner.passes.schedule import (
    Beaten,
    CostedChains,
    Schedule,
    fit_schedule,
    order_memories,
    price_chains,
    simulate_schedule,
)
from infinipipe.planner.policies import baselines, paper
from infinipipe.planner.policies.baselines import TOKENS
from infinipipe.planner.problem import Problem
from tests.planner.toys import ROUNDING, TOY_WINDOWS, ToyWindow, cut, toy_leads, toy_problem

LENGTHS = st.lists(st.integers(1, 200), min_size=1, max_size=10)
TIGHT = 1e6
"""Bytes for which six chunks of sixty tokens have to recompute."""
COUNTS = st.lists(st.integers(1, 3), min_size=1, max_size=4)


class Ordered(NamedTuple):
    """Chunks of a toy problem in some order."""

    problem: Problem
    chains: CostedChains
    order: Ints


def ordered(
    lengths: list[int], counts: list[int], room: float, parts: float, window: ToyWindow
) -> Ordered:
    problem = toy_problem(lengths, counts, room)
    chunks, _, _ = cut(problem, parts)
    order = toy_leads(chunks, len(counts), window, len(counts))
    return Ordered(problem, price_chains(problem, chunks), order)


@settings(deadline=None)
@given(
    lengths=LENGTHS,
    counts=COUNTS,
    tightness=st.sampled_from([0.5, 0.8, 1.2, 3.0]),
    parts=st.floats(1, 12),
    window=st.sampled_from(TOY_WINDOWS),
)
def test_no_schedule_undercuts_what_its_chunks_order_and_counts_tell(
    lengths: list[int], counts: list[int], tightness: float, parts: float, window: ToyWindow
) -> None:
    kept = toy_problem([1], counts).pipeline.costs.profile.bytes.layer_full_per_token
    room = tightness * kept * max(counts) * max(lengths)
    problem, chains, order = ordered(lengths, counts, room, parts, window)
    found = fit_schedule(problem, chains, order_memories(problem, chains, order))
    in_any_order = least_in_order_s(problem, chains, chains.chunks.chain_ends)
    in_order = least_in_order_s(problem, chains, order)
    assert (chains.least_s <= in_any_order).all()
    assert (in_any_order <= in_order).all()
    if isinstance(found, Schedule):
        with_counts = least_with_levels_s(chains, found.levels)
        assert (in_order <= with_counts * ROUNDING).all()
        assert with_counts.max() <= found.makespan_s * ROUNDING


def test_memory_that_forces_recompute_raises_the_bound_of_an_order() -> None:
    problem, chains, order = ordered([60] * 6, [3, 3], TIGHT, 6, "uniform")
    assert isinstance(
        fit_schedule(problem, chains, order_memories(problem, chains, order)), Schedule
    )
    assert least_in_order_s(problem, chains, order)[0] > 1.02 * chains.least_s[0]


@pytest.mark.parametrize("of_work", [True, False])
@settings(deadline=None)
@given(lengths=LENGTHS, counts=COUNTS, parts=st.floats(1, 400))
def test_no_chunks_undercut_what_their_size_tells(
    of_work: bool, lengths: list[int], counts: list[int], parts: float
) -> None:
    problem = toy_problem(lengths, counts)
    work: Work = problem.pipeline.costs.work if of_work else TOKENS
    target = float(work.whole(problem.lengths).sum()) / parts
    least_s = baselines._cut(problem, "", work, target, 10**6).least_s
    chains = price_chains(problem, cut_chunks(problem, work, target, 10**6))
    assert (least_s <= chains.least_s * ROUNDING).all()


@settings(deadline=None)
@given(lengths=LENGTHS, counts=COUNTS, number=st.integers(1, 40))
def test_no_slice_number_of_the_paper_undercuts_what_it_tells(
    lengths: list[int], counts: list[int], number: int
) -> None:
    problem = toy_problem(lengths, counts)
    number = min(number, max(lengths))
    made = paper.make_chains(problem, problem.pipeline.costs.work, number)
    chains = price_chains(problem, paper._join(made))
    assert (paper._least_s(problem, number) <= chains.least_s * ROUNDING).all()


def test_small_chunks_cost_their_overhead() -> None:
    problem = toy_problem([100, 100], [3, 3])
    small, large = (least_of_size_s(problem, 1, most) for most in (2, 64))
    assert (small > 1.1 * large).all()
    # What comes down first makes the second stage wait, and not the first one.
    waiting = least_of_size_s(problem, 50, 64)
    assert waiting[0] == large[0]
    assert waiting[1] > large[1] + 3 * 49


def test_what_the_first_stages_counts_make_too_slow_is_not_simulated() -> None:
    problem, chains, order = ordered([60] * 6, [3, 3], TIGHT, 6, "uniform")
    memories = order_memories(problem, chains, order)
    found = fit_schedule(problem, chains, memories)
    assert isinstance(found, Schedule)
    roomy = simulate_schedule(problem, chains, memories, np.zeros_like(found.levels))
    again = order_memories(problem, chains, order)
    beaten = fit_schedule(problem, chains, again, roomy)
    assert isinstance(beaten, Beaten)
    assert roomy.makespan_s <= beaten.at_least_s <= found.makespan_s
