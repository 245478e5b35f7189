"""Orders shaped by memory never deadlock, respect chains, and stay within memory wherever that is possible."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from infinipipe.ir import Op
from infinipipe.ir.rules.deadlock import find_deadlock
from infinipipe.planner.passes.chunking import Chunks
from infinipipe.planner.passes.in_flight import Shape, connect_leads, memory_leads
from infinipipe.planner.passes.order import (
    adaptive_window,
    backward_order,
    interleave,
    make_program,
)
from infinipipe.planner.passes.schedule import price
from infinipipe.planner.problem import Ints
from tests.planner.toys import cut, toy_problem


def programs(leads: Ints, chunks: Chunks) -> list[tuple[Op, ...]]:
    columns = [interleave(lead, backward_order(chunks)) for lead in leads]
    return [make_program(directions.tolist(), numbers.tolist()) for directions, numbers in columns]


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
    leads = connect_leads(np.minimum(np.maximum.accumulate(wanted, axis=1), len(ends)), ends)
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
        firsts.append(
            int(
                memory_leads(problem.pipeline, price(problem, chunks), Shape(2.0, 1), np.zeros(3))[
                    0, 0
                ]
            )
        )
    assert firsts[0] == 5
    assert firsts[-1] == 1
    assert firsts == sorted(firsts, reverse=True)
    assert len(set(firsts)) > 2
