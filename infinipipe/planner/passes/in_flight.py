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
    with all layers recomputed. A chain's own F are never held back.

    Args:
        pipeline: its stages and their limits.
        chains: what the stages run.
        warmup: how many F a stage wants to run ahead.
        margins: (stages,) bytes to leave free.
    """
    num_stages = pipeline.num_stages
    window = adaptive_window(chains.chunks, warmup.burst)
    num_chunks = len(window)
    # B of a chain waits for all its F.
    least = chains.chunks.chain_ends
    stages_after = np.arange(num_stages - 1, -1, -1)
    ahead = np.floor(warmup.per_stage * stages_after).astype(np.int64)
    wanted = np.minimum(window + ahead[:, None], num_chunks)
    most = _most_in_flight(pipeline, chains, margins)
    within = np.minimum(wanted, most)
    order = np.maximum(least, within)
    return connect_stages(order, least)


def connect_stages(order: Ints, least: Ints) -> Ints:
    """Lower counts until every stage has something to do before the next and no send blocks for
    ever.

    Two neighbours s and s+1 lock each other up if F k stands before B j-1 on s but F k-1 after B j
    on s+1. Suppose a send blocks until its receive is posted, and receive k is posted when k-1 is
    consumed. Then the send of F k on s waits for F k-1 on s+1, which waits for the send of B j,
    which waits for B j-1 on s, which stands after F k. So order[s][j-1] <= order[s+1][j] + 1.

    Args:
        order: (stages, chunks) of F before each B.
        least: (chunks,) of F before each B that its chain needs; no count is lowered below it.
    """
    num_stages = len(order)
    num_chunks = len(least)
    # No B may have more F before it than the B after it.
    from_last = np.flip(order, axis=1)
    least_so_far = np.minimum.accumulate(from_last, axis=1)
    lowered = np.flip(least_so_far, axis=1).copy()
    # Down the stages: before the same B, a stage runs at least one F less than the one before,
    # unless a chain needs them.
    for stage in range(1, num_stages):
        before = lowered[stage - 1]
        # Where the stage before has run all F, this one may as well.
        has_more = before < num_chunks
        most = np.where(has_more, before - 1, num_chunks)
        most = np.maximum(least, most)
        own = lowered[stage]
        lowered[stage] = np.minimum(own, most)
    # Up the stages: no send may block for ever.
    for stage in reversed(range(num_stages - 1)):
        after = lowered[stage + 1]
        most = after[1:] + 1
        # All but the last B, which no B follows.
        own = lowered[stage][:-1]
        np.minimum(own, most, out=own)
    return lowered


def _most_in_flight(pipeline: Pipeline, chains: CostedChains, margins: Floats) -> Ints:
    """Return (stages, chunks) for each B about the most F that may come before it within memory."""
    costs = chains.costs
    layers = [stage.num_layers for stage in pipeline.stages]
    num_layers = np.array(layers)[:, None]
    dropped = num_layers * costs.freed_per_layer_bytes
    kept = costs.activation_bytes - dropped
    slots, gradients = _slots(pipeline, chains)
    # What each F takes and the B of the same chunk lets go.
    taken_by_chunk = kept + slots

    static = [pipeline.costs.static_bytes(stage) for stage in range(pipeline.num_stages)]
    room = np.array(pipeline.limits) - np.array(static) - _reserve_bytes(chains) - margins

    backwards = backward_order(chains.chunks)
    let_go_each = taken_by_chunk[:, backwards]
    let_go = np.cumsum(let_go_each, axis=1)
    # Before the first B nothing has been let go.
    let_go_before = np.zeros_like(let_go)
    let_go_before[:, 1:] = let_go[:, :-1]
    gradients_then = gradients[:, backwards]
    most_bytes = room[:, None] + let_go_before - gradients_then
    taken = np.cumsum(taken_by_chunk, axis=1)
    most_forwards: list[Ints] = []
    for taken_there, most_there in zip(taken, most_bytes, strict=True):
        most_forwards.append(np.searchsorted(taken_there, most_there, side="right"))
    return np.array(most_forwards)


def _reserve_bytes(chains: CostedChains) -> Floats:
    """Return (stages,) about the most that any op may need while it runs: its own transient bytes,
    transfers and a layer that is recomputed.

    The ledger (`infinipipe.costs.memory`) counts four transfers, of each direction one ahead and
    one behind, and in B the gradient that came as well. This has those five in B and three in F,
    and takes transfers to be as large as the op's own. It is a rough upper estimate, no bound.
    """
    costs = chains.costs
    boundary = costs.boundary_bytes
    in_backward = costs.backward_transient_bytes + 2 * boundary
    transient = np.maximum(costs.forward_transient_bytes, in_backward)
    transfers = 3 * boundary
    needed: Floats = transient + transfers + costs.freed_per_layer_bytes
    return np.asarray(needed.max(axis=1))


def _slots(pipeline: Pipeline, chains: CostedChains) -> tuple[Floats, Floats]:
    """Return (stages, chunks) the slot bytes that each F opens and its B closes, and the gradients
    that are there during each B."""
    costs = pipeline.costs
    chunks = chains.chunks
    sizes = chains.costs.sizes
    sizes_of_own_chain = np.repeat(chunks.chains, chunks.chains)
    ends = chunks.chain_ends
    starts = ends - sizes_of_own_chain
    tokens_so_far = np.cumsum(sizes.tokens)
    tokens_before = np.append(0.0, tokens_so_far)
    # Whole short sequences in the last chunk of a chain are counted with it, which errs on the safe
    # side.
    before_end = tokens_before[ends]
    before_start = tokens_before[starts]
    chain_tokens = before_end - before_start
    is_split = sizes.split >= 0
    tokens = np.where(is_split, chain_tokens, 0.0)
    places = np.arange(len(ends))
    first_tokens = np.where(places == starts, tokens, 0.0)
    stages = range(pipeline.num_stages)
    opened = [costs.slot_bytes(stage, first_tokens) for stage in stages]
    gradients = [costs.slot_gradient_bytes(stage, tokens) for stage in stages]
    return np.array(opened), np.array(gradients)
