"""How the predicted time of stages divides into work, recompute and waiting."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Self

from infinipipe.ir.plan import StagePrediction


class TimeShares(NamedTuple):
    """Seconds summed over stages: of one replica, one step or many."""

    busy_s: float = 0.0
    """In ops, recompute included."""
    recompute_s: float = 0.0
    bubble_s: float = 0.0
    """In which stages wait."""

    @classmethod
    def of(cls, predictions: Iterable[StagePrediction]) -> Self:
        """Sum what is predicted of stages, in their order."""
        stages = tuple(predictions)
        busy_s = sum(stage.busy_s for stage in stages)
        recompute_s = sum(stage.recompute_s for stage in stages)
        bubble_s = sum(stage.bubble_s for stage in stages)
        return cls(busy_s=busy_s, recompute_s=recompute_s, bubble_s=bubble_s)

    def plus(self, other: TimeShares) -> TimeShares:
        """Return the sums over the stages of both."""
        return TimeShares(
            busy_s=self.busy_s + other.busy_s,
            recompute_s=self.recompute_s + other.recompute_s,
            bubble_s=self.bubble_s + other.bubble_s,
        )

    @property
    def bubble_fraction(self) -> float | None:
        """Waiting, of all the stages' time; None where there is none."""
        return _fraction(self.bubble_s, self.busy_s + self.bubble_s)

    @property
    def recompute_fraction(self) -> float | None:
        """Recompute, of the time in which stages work; None where there is none."""
        return _fraction(self.recompute_s, self.busy_s)


def _fraction(part_s: float, whole_s: float) -> float | None:
    return part_s / whole_s if whole_s > 0 else None
