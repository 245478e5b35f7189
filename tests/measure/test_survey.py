"""The survey of a layer, on a machine that is a formula."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from infinipipe.measure.candidates import COARSE
from infinipipe.measure.fit import Point, Slices, fitted_seconds
from infinipipe.measure.samples import fit_survey, make_samples, measure_accuracy
from infinipipe.measure.survey import FULL, QUICK, Effort, OutOfMemory, Seconds, Survey
from infinipipe.profiles import LayerTime
from tests.measure.truth import TRUTH


@dataclass
class Machine:
    """Takes the seconds of a formula, with noise and with a kernel that changes at 300 tokens."""

    noise: float = 0.01
    most_tokens: int = 10**9
    speed: float = 3.0
    time: float = 0.0
    tried: list[Slices] = field(default_factory=list)
    draw: random.Random = field(default_factory=lambda: random.Random(1))

    def run(self, slices: Slices) -> Seconds:
        self.tried.append(slices)
        point = Point(slices, 0.0)
        if point.tokens > self.most_tokens:
            raise OutOfMemory
        forward = float(fitted_seconds(TRUTH, [point])[0]) / self.speed
        if point.tokens > 300:
            forward *= 0.8
        f, b, r = (forward * share * self.draw.gauss(1, self.noise) for share in (1.0, 2.0, 4.2))
        self.time += f + b + r
        return {"forward": f, "backward": b, "recomputed": r}

    def clock(self) -> float:
        return self.time


def survey(machine: Machine, effort: Effort = FULL) -> Survey:
    found = Survey(machine.run, effort, machine.clock, lambda share: None)
    found.run()
    return found


def test_held_out_chunks_are_predicted_within_5_percent() -> None:
    found = survey(Machine())
    samples = make_samples(found, fit_survey(found))
    accuracy = {(a.op, a.held_out): a for a in measure_accuracy(samples)}
    assert len(accuracy) == 6
    for (op, held_out), a in accuracy.items():
        assert a.median_error < 0.04, op
        assert a.p90_error < 0.12, op
        assert a.num_samples == (FULL.num_held_out if held_out else FULL.num_points)


def test_points_go_where_the_curve_bends() -> None:
    """At 300 tokens the machine changes, so sizes there are wanted more than those below."""
    sizes = survey(Machine(noise=0.0)).whole_sizes
    between = {low: sum(low < size < 4 * low for size in sizes) for low in (16, 64, 256, 1024)}
    assert between[16] == 0
    assert between[256] >= 1
    assert {1, 16, 64, 256, 1024} <= set(sizes)


def test_held_out_chunks_are_of_all_kinds_and_never_fitted() -> None:
    found = survey(Machine())
    assert len(found.held_out) == len(set(found.held_out)) == FULL.num_held_out
    assert not set(found.held_out) & set(COARSE)
    kinds = {(len(s) > 1, Point(s, 0.0).context > 0) for s in found.held_out}
    assert kinds == {(False, False), (False, True), (True, False), (True, True)}
    assert all(sum(start > 0 for start, _ in s) <= 1 for s in found.times)


@pytest.mark.parametrize("effort", [FULL, QUICK])
def test_every_chunk_is_repeated_in_turns_within_the_time(effort: Effort) -> None:
    machine = Machine()
    found = survey(machine, effort)
    assert min(len(repeats) for repeats in found.times.values()) >= effort.min_repeats
    assert machine.time < 1.3 * effort.seconds
    chosen = len(found.times)
    assert set(machine.tried[chosen : 2 * chosen]) == set(found.times)


def test_a_slow_machine_gets_a_smaller_grid_and_not_a_longer_wait() -> None:
    machine = Machine(speed=0.6)
    found = survey(machine)
    assert machine.time < 1.5 * FULL.seconds
    assert max(found.whole_sizes) < 4096


def test_out_of_memory_prunes_what_is_larger() -> None:
    machine = Machine(most_tokens=500)
    found = survey(machine)
    failed = [s for s in machine.tried if Point(s, 0.0).tokens > 500]
    assert 1 <= len(failed) <= 8
    for index, slices in enumerate(failed):
        for earlier in failed[:index]:
            a, b = Point(earlier, 0.0), Point(slices, 0.0)
            assert b.tokens < a.tokens or b.context < a.context
    assert max(found.whole_sizes) < 500
    assert len(found.times) > 20


@pytest.mark.parametrize("speed", [0.6, 3.0])
@pytest.mark.parametrize("load", [1.0, 3.0])
def test_progress_is_the_share_of_the_time(speed: float, load: float) -> None:
    """Also where the machine is slow, and where others take two thirds of it."""
    machine, shown = Machine(speed=speed), [(0.0, 0.0)]

    def clock() -> float:
        return load * machine.time

    found = Survey(machine.run, FULL, clock, lambda share: shown.append((clock(), share)))
    found.run()
    assert shown[-1][1] > 0.95
    late = [(passed, share) for passed, share in shown if passed > 0.3 * clock()]
    for passed, share in late:
        assert share == pytest.approx(passed / clock(), abs=0.2)


def test_a_device_that_holds_nothing_is_said() -> None:
    with pytest.raises(OutOfMemory):
        survey(Machine(most_tokens=10))


def test_recompute_is_fitted_to_the_whole_of_forward_and_backward() -> None:
    found = survey(Machine(noise=0.0))
    times: tuple[LayerTime, ...] = fit_survey(found)
    chunk = [Point(((0, 256),), 0.0)]
    forward, backward, recompute = (float(fitted_seconds(time, chunk)[0]) for time in times)
    assert (backward / forward, recompute / forward) == pytest.approx((2.0, 1.2), rel=0.02)


def test_samples_keep_medians_and_spread() -> None:
    found = survey(Machine(noise=0.05))
    samples = make_samples(found, fit_survey(found))
    assert len(samples) == 3 * len(found.times)
    sample = samples[0]
    repeats = [seconds["forward"] for seconds in found.times[sample.slices]]
    assert (sample.op, sample.num_repeats, sample.seconds) == (
        "forward",
        len(repeats),
        np.median(repeats),
    )
    assert 0 < sample.spread_s < 0.3 * sample.seconds
