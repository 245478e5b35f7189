"""Shares of the predicted time."""

from __future__ import annotations

from infinipipe.ir import StagePrediction, TimeShares

STAGES = (
    StagePrediction(busy_s=3.0, recompute_s=1.0, bubble_s=1.0, peak_bytes=1),
    StagePrediction(busy_s=1.0, recompute_s=0.0, bubble_s=3.0, peak_bytes=1),
)


def test_fractions_are_of_all_stages() -> None:
    shares = TimeShares.of(iter(STAGES))
    assert shares == TimeShares(busy_s=4.0, recompute_s=1.0, bubble_s=4.0)
    assert (shares.bubble_fraction, shares.recompute_fraction) == (0.5, 0.25)


def test_sums_of_parts_are_sums_of_the_whole() -> None:
    first, second = (TimeShares.of([stage]) for stage in STAGES)
    assert first.plus(second) == TimeShares.of(STAGES)
    assert TimeShares().plus(first) == first


def test_no_time_has_no_shares() -> None:
    shares = TimeShares.of([])
    assert (shares.bubble_fraction, shares.recompute_fraction) == (None, None)
