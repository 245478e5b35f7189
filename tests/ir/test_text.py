"""The text form is exact."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinipipe.errors import InputError
from infinipipe.ir import Op, OpKind, show_op, show_program
from infinipipe.ir.text import excerpt, marked, show_kind
from tests.plans import parse_op, parse_program

NUMBERS = st.integers(0, 10**18 - 1)
OPS = st.builds(Op, st.sampled_from(OpKind), NUMBERS)


@given(NUMBERS, OPS)
def test_op_round_trips(stage: int, op: Op) -> None:
    assert parse_op(show_op(stage, op)) == (stage, op)


@given(st.integers(0, 99), st.lists(OPS))
def test_program_round_trips(stage: int, program: list[Op]) -> None:
    assert parse_program(stage, show_program(stage, program)) == tuple(program)


@pytest.mark.parametrize(
    "text",
    [
        "9" * 5000 + "F0",
        "",
        "F",
        "2F",
        "F0",
        "2X0",
        "2f0",
        " 2F0",
        "2F0 ",
        "2F0\n",
        "02F0",
        "2F00",
        "2F-1",
        "2F0 2F1",
        "2F\u0663",
        "2FB0",
    ],
)
def test_only_the_exact_form_parses(text: str) -> None:
    with pytest.raises(InputError, match="not an op") as caught:
        parse_op(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_program_refuses_other_stages_and_loose_spaces() -> None:
    with pytest.raises(ValueError, match="op 1F0 is of stage 1, in the program of stage 0"):
        parse_program(0, "0F0 1F0")
    with pytest.raises(InputError, match="not an op"):
        parse_program(0, "0F0  0F1")


def test_kinds_have_their_article() -> None:
    assert [show_kind(kind) for kind in OpKind] == ["an F", "a B", "an I", "a W"]


def test_an_excerpt_marks_the_position() -> None:
    program = parse_program(2, "2F0 2F1 2F2 2B2 2I1 2W1 2B0 2F3 2B3")
    assert excerpt(2, program, 4) == "... 2F1 2F2 2B2 >>2I1<< 2W1 2B0 2F3 ..."
    assert excerpt(2, program, 0) == ">>2F0<< 2F1 2F2 2B2 ..."
    assert excerpt(2, program, 8) == "... 2W1 2B0 2F3 >>2B3<<"
    assert excerpt(2, program, 9) == "... 2B0 2F3 2B3 >>end<<"
    assert excerpt(2, (), 0) == ">>end<<"


def test_a_mark_has_as_many_words_around_it_as_wanted() -> None:
    words = ["a", "b", "c", "d", "e"]
    assert marked(words, 2, radius=1) == "... b >>c<< d ..."
    assert marked(words, 0, radius=1) == ">>a<< b ..."
    assert marked(words, 4, radius=2) == "... c d >>e<<"
    assert marked(words, 2, radius=2) == "a b >>c<< d e"
