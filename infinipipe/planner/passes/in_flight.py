"""Orders shaped by memory: 1F1B windows no wider than chains need, and no more than memory holds.

A stage's program is given by how many F come before each B (`infinipipe.planner.passes.order`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from infinipipe.aliases import Floats, Ints
from infinipipe.planner.passes.order import adaptive_window, backward_order
from infinipipe.planner.passes.schedule import CostedChains
from infinipipe.planner.problem import Pipeline


@dataclass(frozen=True)
class Warmup:
    """How eagerly F runs."""

    per_stage: float
    """F that a stage runs more than the next one before the same B."""
    burst: int
    """F that the last stage may run between two B, to get ready for a long chain."""


def forwards_within_memory(
    pipeline: Pipeline, chains: CostedChains, warmup: Warmup, margins: Floats
) -> Ints:
    """Return for every stage how many F come before each B; shape (stages, chunks).

    A stage is held back where its chunks in flight would not leave its margin of bytes free even
    with all layers recomputed. What a chain needs to end comes before that.
    """
    window = adaptive_window(chains.chunks, warmup.burst)
    least = np.array(chains.chunks.chain_ends, dtype=np.int64)
    stages_below = np.arange(pipeline.num_stages - 1, -1, -1)
    ahead = np.floor(warmup.per_stage * stages_below).astype(np.int64)
    wanted = np.minimum(window[None, :] + ahead[:, None], len(window))
    for stage in range(pipeline.num_stages):
        most = _most_in_flight(pipeline, chains, stage, float(margins[stage]))
        wanted[stage] = np.maximum(least, np.minimum(wanted[stage], most))
    return connect_stages(wanted, least)


def connect_stages(forwards_before: Ints, least: Ints) -> Ints:
    """Lower counts until every stage has something to do before the next and no send blocks for
    ever.

    Two neighbours s and s+1 lock each other up if F k stands before B j-1 on s but F k-1 after B j
    on s+1; so forwards_before[s][j-1] <= forwards_before[s+1][j] + 1.

    Args:
        forwards_before: (stages, chunks) of F before each B.
        least: (chunks,) what a chain needs to end.
    """
    # No B may ask for more than the B after it.
    from_last = np.minimum.accumulate(forwards_before[:, ::-1], axis=1)
    lowered = from_last[:, ::-1].copy()
    num_chunks = len(least)
    for stage in range(1, len(lowered)):
        # Where the stage before has run all F, this one may as well.
        above = lowered[stage - 1]
        most = np.where(above < num_chunks, above - 1, num_chunks)
        lowered[stage] = np.minimum(lowered[stage], np.maximum(least, most))
    for stage in range(len(lowered) - 2, -1, -1):
        below = lowered[stage + 1, 1:] + 1
        lowered[stage, :-1] = np.minimum(lowered[stage, :-1], below)
    return lowered


def _most_in_flight(pipeline: Pipeline, chains: CostedChains, stage: int, margin: float) -> Ints:
    """Return for each B the most F that may come before it within memory, on the safe side."""
    costs = chains.costs
    num_layers = pipeline.stages[stage].num_layers
    backwards = backward_order(chains.chunks)
    kept = costs.activation_bytes[stage] - num_layers * costs.freed_per_layer_bytes
    slots, gradients = _slots(pipeline, chains, stage)

    # Any op may need its transient bytes, three transfers, and a layer that is recomputed.
    in_backward = costs.backward_transient_bytes[stage] + 2 * costs.boundary_bytes
    transient = np.maximum(costs.forward_transient_bytes[stage], in_backward)
    transient = transient + 3 * costs.boundary_bytes + costs.freed_per_layer_bytes
    reserve = float(transient.max())
    static = pipeline.costs.static_bytes(stage)
    room = pipeline.limits[stage] - static - reserve - margin

    let_go = np.cumsum(kept[backwards] + slots[backwards])
    # Before the first B nothing has been let go.
    let_go = np.concatenate([[0.0], let_go[:-1]])
    taken = np.cumsum(kept + slots)
    most = room + let_go - gradients[backwards]
    return np.asarray(np.searchsorted(taken, most, side="right"))


def _slots(pipeline: Pipeline, chains: CostedChains, stage: int) -> tuple[Floats, Floats]:
    """Return (chunks,) the slot bytes that each F opens and its B closes, and the gradients that
    are there during each B."""
    sizes = chains.costs.sizes
    ends = np.array(chains.chunks.chain_ends, dtype=np.int64)
    starts = ends - np.repeat(chains.chunks.chains, chains.chunks.chains)
    prefix = np.concatenate([[0.0], np.cumsum(sizes.tokens)])
    # Whole short sequences in the last chunk of a chain are counted with it, which errs on the safe
    # side.
    tokens = np.where(sizes.split >= 0, prefix[ends] - prefix[starts], 0.0)
    is_first = np.arange(len(ends)) == starts
    slots = pipeline.costs.slot_bytes(stage, tokens)
    slots = np.where(is_first, slots, 0.0)
    return slots, pipeline.costs.slot_gradient_bytes(stage, tokens)
