"""Replicas: sequences are dealt by work, and move from the slowest to the fastest."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinipipe.planner.passes.recompute import Shortage
from infinipipe.planner.policies import POLICIES
from infinipipe.planner.problem import Pipeline, Problem
from infinipipe.planner.replicas import (
    Hand,
    Members,
    deal,
    even_out,
    exchange,
    plan_replicas,
    sequence_seconds,
)
from tests.planner.toys import toy_pipeline, toy_sequences


def hands_of(
    pipeline: Pipeline, lengths: list[int], dealt: list[Members], policy: str = "1f1b"
) -> tuple[list[Hand], Callable[[Members], Hand | Shortage]]:
    """Return the plans of dealt sequences, and what plans others."""
    sequences = toy_sequences(lengths)

    def plan(members: Members) -> Hand | Shortage:
        result = POLICIES[policy](Problem(pipeline, sequences, members))
        return result if isinstance(result, Shortage) else Hand(members, result)

    hands = []
    for members in dealt:
        hand = plan(members)
        assert isinstance(hand, Hand)
        hands.append(hand)
    return hands, plan


def makespan(hands: list[Hand]) -> float:
    return max(hand.makespan_s for hand in hands)


def test_work_is_dealt_evenly() -> None:
    lengths = [300, 200, 160, 90, 80, 70, 60, 50, 40, 30, 20, 10]
    hands = deal(toy_pipeline([3, 3], num_replicas=3), toy_sequences(lengths))
    assert sorted(member for hand in hands for member in hand) == list(range(12))
    assert hands[0] == (0,)


def test_a_straggler_gives_to_the_fastest() -> None:
    lengths = [20] * 16
    pipeline = toy_pipeline([3, 3], num_replicas=3)
    dealt = [tuple(range(10)), tuple(range(10, 14)), (14, 15)]
    hands, plan = hands_of(pipeline, lengths, dealt)
    before = makespan(hands)
    assert even_out(hands, plan)
    # About half of what they differ by: 4 of 8.
    assert [len(hand.members) for hand in hands] == [6, 4, 6]
    assert makespan(hands) < 0.75 * before
    assert sorted(member for hand in hands for member in hand.members) == list(range(16))


def test_a_swap_helps_where_no_move_does() -> None:
    # 90 and 60 against 70 and 50: only 90 for 70 or 60 for 50 brings them closer.
    lengths = [90, 60, 70, 50]
    pipeline = toy_pipeline([3, 3], num_replicas=2)
    hands, _ = hands_of(pipeline, lengths, [(0, 1), (2, 3)])
    gap_s = hands[0].makespan_s - hands[1].makespan_s
    swapped = exchange(hands[0], hands[1], gap_s / 2)
    assert swapped in [((1, 2), (0, 3)), ((0, 3), (1, 2))]


def test_nothing_moves_where_nothing_comes_closer() -> None:
    lengths = [100, 20]
    pipeline = toy_pipeline([3, 3], num_replicas=2)
    hands, plan = hands_of(pipeline, lengths, [(0,), (1,)])
    before = list(hands)
    assert not even_out(hands, plan)
    assert hands == before


def test_what_is_slower_or_does_not_fit_is_not_kept() -> None:
    lengths = [20] * 12
    pipeline = toy_pipeline([3, 3], num_replicas=2)
    hands, _ = hands_of(pipeline, lengths, [tuple(range(9)), (9, 10, 11)])
    before = list(hands)
    slowest = hands[0]
    assert not even_out(hands, lambda members: Shortage(0, 2.0, 1.0))
    assert not even_out(hands, lambda members: slowest)
    assert hands == before


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 120), min_size=1, max_size=14), st.integers(1, 3))
def test_a_step_is_never_slower_than_as_it_was_dealt(lengths: list[int], replicas: int) -> None:
    pipeline = toy_pipeline([3, 3], num_replicas=replicas)
    sequences = toy_sequences(lengths)
    dealt = deal(pipeline, sequences)
    found = plan_replicas(pipeline, POLICIES["1f1b"], sequences)
    assert isinstance(found, list)
    members = [member for hand in found for member in hand.members]
    assert sorted(members) == list(range(len(lengths)))
    first, _ = hands_of(pipeline, lengths, [hand for hand in dealt if hand])
    assert makespan(found) <= makespan(first)
    if replicas == 1:
        assert [hand.members for hand in found] == dealt


def test_a_shortage_is_that_of_a_replica() -> None:
    pipeline = toy_pipeline([3, 3], room_bytes=1000, num_replicas=2)
    assert isinstance(plan_replicas(pipeline, POLICIES["epp"], toy_sequences([30, 40])), Shortage)


@pytest.mark.parametrize("policy", ["epp", "1f1b"])
def test_seconds_of_sequences_add_up_to_the_busiest_stage(policy: str) -> None:
    lengths = [300, 20, 45, 7]
    hands, _ = hands_of(toy_pipeline([2, 4]), lengths, [(0, 1, 2, 3)], policy)
    seconds = sequence_seconds(hands[0])
    schedule = hands[0].schedule
    assert schedule is not None
    busiest_s = max(schedule.timeline.busy_s(stage) for stage in (0, 1))
    assert sum(seconds.values()) == pytest.approx(busiest_s)
    assert sorted(seconds, key=seconds.__getitem__) == [3, 1, 2, 0]
    assert sequence_seconds(Hand((), None)) == {}
