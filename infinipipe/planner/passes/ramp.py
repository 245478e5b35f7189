"""Ramps: chunks that grow at the start of a step and shrink at its end."""

from __future__ import annotations

from dataclasses import dataclass

_LEAST_SHARE = 0.05
"""Of a geometric ramp's smallest chunk.

A smaller one reaches the last stage sooner, but the ramp takes more chunks, each with its overhead.
"""

_GROWTH = 2.0
"""Times 1 / stages: how much larger each chunk of a geometric ramp up is than the one before.

F of a chunk comes down all stages but the last while the last one runs B of the chunks before it.
As B takes about twice as long as F, sizes may grow by 2 / stages.
"""

_SHRINKAGE = 0.7
"""Times 1 / stages: how much larger each chunk of a geometric ramp down is than the one after.

At the end, B goes up while only F of the later chunks is left to run, which allows a quarter of
`_GROWTH`. A little more makes the last stage wait, but costs less than the many chunks it saves.
"""


@dataclass(frozen=True)
class Ramp:
    """Sizes of the first and last chunks as shares of the others' work.

    With them the pipeline fills and drains sooner. Every share is above 0 and below 1.
    """

    up: tuple[float, ...] = ()
    """Of the first chunks, the smallest first."""
    down: tuple[float, ...] = ()
    """Of the last chunks, the smallest last."""

    @property
    def total(self) -> float:
        """How many full chunks have as much work."""
        total_up = sum(self.up)
        total_down = sum(self.down)
        return total_up + total_down

    def within(self, most: float) -> Ramp:
        """Return a ramp of no more work than so many full chunks: the largest are left out."""
        ramp = self
        while ramp != NO_RAMP and ramp.total > most:
            ramp = ramp._without_largest()
        return ramp

    def _without_largest(self) -> Ramp:
        largest_up = self.up[-1] if self.up else 0.0
        largest_down = self.down[0] if self.down else 0.0
        if largest_up > largest_down:
            return Ramp(self.up[:-1], self.down)
        return Ramp(self.up, self.down[1:])


NO_RAMP = Ramp()
"""All chunks of one size."""


def linear_ramp(num_stages: int) -> Ramp:
    """Return evenly growing sizes: at each end as many as there are stages before the last."""
    up = tuple(stage / num_stages for stage in range(1, num_stages))
    down = up[::-1]
    return Ramp(up, down)


def geometric_ramp(num_stages: int) -> Ramp:
    """Return sizes for which the last stage hardly waits, neither at the start nor at the end.

    `_GROWTH` and `_SHRINKAGE` say why they grow and shrink as fast as they do.
    """
    if num_stages == 1:
        return NO_RAMP
    growth = _GROWTH / num_stages
    shrinkage = _SHRINKAGE / num_stages
    up = _geometric_shares(1 + growth)
    down = _geometric_shares(1 + shrinkage)
    return Ramp(up, down[::-1])


def _geometric_shares(ratio: float) -> tuple[float, ...]:
    """Return rising shares, each `ratio` times the one before, short of a full chunk."""
    shares: list[float] = []
    share = _LEAST_SHARE
    while share < 1:
        shares.append(share)
        share *= ratio
    return tuple(shares)
