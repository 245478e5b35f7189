"""Orders shaped by memory never deadlock, respect chains, and stay within memory if they can."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from infinipipe.aliases import Ints
from infinipipe.costs import PackedProgram
from infinipipe.ir import Op
from infinipipe.ir.rules.deadlock import find_deadlock
from infinipipe.planner.passes.chunking import Chunks
from infinipipe.planner.passes.in_flight import Warmup, connect_stages, forwards_within_memory
from infinipipe.planner.passes.order import adaptive_window, backward_order
from infinipipe.planner.passes.schedule import price_chains
from tests.planner.toys import cut, toy_problem


def programs(forwards_before: Ints, chunks: Chunks) -> list[tuple[Op, ...]]:
    backwards = backward_order(chunks)
    return [PackedProgram.interleave(row, backwards).unpack() for row in forwards_before]


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=10).map(tuple),
    st.integers(1, 6),
    st.integers(0, 2**32),
    st.integers(1, 12),
)
def test_whatever_is_wanted_ends_even_with_blocking_sends(
    chains: tuple[int, ...], num_stages: int, seed: int, width: int
) -> None:
    chunks = Chunks((), chains)
    ends = np.array(chunks.chain_ends)
    generator = np.random.default_rng(seed)
    wanted = ends + generator.integers(0, width, (num_stages, len(ends)))
    leads = connect_stages(np.minimum(np.maximum.accumulate(wanted, axis=1), len(ends)), ends)
    assert np.all(leads >= ends)
    assert np.all(np.diff(leads, axis=1) >= 0)
    assert np.all(np.diff(leads, axis=0) <= 0)
    assert not find_deadlock(programs(leads, chunks))


def test_bursts_get_ready_late_for_a_long_chain() -> None:
    chunks = Chunks((), (1, 1, 1, 4))
    assert adaptive_window(chunks, 1).tolist() == [4, 5, 6, 7, 7, 7, 7]
    assert adaptive_window(chunks, 2).tolist() == [1, 3, 5, 7, 7, 7, 7]


def test_memory_holds_the_first_stages_back() -> None:
    firsts = []
    for room_bytes in (10**9, 180_000, 172_000, 1):
        problem = toy_problem([10] * 12, [2, 2, 2], room_bytes)
        chunks, _, _ = cut(problem, 12)
        chains = price_chains(problem, chunks)
        order = forwards_within_memory(problem.pipeline, chains, Warmup(2.0, 1), np.zeros(3))
        firsts.append(int(order[0, 0]))
    assert firsts[0] == 5
    assert firsts[-1] == 1
    assert firsts == sorted(firsts, reverse=True)
    assert len(set(firsts)) > 2
