"""Every system on its best layout: our policies, and systems that only the simulator knows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import partial

from infinipipe.aliases import Progress
from infinipipe.dataset import Dataset
from infinipipe.errors import InfeasibleError, InputError
from infinipipe.planner.batches import Batch
from infinipipe.planner.compile import infeasible, make_pipeline
from infinipipe.planner.layouts import (
    LayoutSearch,
    Trial,
    pure_work_seconds,
    sample_steps,
    search_layouts,
)
from infinipipe.planner.options import CompileOptions
from infinipipe.planner.passes.recompute import Shortage
from infinipipe.planner.policies import ONE_STAGE, POLICIES
from infinipipe.planner.rivals.flexsp import MixedGroups, MixedPlan, plan_flexsp
from infinipipe.planner.rivals.megatron import ring_pipeline
from infinipipe.planner.workers import Workers
from infinipipe.profiles import Profile

SYSTEMS = ("epp", "seq1f1b", "1f1b", "deepspeed", "flexsp", "megatron")
"""What is compared if nothing else is asked for: ours first, then published ones."""
_PRICED = ("flexsp", "megatron")
"""Systems that have no plans to run."""
_UNIFORM = "deepspeed"
"""The system whose groups are all of one size."""
_MIXED = "1 x mixed"
"""The name of groups of any sizes, which are no layout."""


@dataclass(frozen=True)
class Contest:
    """Systems on so many devices with so much memory."""

    num_devices: int
    memory_limit_bytes: int
    searches: dict[str, LayoutSearch]
    """The layouts of each system, by its name."""


def compare_systems(
    dataset: Dataset,
    profile: Profile,
    options: CompileOptions,
    devices: SequenceOf[int],
    memories: SequenceOf[int] = (),
    systems: SequenceOf[str] | None = None,
    progress: Progress | None = None,
    num_workers: int = 1,
) -> list[Contest]:
    """Search the best layout of each system for every choice of devices and of memory.

    Raises:
        InputError: a system is unknown, or the options do not fit the profile or the dataset.
    """
    systems = SYSTEMS if systems is None else systems
    known = (*POLICIES, *_PRICED)
    unknown = [system for system in systems if system not in known]
    if unknown:
        raise InputError(f"--policies {unknown[0]}: no such system; there are {', '.join(known)}")
    choices = list(_choices(profile, options, devices, memories))
    for choice in choices:
        # What no system could use is said before any is planned.
        choice.layouts(profile)
    num_searches = len(choices) * len(systems)
    contests: list[Contest] = []
    for choice in choices:
        searches: dict[str, LayoutSearch] = {}
        for system in systems:
            first = len(contests) * len(systems) + len(searches)
            advance = _part_of(progress, first, num_searches)
            searches[system] = _search(system, dataset, profile, choice, advance, num_workers)
        limits = choice.memory_limit_bytes or (profile.device.memory_bytes,)
        contests.append(Contest(choice.num_devices or 0, min(limits), searches))
    return contests


def _choices(
    profile: Profile,
    options: CompileOptions,
    devices: SequenceOf[int],
    memories: SequenceOf[int],
) -> Iterator[CompileOptions]:
    for num_devices in devices:
        for memory in memories or (profile.device.memory_bytes,):
            yield replace(options, num_devices=num_devices, memory_limit_bytes=(memory,))


def _part_of(progress: Progress | None, first: int, num_parts: int) -> Progress | None:
    """Return what tells a part's progress as that of the whole."""
    if progress is None:
        return None

    def advance(done: int, total: int) -> None:
        progress(first * total + done, num_parts * total)

    return advance


def _search(
    system: str,
    dataset: Dataset,
    profile: Profile,
    options: CompileOptions,
    progress: Progress | None,
    num_workers: int,
) -> LayoutSearch:
    """Search a system's layouts; where it has none of these devices, that is its one trial."""
    if system in (*ONE_STAGE, "flexsp") and options.num_stages not in (None, 1):
        trial = Trial(
            name="none", layout=None, reason=f"{system} has one stage, not {options.num_stages}"
        )
        return _search_of_one(dataset, profile, options, trial)
    try:
        return _search_layouts(system, dataset, profile, options, progress, num_workers)
    except InputError as error:
        # Others may have a layout of these devices.
        trial = Trial(name="none", layout=None, reason=str(error))
        return _search_of_one(dataset, profile, options, trial)


