"""The simulator against known closed forms, and against networkx's longest path on random plans."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import networkx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinipipe.aliases import Floats
from infinipipe.costs import PackedProgram, Timeline
from infinipipe.costs import simulate as simulate_packed
from infinipipe.ir import TRAITS, Direction, Op, OpKind
from tests.planner.toys import TOY_WINDOWS, ToyWindow, toy_programs
from tests.plans import parse_program, split_some


def simulate(
    programs: SequenceOf[SequenceOf[Op]],
    seconds: SequenceOf[SequenceOf[float]],
    transfer_s: SequenceOf[SequenceOf[float]],
) -> Timeline:
    """Simulate programs of the IR."""
    packed = [PackedProgram.pack(program) for program in programs]
    arrays: list[Floats] = [np.array(row, dtype=np.float64) for row in seconds]
    return simulate_packed(packed, arrays, np.array(transfer_s, dtype=np.float64))


@pytest.mark.parametrize("num_stages", [1, 2, 4, 8])
@pytest.mark.parametrize("num_chunks", [1, 3, 20])
def test_1f1b_takes_the_textbook_time(num_stages: int, num_chunks: int) -> None:
    programs = toy_programs((1,) * num_chunks, num_stages, "adaptive", num_stages)
    seconds = [
        [1.0 if op.kind == OpKind.FORWARD else 2.0 for op in program] for program in programs
    ]
    timeline = simulate(programs, seconds, [[0.0] * num_chunks] * (num_stages - 1))
    assert timeline.makespan_s == 3 * (num_chunks + num_stages - 1)
    assert [timeline.busy_s(stage) for stage in range(num_stages)] == [3 * num_chunks] * num_stages


def test_transfers_and_blocked_sends_by_hand() -> None:
    # Stage 0 hands over F1 when F0 has arrived, at 6, and waits for that before F2. Then stage 1
    # starts F0.
    programs = [
        parse_program(0, "0F0 0F1 0F2 0B0 0B1 0B2"),
        parse_program(1, "1F0 1B0 1F1 1B1 1F2 1B2"),
    ]
    seconds = [[1.0] * 6, [2.0, 4.0] * 3]
    timeline = simulate(programs, seconds, [[5.0] * 3])
    assert timeline.start_s[1][:3].tolist() == [6.0, 8.0, 12.0]
    # F2 is handed over when F1 has arrived, at 11; B0's gradient is there at 17.
    assert timeline.start_s[0][:4].tolist() == [0.0, 1.0, 6.0, 17.0]


def test_weight_gradients_travel_nowhere() -> None:
    programs = [parse_program(0, "0F0 0I0 0W0"), parse_program(1, "1F0 1I0 1W0")]
    timeline = simulate(programs, [[1.0] * 3] * 2, [[0.5]])
    assert timeline.start_s[0].tolist() == [0.0, 4.0, 5.0]
    assert timeline.start_s[1].tolist() == [1.5, 2.5, 3.5]


def test_a_deadlock_is_our_fault() -> None:
    programs = [parse_program(0, "0B0 0F0"), parse_program(1, "1F0 1B0")]
    with pytest.raises(AssertionError, match="deadlock"):
        simulate(programs, [[1.0] * 2] * 2, [[0.0]])


PLANS = st.tuples(
    st.lists(st.integers(1, 4), min_size=1, max_size=6).map(tuple),
    st.integers(1, 5),
    st.sampled_from(TOY_WINDOWS),
    st.integers(0, 5),
    st.integers(0, 2**32),
)


@pytest.mark.parametrize("split", [False, True])
@given(plan=PLANS)
def test_equals_the_longest_path(
    split: bool, plan: tuple[tuple[int, ...], int, ToyWindow, int, int]
) -> None:
    chains, num_stages, window, depth, seed = plan
    programs = toy_programs(chains, num_stages, window, depth)
    generator = np.random.default_rng(seed)
    if split:
        programs = [split_some(program, generator) for program in programs]
    seconds = [
        generator.integers(1, 9, len(program)).astype(float).tolist() for program in programs
    ]
    transfer_s = generator.integers(0, 6, (num_stages - 1, sum(chains))).astype(float).tolist()
    timeline = simulate(programs, seconds, transfer_s)
    expected = longest_path(programs, seconds, transfer_s)
    for stage in range(num_stages):
        assert timeline.start_s[stage].tolist() == expected.start_s[stage].tolist()
        assert timeline.end_s[stage].tolist() == expected.end_s[stage].tolist()


def longest_path(
    programs: list[tuple[Op, ...]], seconds: list[list[float]], transfer_s: list[list[float]]
) -> Timeline:
    """Lay the simulator's rules out as a graph of events; find the earliest time of each."""
    graph = networkx.DiGraph()
    for stage, program in enumerate(programs):
        add_stage(graph, stage, program, seconds[stage])
    last = len(programs) - 1
    for stage, program in enumerate(programs):
        for direction in (1, -1):
            if 0 <= stage + direction <= last:
                chunks = [op.chunk for op in program if TRAITS[op.kind].travels == direction]
                edge = min(stage, stage + direction)
                add_channel(graph, stage, direction, chunks, transfer_s[edge])
    earliest: dict[object, float] = {}
    for node in networkx.topological_sort(graph):
        before = graph.in_edges(node, data="seconds")
        earliest[node] = max((earliest[source] + wait for source, _, wait in before), default=0.0)
    return Timeline(
        start_s=tuple(
            np.array([earliest["start", s, p] for p in range(len(o))])
            for s, o in enumerate(programs)
        ),
        end_s=tuple(
            np.array([earliest["end", s, p] for p in range(len(o))]) for s, o in enumerate(programs)
        ),
    )


def add_stage(
    graph: networkx.DiGraph, stage: int, program: tuple[Op, ...], seconds: list[float]
) -> None:
    counts = {1: 0, -1: 0}
    for position, op in enumerate(program):
        direction = TRAITS[op.kind].travels
        graph.add_edge(
            ("start", stage, position), ("end", stage, position), seconds=seconds[position]
        )
        number = counts.get(direction, 0)
        free: tuple[object, ...] = ("end", stage, position)
        if direction != Direction.STAY:
            graph.add_edge(
                ("begun", stage, direction, number), ("start", stage, position), seconds=0.0
            )
            graph.add_edge(
                ("start", stage, position), ("consumed", stage, direction, number), seconds=0.0
            )
            free = ("handed", stage, direction, number)
            graph.add_edge(("end", stage, position), free, seconds=0.0)
            counts[direction] += 1
        graph.add_edge(free, ("start", stage, position + 1), seconds=0.0)


def add_channel(
    graph: networkx.DiGraph, stage: int, direction: int, chunks: list[int], transfer_s: list[float]
) -> None:
    for number, chunk in enumerate(chunks):
        arrived = ("arrived", stage, direction, number)
        graph.add_edge(("handed", stage, direction, number), arrived, seconds=transfer_s[chunk])
        graph.add_edge(arrived, ("begun", stage + direction, direction, number), seconds=0.0)
        if number:
            consumed = ("consumed", stage + direction, direction, number - 1)
            graph.add_edge(consumed, arrived, seconds=transfer_s[chunk])
            graph.add_edge(
                ("arrived", stage, direction, number - 1),
                ("handed", stage, direction, number),
                seconds=0.0,
            )
