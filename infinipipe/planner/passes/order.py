"""Orders of F and B: 1F1B with slices, as in InfiniPipe's scheduler (arXiv 2509.21275).

F runs chain by chain. B does as well, but backwards within a chain, because the B of a slice needs
the gradients of K and V from those of all later slices. With those two orders fixed, a stage's
program is told by how many F come before each B, in the order of B. Arrays of that number are
called leads; their shape is (stages, chunks).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Literal

import numpy as np

from infinipipe.aliases import Ints
from infinipipe.ir import Op, OpKind
from infinipipe.planner.passes.chunking import Chunks

Window = Literal["uniform", "adaptive"]
"""How many chunks the last stage keeps in flight.

`uniform` keeps as many as the longest chain has (the paper's N_split), `adaptive` only as many as
the chains ahead need for F and B to alternate.
"""


def backward_order(chunks: Chunks) -> Ints:
    """Return the chunks in the order of B."""
    ends = _chain_ends(chunks)
    sizes = np.array(chunks.chains, dtype=np.int64)
    sizes_of_own_chain = np.repeat(sizes, sizes)
    starts = ends - sizes_of_own_chain
    places = np.arange(len(ends))
    # Mirrored within its chain: the place x of [start, end) holds start + end - 1 - x.
    lasts = ends - 1
    return np.asarray(starts + lasts - places)


def stage_leads(chunks: Chunks, num_stages: int, window: Window, depth: int) -> Ints:
    """Return for every stage how many F come before each B; shape (stages, chunks).

    A stage runs one F more ahead than the next one, up to `depth` more than the last.
    """
    last_stage = _last_stage_leads(chunks, window)
    num_chunks = len(last_stage)
    stages_after = _stages_after(num_stages)
    ahead = np.minimum(stages_after, depth)[:, None]
    leads = np.minimum(last_stage + ahead, num_chunks)
    return np.asarray(leads)


def _last_stage_leads(chunks: Chunks, window: Window) -> Ints:
    match window:
        case "uniform":
            longest = max(chunks.chains, default=0)
            places = np.arange(len(chunks.chain_ends))
            return np.asarray(places + longest)
        case "adaptive":
            return adaptive_window(chunks, 1)


def adaptive_window(chunks: Chunks, burst: int) -> Ints:
    """Return how many F the last stage runs before each B, at least.

    No more than `burst` F then have to run between two B: B number j leaves room for every later
    chain to come in so, lead[j] >= lead[j + 1] - burst.
    """
    ends = _chain_ends(chunks)
    steady = burst * np.arange(len(ends))
    # B of a chain waits for all its F. What that asks for beyond a steady burst, earlier B prepare.
    beyond = ends - steady
    backwards = beyond[::-1]
    most_from_here = np.maximum.accumulate(backwards)[::-1]
    return np.asarray(most_from_here + steady)


def flush_leads(chunks: Chunks, num_stages: int, rounds: int) -> Ints:
    """Return leads that run all F of a round before its first B; a round ends with a chain."""
    ends = _chain_ends(chunks)
    numbers = np.arange(1, rounds + 1)
    even_ends = np.ceil(numbers * len(ends) / rounds)
    chunks_there = np.searchsorted(ends, even_ends)
    # Rounds that would end within the same chain are one.
    round_ends = np.unique(ends[chunks_there])
    own_rounds = np.searchsorted(round_ends, ends)
    leads = round_ends[own_rounds]
    return np.tile(leads, (num_stages, 1))


def join_leads(parts: SequenceOf[Ints]) -> Ints:
    """Return the leads of programs that run one after the other, each (stages, its chunks)."""
    joined: list[Ints] = []
    num_before = 0
    for part in parts:
        joined.append(num_before + part)
        num_before += part.shape[1]
    return np.concatenate(joined, axis=1)


def overlap_leads(leads: Ints, ends: SequenceOf[int]) -> Ints:
    """Let the F of the next part run while the last B of a part are awaited, as deep as in 1F1B.

    Args:
        leads: (stages, chunks), of parts that run one after the other.
        ends: one past the last chunk of each part.
    """
    num_stages, num_chunks = leads.shape
    places = np.arange(num_chunks)
    own_parts = np.searchsorted(ends, places, side="right")
    part_ends = np.array(ends)[own_parts]
    num_left = part_ends - places
    # In 1F1B the last B of a part have no F between them, one for each stage that comes after.
    ahead = _stages_after(num_stages)[:, None]
    as_in_1f1b = np.minimum(places + 1 + ahead, num_chunks)
    overlapped = np.maximum(leads, as_in_1f1b)
    return np.asarray(np.where(num_left <= ahead, overlapped, leads))


def _chain_ends(chunks: Chunks) -> Ints:
    return np.array(chunks.chain_ends, dtype=np.int64)


def _stages_after(num_stages: int) -> Ints:
    """Return for each stage how many come after it."""
    return np.arange(num_stages - 1, -1, -1)


def interleave(leads: Ints, backwards: Ints) -> tuple[Ints, Ints]:
    """Return one stage's program as directions (1 is F, -1 is B) and chunks."""
    num_chunks = len(leads)
    directions = np.ones(2 * num_chunks, dtype=np.int64)
    places = leads + np.arange(num_chunks)
    directions[places] = -1
    chunks = np.empty(2 * num_chunks, dtype=np.int64)
    chunks[places] = backwards
    chunks[directions == 1] = np.arange(num_chunks)
    return directions, chunks


def make_program(directions: SequenceOf[int], chunks: SequenceOf[int]) -> tuple[Op, ...]:
    """Return the ops of one stage's program."""
    kinds = {1: OpKind.FORWARD, -1: OpKind.BACKWARD}
    return tuple(Op(kinds[d], c) for d, c in zip(directions, chunks, strict=True))
