"""The choice of a layout: every one that is possible, on a sample of the plan's steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import numpy as np

from infinipipe.aliases import Progress
from infinipipe.costs.work import average_work
from infinipipe.dataset import Dataset
from infinipipe.errors import InfeasibleError
from infinipipe.ir import Layout, verify_header
from infinipipe.planner.batches import Batch
from infinipipe.planner.bound import makespan_bound
from infinipipe.planner.compile import (
    check_longest,
    draw_batches,
    make_header,
    make_pipeline,
    plan_step,
)
from infinipipe.planner.options import CompileOptions, Request
from infinipipe.planner.policies import POLICIES
from infinipipe.planner.problem import Pipeline
from infinipipe.planner.workers import Workers
from infinipipe.profiles import Profile

SAMPLED_STEPS = 4
"""Steps that every layout is judged by: more take longer, fewer leave more to the draw."""
_WAVE = 4
"""Plans that are made before layouts are compared again.

More keep more workers busy, and plan more that a result among them would have made needless. It
does not depend on the workers, so that the outcome does not either.
"""
_CLOSE_RACE = 1.05
"""Layouts that seem slower than the fastest by more than this factor wait until it is planned.

Plans are above their bounds by a few per cent, where memory is roomy.
"""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What the sample says of one layout; seconds are means of its steps."""

    name: str
    """Stages x ranks that share sequences x replicas."""
    layout: Layout | None
    """None for what no layout can express."""
    step_s: float | None = None
    """None where a bound excluded the layout before all steps were planned, or where it does not
    fit."""
    makespan_s: float | None = None
    at_least_s: float = 0.0
    """What `step_s` cannot undercut: itself, if it is known."""
    bound_s: float = 0.0
    """What it cannot undercut by bounds alone; 0 where the layout does not fit."""
    peak_bytes: int | None = None
    """The most of any stage."""
    reason: str | None = None
    """Why the layout does not fit."""
    missing_bytes: float = 0.0
    """What a stage lacks; infinity where not even the model fits."""


@dataclass(frozen=True)
class LayoutSearch:
    """The layouts of so many devices, the fastest first, then those that bounds excluded, then
    those that do not fit."""

    num_devices: int
    trials: tuple[Trial, ...]
    num_steps: int
    """Of the sample."""
    pure_work_s: float
    """Mean seconds of F and B of a step, unchunked and without recompute, over all devices."""

    @property
    def best(self) -> Trial | None:
        """The fastest layout; None if none fits."""
        first = self.trials[0]
        return None if first.step_s is None else first


def layout_name(layout: Layout) -> str:
    """Return a layout as people write it: stages x sequence-parallel ranks x replicas."""
    return f"{layout.num_stages} x {layout.sequence_parallel} x {layout.num_replicas}"


def unchanged(pipeline: Pipeline) -> Pipeline:
    """Return the pipeline as it is."""
    return pipeline


def choose_layout(
    dataset: Dataset,
    profile: Profile,
    options: CompileOptions,
    progress: Progress | None = None,
    num_workers: int = 1,
) -> tuple[Layout, LayoutSearch | None]:
    """Return the fastest layout, and how it was found; nothing is searched where there is only
    one.

    Raises:
        InputError: the options do not fit the profile or the dataset.
        InfeasibleError: no layout fits the memory limit.
    """
    layouts = options.layouts(profile)
    if len(layouts) == 1:
        return layouts[0], None
    search = search_layouts(dataset, profile, options, layouts, progress, num_workers)
    best = search.best
    if best is None:
        closest = search.trials[0]
        raise InfeasibleError(
            f"no layout of {search.num_devices} devices fits; the closest, {closest.name} (stages "
            f"x sequence parallelism x replicas): {closest.reason}"
        )
    assert best.layout is not None, "what is searched are layouts"
    return best.layout, search


