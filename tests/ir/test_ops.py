"""The table of ops is whole, and says the same in all its columns."""

from __future__ import annotations

import pytest

from infinipipe.ir import TRAITS, Direction, Held, OpKind
from infinipipe.ir.ops import COMPLETE, kinds_that_travel

SETS = [pytest.param(kinds, id="".join(kinds)) for kinds in COMPLETE]


def test_every_kind_has_a_row_and_a_place() -> None:
    assert list(TRAITS) == list(OpKind)
    assert {kind for kinds in COMPLETE for kind in kinds} == set(OpKind)
    names = [traits.name for traits in TRAITS.values()]
    assert len(set(names)) == len(names)
    assert {traits.opens for traits in TRAITS.values()} >= set(Held)
    assert {traits.closes for traits in TRAITS.values()} >= set(Held)


@pytest.mark.parametrize("kinds", SETS)
def test_what_one_op_opens_a_later_one_closes(kinds: tuple[OpKind, ...]) -> None:
    held: list[Held] = []
    for kind in kinds:
        traits = TRAITS[kind]
        if traits.closes is not None:
            held.remove(traits.closes)
        if traits.opens is not None:
            held.append(traits.opens)
    assert held == []


@pytest.mark.parametrize("kinds", SETS)
def test_what_an_op_needs_comes_before_it(kinds: tuple[OpKind, ...]) -> None:
    assert len(set(kinds)) == len(kinds)
    for position, kind in enumerate(kinds):
        needed = TRAITS[kind].needs
        assert (needed is None) == (position == 0)
        if needed is not None:
            assert needed in kinds[:position]


@pytest.mark.parametrize("kinds", SETS)
def test_one_op_recomputes(kinds: tuple[OpKind, ...]) -> None:
    assert sum(TRAITS[kind].recomputes for kind in kinds) == 1


@pytest.mark.parametrize("kinds", SETS)
def test_one_activation_goes_down_and_one_gradient_up(kinds: tuple[OpKind, ...]) -> None:
    travels = [TRAITS[kind].travels for kind in kinds]
    assert travels.count(Direction.DOWN) == 1
    assert travels.count(Direction.UP) == 1


def test_sets_share_only_what_all_of_them_have() -> None:
    """Else a program would not say which set it means."""
    always = set.intersection(*map(set, COMPLETE))
    rest = [kind for kinds in COMPLETE for kind in kinds if kind not in always]
    assert always
    assert len(set(rest)) == len(rest)


def test_kinds_by_direction() -> None:
    by_direction = [kinds_that_travel(direction) for direction in Direction]
    assert sorted(kind for kinds in by_direction for kind in kinds) == sorted(OpKind)
    assert kinds_that_travel(Direction.DOWN) == (OpKind.FORWARD,)
    assert kinds_that_travel(Direction.UP) == (OpKind.BACKWARD, OpKind.BACKWARD_INPUT)
