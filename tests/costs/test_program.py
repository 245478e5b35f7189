"""Programs as arrays: they say what the IR's ops say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinipipe.costs import PackedProgram
from infinipipe.ir import TRAITS, Direction, Op, OpKind
from infinipipe.planner.passes.chunking import Chunks
from infinipipe.planner.passes.order import backward_order
from tests.costs.rounds import packed
from tests.planner.toys import TOY_WINDOWS, ToyWindow, toy_leads
from tests.plans import parse_program, split_backwards

OPS = st.lists(st.builds(Op, st.sampled_from(OpKind), st.integers(0, 99)), max_size=30)


@given(OPS)
def test_packing_loses_nothing(ops: list[Op]) -> None:
    program = PackedProgram.pack(ops)
    assert program.unpack() == tuple(ops)
    assert program.chunks.tolist() == [op.chunk for op in ops]
    assert program.travels.tolist() == [int(TRAITS[op.kind].travels) for op in ops]
    assert program.is_forward.tolist() == [op.kind == OpKind.FORWARD for op in ops]
    backwards = (OpKind.BACKWARD, OpKind.BACKWARD_INPUT)
    assert program.is_backward.tolist() == [op.kind in backwards for op in ops]
    for kind in OpKind:
        assert program.is_kind(kind).tolist() == [op.kind == kind for op in ops]


def test_directions_and_places_by_hand() -> None:
    program = packed("F1 F0 B0 I1 W1")
    down, up, stay = Direction.DOWN, Direction.UP, Direction.STAY
    assert program.travels.tolist() == [down, down, up, up, stay]
    assert program.activation_signs.tolist() == [1, 1, -1, -1, 0]
    assert program.forward_chunks.tolist() == [1, 0]
    assert program.backward_chunks.tolist() == [0, 1]
    assert program.forward_places.tolist() == [1, 0]
    assert program.backward_places.tolist() == [2, 3]
    assert program.has_input_weight
    assert not packed("F1 F0 B0 B1").has_input_weight


CHAINS = st.tuples(
    st.lists(st.integers(1, 4), min_size=1, max_size=6).map(tuple),
    st.integers(1, 5),
    st.sampled_from(TOY_WINDOWS),
)


@pytest.mark.parametrize("split", [False, True])
@given(given_one=CHAINS)
def test_places_are_where_each_chunks_ops_stand(
    split: bool, given_one: tuple[tuple[int, ...], int, ToyWindow]
) -> None:
    chains, num_stages, window = given_one
    chunks = Chunks((), chains)
    for row in toy_leads(chunks, num_stages, window, num_stages):
        whole = PackedProgram.interleave(row, backward_order(chunks)).unpack()
        ops = split_backwards(whole) if split else whole
        program = PackedProgram.pack(ops)
        assert program.has_input_weight == split
        kinds = (OpKind.FORWARD, OpKind.BACKWARD_INPUT if split else OpKind.BACKWARD)
        for kind, places in zip(
            kinds, (program.forward_places, program.backward_places), strict=True
        ):
            assert [ops[place] for place in places] == [
                Op(kind, chunk) for chunk in range(sum(chains))
            ]


def test_forwards_before_each_backward_by_hand() -> None:
    program = PackedProgram.interleave(np.array([2, 3, 3]), np.array([1, 0, 2]))
    assert program.unpack() == parse_program(0, "0F0 0F1 0B1 0F2 0B0 0B2")
    empty = np.zeros(0, dtype=np.int64)
    assert PackedProgram.interleave(empty, empty).unpack() == ()


@given(CHAINS)
def test_interleaving_puts_so_many_f_before_each_b(
    given_one: tuple[tuple[int, ...], int, ToyWindow],
) -> None:
    chains, num_stages, window = given_one
    chunks = Chunks((), chains)
    backwards = backward_order(chunks)
    for row in toy_leads(chunks, num_stages, window, num_stages):
        program = PackedProgram.interleave(row, backwards)
        assert program.forward_chunks.tolist() == list(range(sum(chains)))
        assert program.backward_chunks.tolist() == backwards.tolist()
        num_forwards = np.cumsum(program.is_forward)
        assert num_forwards[program.is_backward].tolist() == row.tolist()
