"""A lower bound on the makespan of one step.

It is valid for every chunking, order of F and B, and choice of recompute that a plan may have. The
proofs use three of its rules (`infinipipe/ir/rules`): all stages run F in one order and B in one
order; F of a chain ascend and B descend; at most one slice of a chunk is part of its sequence.
Each of these is proved in its module:

* Work (`work`): all tokens at the best rate of any chunk, all attention pairs, the recompute that
  sequences force by themselves, and the smallest chunk's round trip to the stage.
* Prices (`prices`): small chunks cost overhead, large ones memory, and more recompute leaves more
  of it. With a price for the seconds of two stages and for the bytes of one, every token pays at
  least its share of the best chunk.
* Ends (`ends`): a stage that does not want to wait long for its first chunks, and after its last
  ones, needs small ones then, and these cost more. What they cost is added to the prices.
* Turns (`turns`): sequences so long that no two of them fit on a stage together take turns there.

The bound is the largest of work, of prices with what the ends add, and of turns; with replicas also
of the first two for the longest sequence alone. Cutting B into I and W can go below it: it is for F
and B.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np

from infinipipe.aliases import Bools, Floats
from infinipipe.costs import ChunkRates
from infinipipe.ir import Sequence
from infinipipe.planner.bound.ends import make_ends
from infinipipe.planner.bound.prices import FREE, Prices
from infinipipe.planner.bound.turns import turn_seconds
from infinipipe.planner.bound.work import (
    can_be_split,
    forced_recompute_seconds,
    smallest_round_trip_seconds,
)
from infinipipe.planner.problem import Pipeline

__all__ = ["makespan_bound"]

# Where the bound is exact, the simulator's sums may come out a few digits lower.
_ROUNDING = 1 - 1e-9


def makespan_bound(pipeline: Pipeline, sequences: SequenceOf[Sequence], num_replicas: int) -> float:
    """Return seconds that no schedule of these sequences on these stages can undercut."""
    if not sequences:
        return 0.0
    tokens = np.array([sequence.length for sequence in sequences], dtype=np.float64)
    lengths = np.sort(tokens)[::-1]
    rates = pipeline.costs.rates(pipeline.limits, lengths)
    can_split = can_be_split(rates, lengths)
    bounds = [
        _work_and_prices_seconds(rates, lengths, can_split, num_replicas),
        turn_seconds(rates, lengths, can_split, num_replicas),
    ]
    if num_replicas > 1:
        # Replicas share the work, but no sequence is in two of them.
        alone = _work_and_prices_seconds(rates, lengths[:1], can_split[:1], num_replicas=1)
        bounds.append(alone)
    return max(bounds) * _ROUNDING


def _work_and_prices_seconds(
    rates: ChunkRates, lengths: Floats, can_split: Bools, num_replicas: int
) -> float:
    """Return the larger bound of work, and of prices with ends."""
    work = rates.work.split_seconds(lengths).sum(axis=1)
    forced = forced_recompute_seconds(rates, lengths, can_split)
    round_trip = smallest_round_trip_seconds(rates)
    by_work = (work + forced) / num_replicas + round_trip
    best = float(by_work.max())

    busy = int(np.argmax(work / num_replicas + round_trip))
    forced_on_busy = float(forced[busy])
    ends = make_ends(rates, busy)
    # Bytes have a price on the first stage, which keeps most chunks, and on the one with most work;
    # where there is a choice not on the busy one, so that the seconds of two stages have one.
    candidates = {0, int(np.argmax(work))}
    for held in sorted(candidates - {busy}) or [busy]:
        if rates.room[held].item() <= 0:
            continue
        prices = Prices(rates, lengths, held, busy, forced=forced_on_busy)
        for point in (FREE, prices.climb()):
            by_prices = prices.bound(point, ends, num_replicas)
            best = max(best, by_prices)
    return best