def search_layouts(
    dataset: Dataset,
    profile: Profile,
    options: CompileOptions,
    layouts: SequenceOf[Layout],
    progress: Progress | None = None,
    num_workers: int = 1,
    change: Callable[[Pipeline], Pipeline] = unchanged,
    *,
    num_steps: int = SAMPLED_STEPS,
) -> LayoutSearch:
    """Return the fastest layout on a sample of the steps, and why the others are not.

    What is fastest does not depend on `num_workers`. A layout is planned step by step, the most
    promising ones first, until its bound, with what was planned in place of the bounds of the
    steps, exceeds the best.

    Args:
        dataset: whose steps are sampled.
        profile: of the model and the device.
        options: say with which policy, within which limits.
        layouts: of equally many devices.
        progress: is told how many plans are made or needless, and of how many.
        num_workers: processes that plan.
        change: makes other pipelines of those of the layouts.
        num_steps: of the sample, at most.

    Raises:
        InputError: the options do not fit the profile or the dataset.
    """
    requests = [options.resolve(profile, len(dataset), layout) for layout in layouts]
    sample = sample_steps(dataset, requests[0], num_steps)
    longest = draw_batches(dataset, requests[0]).longest()
    racers = []
    for request in requests:
        racer = _Racer(request.layout)
        racers.append(racer)
        try:
            pipeline = make_pipeline(dataset, profile, request)
        except InfeasibleError as error:
            racer.misfit = _misfit(error)
            continue
        if change is unchanged:
            # What no plan can hold is said before any is made; of other pipelines there are none.
            verify_header(make_header(dataset, pipeline, request))
        racer.enter(change(pipeline), sample)
    run = partial(_run_task, policy=options.policy, longest=longest)
    with Workers(num_workers) as workers:
        _race(racers, run, sample, workers, progress)
    trials = sorted((racer.trial() for racer in racers), key=_rank)
    num_devices = layouts[0].num_ranks
    return LayoutSearch(
        num_devices=num_devices,
        trials=tuple(trials),
        num_steps=len(sample),
        pure_work_s=pure_work_seconds(profile, sample) / num_devices,
    )


def sample_steps(dataset: Dataset, request: Request, num_steps: int = SAMPLED_STEPS) -> list[Batch]:
    """Return the steps that layouts are judged by."""
    return draw_batches(dataset, request).sample(num_steps)


def pure_work_seconds(profile: Profile, sample: SequenceOf[Batch]) -> float:
    """Return the mean seconds of F and B of a step on one device, unchunked and without
    recompute."""
    work = average_work(profile, num_stages=1)
    sequences = chain.from_iterable(batch.sequences for batch in sample)
    lengths = [sequence.length for sequence in sequences]
    return float(work.whole(np.array(lengths)).sum()) / len(sample)


@dataclass(frozen=True)
class _Lap:
    """What one step of the sample comes to on one layout."""

    step_s: float
    makespan_s: float
    peak_bytes: int


@dataclass(frozen=True)
class _Misfit:
    """What does not fit on a layout."""

    reason: str
    missing_bytes: float


@dataclass
class _Racer:
    """A layout while it is tried."""

    layout: Layout
    pipeline: Pipeline | None = None
    """None where not even the model fits."""
    misfit: _Misfit | None = None
    is_checked: bool = False
    """Whether the longest sequence of the plan fits by itself."""
    laps: list[_Lap] = field(default_factory=list)
    bounds_s: list[float] = field(default_factory=list)
    """Of all steps of the sample."""

    def enter(self, pipeline: Pipeline, sample: SequenceOf[Batch]) -> None:
        """Take part with these stages."""
        self.pipeline = pipeline
        self.bounds_s = [_step_bound_s(pipeline, batch) for batch in sample]

    @property
    def at_least_s(self) -> float:
        """Mean seconds of a step that no plan undercuts, with those that are planned as planned."""
        planned_s = sum(lap.step_s for lap in self.laps)
        later_s = sum(self.bounds_s[len(self.laps) :])
        return (planned_s + later_s) / len(self.bounds_s)

    @property
    def bound_s(self) -> float:
        """Mean seconds of a step that no plan undercuts, whatever is planned by now."""
        return sum(self.bounds_s) / len(self.bounds_s)

    @property
    def expected_s(self) -> float:
        """Mean seconds of a step, if what is not planned exceeds its bound as what is planned."""
        num_planned = len(self.laps)
        planned_s = sum(lap.step_s for lap in self.laps)
        planned_bound_s = sum(self.bounds_s[:num_planned])
        later_s = sum(self.bounds_s[num_planned:])
        ratio = planned_s / planned_bound_s if num_planned else 1.0
        return (planned_s + ratio * later_s) / len(self.bounds_s)

    @property
    def num_plans_left(self) -> int:
        """Plans that it takes until all is known; 0 where something does not fit."""
        if self.misfit is not None:
            return 0
        return int(not self.is_checked) + len(self.bounds_s) - len(self.laps)

    @property
    def is_finished(self) -> bool:
        """Whether all steps are planned."""
        return self.misfit is None and self.num_plans_left == 0

    def task(self, ahead: int, sample: SequenceOf[Batch]) -> _Task:
        """Return what is planned when so many other plans are made: what fails soonest is first."""
        assert self.pipeline is not None, "a layout that holds the model"
        step = len(self.laps) + ahead - int(not self.is_checked)
        batch = sample[step] if step >= 0 else None
        return _Task(self.pipeline, batch)

    def take(self, outcome: _Lap | _Misfit | None) -> None:
        """Note what the task came to."""
        if isinstance(outcome, _Misfit):
            # Of two, the first: what comes later may be another.
            self.misfit = self.misfit or outcome
        elif outcome is None:
            self.is_checked = True
        else:
            self.laps.append(outcome)

    def trial(self) -> Trial:
        """Return what is known of the layout."""
        name = layout_name(self.layout)
        if self.misfit is not None:
            return Trial(
                name=name,
                layout=self.layout,
                reason=self.misfit.reason,
                missing_bytes=self.misfit.missing_bytes,
            )
        if not self.is_finished:
            return Trial(
                name=name,
                layout=self.layout,
                at_least_s=self.at_least_s,
                bound_s=self.bound_s,
            )
        makespan_s = sum(lap.makespan_s for lap in self.laps) / len(self.laps)
        return Trial(
            name=name,
            layout=self.layout,
            step_s=self.at_least_s,
            makespan_s=makespan_s,
            at_least_s=self.at_least_s,
            bound_s=self.bound_s,
            peak_bytes=max(lap.peak_bytes for lap in self.laps),
        )


