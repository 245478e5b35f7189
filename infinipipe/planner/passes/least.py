"""Seconds that no schedule of some chunks can undercut, for less than it takes to make one.

Each of these bounds needs more than the one before: a size, chunks (`CostedChains.least_s`), an
order, recompute levels. What cannot beat the incumbent is not looked at any further.
"""

from __future__ import annotations

import numpy as np

from infinipipe.aliases import Floats, Ints
from infinipipe.planner.passes.order import backward_order
from infinipipe.planner.passes.schedule import CostedChains
from infinipipe.planner.problem import Problem

# A layer whose recompute is free must not divide by zero. Far below what any layer takes.
_LEAST_S = 1e-15


def least_of_size_s(problem: Problem, first_tokens: int, most_tokens: float) -> Floats:
    """Return (stages,) what no chunks of the problem's sequences can undercut.

    Every token takes at least as long as in the best chunk. A stage waits for the first chunk to
    come down, and at the end some chunk goes up.

    Args:
        problem: whose sequences are to be cut.
        first_tokens: the first chunk has so many tokens from the start of one sequence.
        most_tokens: no chunk has more.
    """
    rates = problem.rates
    work_s = rates.work.split_seconds(rates.lengths, most_tokens).sum(axis=1)
    first_s = rates.forward.whole_seconds(np.array([float(first_tokens)]))[:, 0]
    last_s = rates.backward.whole_seconds(np.ones(1))[:, 0]
    passed_s = first_s + last_s
    # Of the stages before.
    least_s: Floats = np.cumsum(passed_s) - passed_s + work_s
    return least_s


def least_with_levels_s(chains: CostedChains, levels: Ints) -> Floats:
    """Return (stages,) what no order can undercut with (stages, chunks) recompute levels."""
    recompute_s = chains.recompute_s(levels)
    least_s: Floats = chains.least_s + recompute_s.sum(axis=1)
    return least_s


def least_in_order_s(problem: Problem, chains: CostedChains, forwards_before: Ints) -> Floats:
    """Return (stages,) what no recompute levels can undercut in an order, for less than it takes to
    find any.

    Before a B its stage holds activations and slots of all chunks in flight, and recompute has to
    free what is over its limit, at best on the lower rungs where a second of it frees most.

    Args:
        problem: whose pipeline has the stages and their limits.
        chains: what the stages run.
        forwards_before: (stages, chunks) how many F come before each B. With `chain_ends`, of shape
            (chunks,), what is returned holds for every order.
    """
    costs = chains.costs
    ladder = chains.ladder
    freed_per_s = ladder.lower_bytes / np.maximum(ladder.lower_s, _LEAST_S)
    most_per_s = float(freed_per_s.max())
    if most_per_s <= 0:
        return chains.least_s
    pipeline = problem.pipeline
    sizes = costs.sizes
    # The first slice's F opens the slot of all slices, and its B closes it.
    is_first = (sizes.split >= 0) & (sizes.context == 0)
    slot_tokens = np.where(is_first, sizes.split_tokens, 0).astype(np.float64)
    stages = range(pipeline.num_stages)
    slots = np.array([pipeline.costs.slot_bytes(stage, slot_tokens) for stage in stages])
    kept = costs.activation_bytes + slots
    taken = np.cumsum(kept, axis=1)
    let_go_each = kept[:, backward_order(chains.chunks)]
    let_go_before = np.cumsum(let_go_each, axis=1) - let_go_each
    last_forwards = np.broadcast_to(forwards_before - 1, kept.shape)
    held = np.take_along_axis(taken, last_forwards, axis=1) - let_go_before
    static = [pipeline.costs.static_bytes(stage) for stage in stages]
    room = np.array(pipeline.limits) - np.array(static)
    missing = np.maximum(0.0, held.max(axis=1) - room)
    least_s: Floats = chains.least_s + missing / most_per_s
    return least_s
