"""Orders of F and B: 1F1B with slices, as in InfiniPipe's scheduler (arXiv 2509.21275).

F runs chain by chain. B does as well, but backwards within a chain, because the B of a slice needs
the gradients of K and V from those of all later slices. With those two orders fixed, a stage's
program is given by how many F come before each B, in the order of B. An order is an array of that,
of shape (stages, chunks).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Literal

import numpy as np

from infinipipe.aliases import Ints
from infinipipe.planner.passes.chunking import Chunks

Window = Literal["uniform", "adaptive"]
"""How many chunks the last stage keeps in flight.

`uniform` keeps as many as the longest chain has (the paper's N_split), `adaptive` only as many as
the chains ahead need for F and B to alternate.
"""


def backward_order(chunks: Chunks) -> Ints:
    """Return the chunks in the order of B."""
    ends = chunks.chain_ends
    sizes = np.array(chunks.chains, dtype=np.int64)
    sizes_of_own_chain = np.repeat(sizes, sizes)
    starts = ends - sizes_of_own_chain
    places = np.arange(len(ends))
    # Mirrored within its chain: the place x of [start, end) holds start + end - 1 - x.
    lasts = ends - 1
    order: Ints = starts + lasts - places
    return order


def windowed_order(chunks: Chunks, num_stages: int, window: Window, depth: int) -> Ints:
    """Return for every stage how many F come before each B; shape (stages, chunks).

    A stage runs one F more ahead than the next one, up to `depth` more than the last.
    """
    last_stage = _last_windowed_order(chunks, window)
    num_chunks = len(last_stage)
    stages_after = _stages_after(num_stages)
    ahead = np.minimum(stages_after, depth)
    wanted = last_stage + ahead[:, None]
    order: Ints = np.minimum(wanted, num_chunks)
    return order


def _last_windowed_order(chunks: Chunks, window: Window) -> Ints:
    match window:
        case "uniform":
            longest = max(chunks.chains, default=0)
            num_chunks = sum(chunks.chains)
            places = np.arange(num_chunks)
            window_of_longest: Ints = places + longest
            return window_of_longest
        case "adaptive":
            return adaptive_window(chunks, 1)


def adaptive_window(chunks: Chunks, burst: int) -> Ints:
    """Return how many F the last stage runs before each B, at least; shape (chunks,).

    So many that no more than `burst` F ever have to run between two B, and that all F of a chain
    come before its first B: the least n with n[j] >= n[j + 1] - burst and n[j] >= the end of the
    chain.
    """
    ends = chunks.chain_ends
    places = np.arange(len(ends))
    steady = burst * places
    # What a chain asks for beyond a steady burst has to be run before earlier B.
    beyond = ends - steady
    from_last = beyond[::-1]
    most_so_far = np.maximum.accumulate(from_last)
    most_from_here = most_so_far[::-1]
    forwards: Ints = most_from_here + steady
    return forwards


def flushed_order(chunks: Chunks, num_stages: int, rounds: int) -> Ints:
    """Return the order that runs all F of a round before its first B; a round ends with a chain."""
    ends = chunks.chain_ends
    num_chunks = len(ends)
    numbers = np.arange(1, rounds + 1)
    even_ends = np.ceil(numbers * num_chunks / rounds)
    chunks_there = np.searchsorted(ends, even_ends)
    # The chain under way there is ended. Rounds that would end within the same chain are one.
    round_ends = np.unique(ends[chunks_there])
    own_rounds = np.searchsorted(round_ends, ends)
    forwards_before = round_ends[own_rounds]
    return np.tile(forwards_before, (num_stages, 1))


def join_orders(parts: SequenceOf[Ints]) -> Ints:
    """Return the order of programs that run one after the other, each (stages, its chunks)."""
    joined: list[Ints] = []
    num_before = 0
    for part in parts:
        # All F of the parts before come first.
        joined.append(num_before + part)
        _, num_chunks = part.shape
        num_before += num_chunks
    return np.concatenate(joined, axis=1)


def overlap_orders(order: Ints, ends: SequenceOf[int]) -> Ints:
    """Let the F of the next part run while the last B of a part are awaited, as deep as in 1F1B.

    Args:
        order: (stages, chunks), of parts that run one after the other.
        ends: one past the last chunk of each part.
    """
    num_stages, num_chunks = order.shape
    places = np.arange(num_chunks)
    own_parts = np.searchsorted(ends, places, side="right")
    part_ends = np.array(ends)[own_parts]
    num_left = part_ends - places
    # In 1F1B the last B of a part have no F between them: as many as stages come after.
    ahead = _stages_after(num_stages)[:, None]
    in_1f1b = places + 1 + ahead
    in_1f1b = np.minimum(in_1f1b, num_chunks)
    overlapped = np.maximum(order, in_1f1b)
    is_draining = num_left <= ahead
    with_overlap: Ints = np.where(is_draining, overlapped, order)
    return with_overlap


def _stages_after(num_stages: int) -> Ints:
    """Return for each stage how many come after it."""
    return np.arange(num_stages - 1, -1, -1)