@dataclass(frozen=True)
class _Task:
    """What a worker does for a layout."""

    pipeline: Pipeline
    batch: Batch | None
    """None for the longest sequence of the plan, alone."""


def _race(
    racers: SequenceOf[_Racer],
    run: Callable[[_Task], _Lap | _Misfit | None],
    sample: SequenceOf[Batch],
    workers: Workers,
    progress: Progress | None,
) -> None:
    """Plan the sample on every layout until its bound excludes it, the most promising first."""
    # A step is planned once, and so is the longest sequence.
    num_plans = (1 + len(sample)) * len(racers)
    while True:
        finished_s = [racer.at_least_s for racer in racers if racer.is_finished]
        best_s = min(finished_s, default=math.inf)
        unfinished = [racer for racer in racers if racer.num_plans_left > 0]
        runners = [racer for racer in unfinished if racer.at_least_s < best_s]
        if progress is not None:
            num_left = sum(racer.num_plans_left for racer in runners)
            progress(num_plans - num_left, num_plans)
        if not runners:
            return
        wave = _next_wave(runners)
        tasks = [racer.task(ahead, sample) for racer, ahead in wave]
        for (racer, _), outcome in zip(wave, workers.map(run, tasks), strict=True):
            racer.take(outcome)


def _next_wave(runners: SequenceOf[_Racer]) -> list[tuple[_Racer, int]]:
    """Return what is planned next: racers, and how many of their plans come before each.

    One of each that is about as fast as the fastest, as far as one can tell; then more of the
    fastest.
    """
    ordered = sorted(runners, key=lambda racer: racer.expected_s)
    within_s = _CLOSE_RACE * ordered[0].expected_s
    close = [racer for racer in ordered if racer.expected_s <= within_s]
    wave = []
    for ahead in range(_WAVE):
        wave += [(racer, ahead) for racer in close if racer.num_plans_left > ahead]
    return wave[:_WAVE]


def _run_task(task: _Task, policy: str, longest: Batch) -> _Lap | _Misfit | None:
    """Plan a step; or find out whether the longest sequence fits, and return None if it does."""
    pipeline = task.pipeline
    try:
        if task.batch is None:
            check_longest(pipeline, policy, longest)
            return None
        # How the loss is averaged takes no time.
        step = plan_step(pipeline, POLICIES[policy], task.batch, "token")
    except InfeasibleError as error:
        return _misfit(error)
    predictions = chain.from_iterable(replica.predicted for replica in step.replicas)
    return _Lap(
        step_s=step.step_s,
        makespan_s=step.makespan_s,
        peak_bytes=max(prediction.peak_bytes for prediction in predictions),
    )


def _misfit(error: InfeasibleError) -> _Misfit:
    return _Misfit(str(error), error.missing_bytes)


def _step_bound_s(pipeline: Pipeline, batch: Batch) -> float:
    """Return the seconds that no plan of a step can undercut."""
    bound_s = makespan_bound(pipeline, batch.sequences, pipeline.num_replicas)
    return bound_s + pipeline.costs.end_of_step_s


def _rank(trial: Trial) -> tuple[int, float, int]:
    """Order trials: the fastest first, then by bounds, then by what is lacking.

    Where not even the model fits, layouts of more stages come closer.
    """
    if trial.step_s is not None:
        return (0, trial.step_s, 0)
    if trial.reason is None:
        return (1, trial.at_least_s, 0)
    num_stages = trial.layout.num_stages if trial.layout else 0
    return (2, trial.missing_bytes, -num_stages)