def _search_layouts(
    system: str,
    dataset: Dataset,
    profile: Profile,
    options: CompileOptions,
    progress: Progress | None,
    num_workers: int,
) -> LayoutSearch:
    match system:
        case "flexsp":
            mixed = _search_flexsp(dataset, profile, options, progress, num_workers)
            # Groups of one size are among its choices.
            uniform = _search(_UNIFORM, dataset, profile, options, None, num_workers)
            return min(mixed, uniform, key=_best_seconds)
        case "megatron":
            mine = replace(options, policy="1f1b")
            layouts = mine.layouts(profile, across_nodes=True, share_heads=False)
            return search_layouts(
                dataset, profile, mine, layouts, progress, num_workers, ring_pipeline
            )
        case _:
            mine = replace(options, policy=system)
            layouts = mine.layouts(profile)
            return search_layouts(dataset, profile, mine, layouts, progress, num_workers)


def _search_flexsp(
    dataset: Dataset,
    profile: Profile,
    options: CompileOptions,
    progress: Progress | None,
    num_workers: int,
) -> LayoutSearch:
    """Price the sample with groups of any sizes."""
    one_stage = replace(options, num_stages=1)
    by_size = {}
    try:
        for layout in one_stage.layouts(profile, across_nodes=True):
            request = one_stage.resolve(profile, len(dataset), layout)
            by_size[layout.sequence_parallel] = make_pipeline(dataset, profile, request)
    except InfeasibleError as error:
        trial = Trial(name=_MIXED, layout=None, reason=str(error))
        return _search_of_one(dataset, profile, options, trial)
    groups = MixedGroups(by_size)
    sample = sample_steps(dataset, request)
    plans = []
    with Workers(num_workers) as workers:
        for plan in workers.map(partial(_plan_mixed, groups), sample):
            plans.append(plan)
            if progress is not None:
                progress(len(plans), len(sample))
    trial = _mixed_trial(groups, sample, plans)
    return _search_of_one(dataset, profile, options, trial)


def _best_seconds(search: LayoutSearch) -> float:
    best = search.best
    return math.inf if best is None or best.step_s is None else best.step_s


def _plan_mixed(groups: MixedGroups, batch: Batch) -> MixedPlan | Shortage:
    # A worker process finds functions by name.
    return plan_flexsp(groups, batch.sequences)


def _mixed_trial(
    groups: MixedGroups, sample: SequenceOf[Batch], plans: SequenceOf[MixedPlan | Shortage]
) -> Trial:
    """Return what the plans of a sample come to."""
    planned: list[MixedPlan] = []
    for batch, plan in zip(sample, plans, strict=True):
        if isinstance(plan, Shortage):
            error = infeasible(groups.largest, batch.index, plan)
            return Trial(name=_MIXED, layout=None, reason=str(error))
        planned.append(plan)
    makespan_s = sum(plan.makespan_s for plan in planned) / len(planned)
    # Groups of all sizes share the optimizer's state among all devices.
    step_s = makespan_s + groups.largest.costs.end_of_step_s
    return Trial(
        name=_MIXED,
        layout=None,
        step_s=step_s,
        makespan_s=makespan_s,
        at_least_s=step_s,
        peak_bytes=max(plan.peak_bytes for plan in planned),
    )


def _search_of_one(
    dataset: Dataset, profile: Profile, options: CompileOptions, trial: Trial
) -> LayoutSearch:
    """Return the search of a system that has one way to use the devices."""
    num_devices = options.num_devices or 1
    request = options.resolve(profile, len(dataset), options.layouts(profile)[0])
    sample = sample_steps(dataset, request)
    return LayoutSearch(
        num_devices=num_devices,
        trials=(trial,),
        num_steps=len(sample),
        pure_work_s=pure_work_seconds(profile, sample) / num_devices,
    )
