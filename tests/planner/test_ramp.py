"""Ramps: how sizes grow and shrink, and what is left out where there is too little work."""

from __future__ import annotations

import pytest

from infinipipe.planner.passes.ramp import NO_RAMP, Ramp, geometric_ramp, linear_ramp


def test_linear_ramps_have_a_step_for_every_stage_but_the_last() -> None:
    assert linear_ramp(4) == Ramp((0.25, 0.5, 0.75), (0.75, 0.5, 0.25))


def test_geometric_ramps_grow_fast_and_shrink_slowly() -> None:
    ramp = geometric_ramp(4)
    assert ramp.up[:3] == pytest.approx((0.05, 0.075, 0.1125))
    assert ramp.down[-3:] == pytest.approx((0.05 * 1.175**2, 0.05 * 1.175, 0.05))
    assert 1 / 1.5 < ramp.up[-1] < 1
    assert 1 / 1.175 < ramp.down[0] < 1
    assert len(ramp.up) < len(ramp.down)
    assert geometric_ramp(1) == linear_ramp(1) == NO_RAMP


def test_too_little_work_for_a_ramp_drops_the_largest() -> None:
    assert Ramp((0.2, 0.6), (0.7, 0.3)).within(1.2) == Ramp((0.2, 0.6), (0.3,))
    assert Ramp((0.2, 0.6), (0.7, 0.3)).within(0.6) == Ramp((0.2,), (0.3,))
    assert Ramp((0.2, 0.6), (0.7, 0.3)).within(-1.0) == NO_RAMP
