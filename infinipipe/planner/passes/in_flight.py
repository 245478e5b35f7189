"""Orders shaped by memory: 1F1B windows no wider than chains need and no more in flight than memory holds.

A stage's program is told by its leads, how many F come before each B (`infinipipe.planner.passes.order`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from infinipipe.aliases import Floats, Ints
from infinipipe.costs.cost import static_bytes
from infinipipe.planner.passes.order import adaptive_window, backward_order
from infinipipe.planner.passes.schedule import Priced
from infinipipe.planner.problem import Pipeline


@dataclass(frozen=True)
class Shape:
    """How eagerly F runs."""

    ahead: float
    """F that a stage runs more than the next one before the same B."""
    burst: int
    """F that the last stage may run between two B, to get ready for a long chain."""


def memory_leads(pipeline: Pipeline, priced: Priced, shape: Shape, margins: Floats) -> Ints:
    """Return the leads of every stage; shape (stages, chunks).

    A stage is held back where its chunks in flight would not leave its margin of bytes free even with all layers
    recomputed. What a chain needs to end comes before that.
    """
    window = adaptive_window(priced.chunks, shape.burst)
    least = np.array(priced.chunks.chain_ends, dtype=np.int64)
    num_stages, num_chunks = pipeline.num_stages, len(window)
    depth = np.floor(shape.ahead * np.arange(num_stages - 1, -1, -1)).astype(np.int64)
    leads = np.minimum(window[None, :] + depth[:, None], num_chunks)
    for stage in range(num_stages):
        most = _most_in_flight(pipeline, priced, stage, float(margins[stage]))
        leads[stage] = np.maximum(least, np.minimum(leads[stage], most))
    return connect_leads(leads, least)


def connect_leads(leads: Ints, least: Ints) -> Ints:
    """Lower leads until every stage has something to do before the next and no send can block for ever.

    Two neighbours s and s+1 lock each other up if F k stands before B j-1 on s but F k-1 after B j on s+1; so
    lead[s][j-1] <= lead[s+1][j] + 1.
    """
    leads = np.minimum.accumulate(leads[:, ::-1], axis=1)[:, ::-1].copy()
    for stage in range(1, len(leads)):
        # Where the stage before has run all F, this one may as well.
        before = np.where(leads[stage - 1] < len(least), leads[stage - 1] - 1, len(least))
        leads[stage] = np.minimum(leads[stage], np.maximum(least, before))
    for stage in range(len(leads) - 2, -1, -1):
        leads[stage, :-1] = np.minimum(leads[stage, :-1], leads[stage + 1, 1:] + 1)
    return leads


def _most_in_flight(pipeline: Pipeline, priced: Priced, stage: int, margin: float) -> Ints:
    """Return for each B the most F that may come before it within memory."""
    costs, place = priced.costs, pipeline.stages[stage]
    backwards = backward_order(priced.chunks)
    kept = costs.kept_bytes[stage] - place.num_layers * costs.saved_bytes
    opened, closed, grads = _slots(pipeline, priced, stage, backwards)
    peaks = np.maximum(
        costs.forward_peak_bytes[stage],
        costs.backward_peak_bytes[stage] + 2 * costs.activation_bytes,
    )
    reserve = float((peaks + 3 * costs.activation_bytes + costs.saved_bytes).max())
    room = pipeline.limits[stage] - static_bytes(pipeline.profile, place) - reserve - margin
    freed = np.concatenate([[0.0], np.cumsum(kept[backwards] + closed)[:-1]])
    return np.asarray(np.searchsorted(np.cumsum(kept + opened), room + freed - grads, side="right"))


def _slots(
    pipeline: Pipeline, priced: Priced, stage: int, backwards: Ints
) -> tuple[Floats, Floats, Floats]:
    """Return the slot bytes that each F opens, that each B closes, and the gradients that are there during each B."""
    sizes, loads = pipeline.profile.bytes, priced.loads
    ends = np.array(priced.chunks.chain_ends, dtype=np.int64)
    starts = ends - np.repeat(priced.chunks.chains, priced.chunks.chains)
    prefix = np.concatenate([[0.0], np.cumsum(loads.tokens)])
    # Whole short sequences in the last chunk of a chain are counted with it, which errs on the safe side.
    tokens = (
        np.where(loads.split >= 0, prefix[ends] - prefix[starts], 0.0)
        * pipeline.stages[stage].num_layers
    )
    first = np.arange(len(ends)) == starts
    opened = np.where(first, tokens * sizes.layer_kv_per_token, 0.0)
    return opened, opened[backwards], (tokens * sizes.layer_kv_grad_per_token)[backwards]
