"""Orders: 1F1B with slices (PAPER.md, Scheduler). F runs chain by chain, B as well but backwards within a chain.

With those two orders fixed, a stage's program is told by its leads: how many F come before each B.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Literal

import numpy as np

from infinipipe.aliases import Ints
from infinipipe.planner.passes.chunking import Chunks

Window = Literal["uniform", "adaptive", "serial"]
"""How many F the last stage runs before each B.

`uniform` keeps as many chunks in flight as the longest chain has (the paper's N_split), `adaptive` only as
many as the chains ahead need for F and B to alternate, `serial` ends a chain before it starts the next.
"""


def backward_order(chunks: Chunks) -> Ints:
    """Return the chunks in the order of B."""
    ends = np.array(chunks.chain_ends, dtype=np.int64)
    sizes = np.repeat(chunks.chains, chunks.chains).astype(np.int64)
    # Mirrored within its chain: the place x of [start, end) holds start + end - 1 - x.
    return np.asarray(2 * ends - sizes - 1 - np.arange(len(ends)))


def stage_leads(chunks: Chunks, num_stages: int, window: Window, depth: int) -> Ints:
    """Return for every stage how many F come before each B; shape (stages, chunks).

    A stage runs one F more ahead than the next one, up to `depth` more than the last.
    """
    last = _last_leads(chunks, window)
    ahead = np.minimum(np.arange(num_stages - 1, -1, -1), depth)
    return np.asarray(np.minimum(last[None, :] + ahead[:, None], len(last)))


def _last_leads(chunks: Chunks, window: Window) -> Ints:
    ends = np.array(chunks.chain_ends, dtype=np.int64)
    places = np.arange(len(ends))
    match window:
        case "serial":
            return ends
        case "uniform":
            return np.asarray(places + max(chunks.chains, default=0))
        case "adaptive":
            return adaptive_window(chunks, 1)


def flush_leads(chunks: Chunks, num_stages: int, rounds: int) -> Ints:
    """Return leads that run all F of a round before its first B; a round ends with a chain."""
    ends = np.array(chunks.chain_ends, dtype=np.int64)
    num_chunks = len(ends)
    wanted = np.ceil(np.arange(1, rounds + 1) * num_chunks / rounds)
    lasts = np.unique(ends[np.searchsorted(ends, wanted)])
    return np.tile(lasts[np.searchsorted(lasts, ends)], (num_stages, 1))


def adaptive_window(chunks: Chunks, burst: int) -> Ints:
    """Return how many F the last stage runs before each B, at least, to have no more than `burst` F between two B.

    B number j must leave room for every later chain to come in so: lead[j] >= lead[j + 1] - burst.
    """
    ends = np.array(chunks.chain_ends, dtype=np.int64)
    places = burst * np.arange(len(ends))
    return np.asarray(np.maximum.accumulate((ends - places)[::-1])[::-1] + places)


def join_leads(parts: SequenceOf[Ints]) -> Ints:
    """Return the leads of programs that run one after the other; each (stages, chunks of the part)."""
    firsts = np.cumsum([0, *(part.shape[1] for part in parts)]).tolist()
    return np.concatenate(
        [first + part for first, part in zip(firsts, parts, strict=False)], axis=1
    )


def overlap_leads(leads: Ints, ends: SequenceOf[int]) -> Ints:
    """Let the F of the next part run while the last B of a part are awaited, as deep as in 1F1B.

    Args:
        leads: (stages, chunks), of parts that run one after the other.
        ends: one past the last chunk of each part.
    """
    num_stages, num_chunks = leads.shape
    places = np.arange(num_chunks)
    left = np.array(ends)[np.searchsorted(ends, places, side="right")] - places
    ahead = np.arange(num_stages - 1, -1, -1)[:, None]
    wanted = np.minimum(places + 1 + ahead, num_chunks)
    return np.asarray(np.where(left <= ahead, np.maximum(leads, wanted), leads))
