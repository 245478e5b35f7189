"""Orders: golden programs, and freedom from deadlock whatever the chains."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinipipe.ir import show_program
from infinipipe.ir.rules.deadlock import find_deadlock
from infinipipe.planner.passes.chunking import Chunks
from infinipipe.planner.passes.order import (
    adaptive_window,
    backward_order,
    flushed_order,
    windowed_order,
)
from tests.planner.toys import TOY_WINDOWS, ToyWindow, toy_leads, toy_programs


def shown(
    chains: tuple[int, ...], num_stages: int, window: ToyWindow, depth: int = 99
) -> list[str]:
    programs = toy_programs(chains, num_stages, window, depth)
    return [show_program(stage, program) for stage, program in enumerate(programs)]


def test_whole_sequences_run_1f1b() -> None:
    assert shown((1, 1, 1), 2, "adaptive") == ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]
    assert shown((1, 1, 1), 2, "uniform") == shown((1, 1, 1), 2, "adaptive")


def test_slices_go_backwards_through_their_chain() -> None:
    assert backward_order(Chunks((), (3, 2, 1))).tolist() == [2, 1, 0, 4, 3, 5]
    assert shown((2, 2), 1, "adaptive") == ["0F0 0F1 0B1 0F2 0B0 0F3 0B3 0B2"]
    assert shown((2, 2), 1, "serial") == ["0F0 0F1 0B1 0B0 0F2 0F3 0B3 0B2"]


def test_the_window_shrinks_only_if_adaptive() -> None:
    assert shown((3, 1, 1), 1, "adaptive") == ["0F0 0F1 0F2 0B2 0B1 0B0 0F3 0B3 0F4 0B4"]
    assert shown((3, 1, 1), 1, "uniform") == ["0F0 0F1 0F2 0B2 0F3 0B1 0F4 0B0 0B3 0B4"]


def test_depth_limits_how_far_a_stage_runs_ahead() -> None:
    ahead = shown((1,) * 4, 4, "adaptive", 1)
    assert ahead[0] == "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3"
    assert ahead[2] == ahead[0].replace("0F", "2F").replace("0B", "2B")
    assert ahead[3] == "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3"
    assert shown((1,) * 4, 4, "adaptive", 0)[0] == "0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3"


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=12).map(tuple),
    st.integers(1, 6),
    st.sampled_from(TOY_WINDOWS),
    st.integers(0, 8),
)
def test_never_a_deadlock_even_with_blocking_sends(
    chains: tuple[int, ...], num_stages: int, window: ToyWindow, depth: int
) -> None:
    # Uniform windows are the paper's, whose chains come longest first.
    ordered = tuple(sorted(chains, reverse=True))
    assert not find_deadlock(toy_programs(ordered, num_stages, window, depth))


@pytest.mark.parametrize("window", TOY_WINDOWS)
def test_no_chunks_no_ops(window: ToyWindow) -> None:
    assert toy_leads(Chunks((), ()), 3, window, 3).shape == (3, 0)
    assert backward_order(Chunks((), ())).tolist() == []


def test_a_round_ends_with_the_chain_that_its_even_share_ends_in() -> None:
    chunks = Chunks((), (1, 4, 1, 2))
    assert flushed_order(chunks, 2, 1).tolist() == [[8] * 8] * 2
    assert flushed_order(chunks, 1, 2).tolist() == [[5] * 5 + [8] * 3]
    # Both the first and the second quarter end in the chain of four.
    assert flushed_order(chunks, 1, 4).tolist() == [[5] * 5 + [6] + [8] * 2]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=12).map(tuple), st.integers(1, 4))
def test_the_window_is_the_smallest_with_no_more_than_a_burst_between_two_b(
    chains: tuple[int, ...], burst: int
) -> None:
    chunks = Chunks((), chains)
    expected = chunks.chain_ends.tolist()
    for place in range(len(expected) - 2, -1, -1):
        expected[place] = max(expected[place], expected[place + 1] - burst)
    assert adaptive_window(chunks, burst).tolist() == expected


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=8).map(tuple),
    st.integers(1, 5),
    st.sampled_from(["adaptive", "uniform"]),
)
def test_stages_run_ahead_one_by_one(
    chains: tuple[int, ...], num_stages: int, window: ToyWindow
) -> None:
    leads = windowed_order(Chunks((), chains), num_stages, window, num_stages)
    num_chunks = sum(chains)
    assert leads.shape == (num_stages, num_chunks)
    for earlier, later in pairwise(leads.tolist()):
        assert earlier == [min(lead + 1, num_chunks) for lead in later]
