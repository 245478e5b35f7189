"""`infinipipe compile` and `infinipipe compare`: plan a dataset by one policy or by several."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from infinipipe.cli.arguments import COUNT, PATH, SEED, Counts, MemoryLimits
from infinipipe.cli.console import progress_bar, say, say_tables, show_json, show_tables

if TYPE_CHECKING:
    from infinipipe.dataset import Dataset
    from infinipipe.ir import LossNorm
    from infinipipe.profiles import Profile

_Function = Callable[..., Any]
_Option = Callable[[_Function], _Function]

_DATASET = click.argument("dataset", type=PATH)
_PROFILE = click.option(
    "-p",
    "--profile",
    "profile_path",
    type=PATH,
    default="profile.json",
    help="Profile to plan with.",
)
_SEQUENCE_PARALLEL = click.option(
    "--sequence-parallel",
    type=COUNT,
    metavar="N",
    help="Devices that share every sequence of a stage; a search keeps them in one node.",
)
_REPLICAS = click.option(
    "--replicas", type=COUNT, metavar="N", help="Data-parallel copies of the pipeline."
)
_DEVICES_PER_NODE = click.option(
    "--devices-per-node",
    type=COUNT,
    metavar="N",
    help="Devices that fast links join.  [default: those of the profile's machine]",
)
_BATCH_SIZE = click.option(
    "--batch-size", type=COUNT, metavar="N", help="Sequences in a step.  [default: 512]"
)
_MAX_LENGTH = click.option(
    "--max-length", type=COUNT, metavar="N", help="Cut longer sequences to so many tokens."
)
_SEED = click.option("--seed", type=SEED, metavar="N", default=0, help="Draws the batches.")
_LOSS_NORM = click.option(
    "--loss-norm",
    type=click.Choice(["token", "sequence"]),
    default="token",
    help="What the loss averages.",
)


def planning_options(
    *,
    devices: _Option,
    stages: _Option,
    memory: _Option,
    steps: _Option,
    output: _Option | None = None,
    policy: _Option | None = None,
) -> _Option:
    """Give a command the options of planning; it says itself what differs between commands."""
    in_order = (
        _DATASET,
        _PROFILE,
        output,
        devices,
        stages,
        _SEQUENCE_PARALLEL,
        _REPLICAS,
        _DEVICES_PER_NODE,
        memory,
        _BATCH_SIZE,
        _MAX_LENGTH,
        steps,
        _SEED,
        policy,
        _LOSS_NORM,
    )

    def decorate(function: _Function) -> _Function:
        # Decorators nearest the function come last in its help.
        for option in reversed(in_order):
            if option is not None:
                function = option(function)
        return function

    return decorate


@click.command("compile")
@planning_options(
    output=click.option("-o", "--output", type=PATH, default="plan.msgpack", help="Plan to write."),
    devices=click.option(
        "--devices",
        type=COUNT,
        metavar="N",
        help="Devices to use, all of them: stages x sequence parallelism x replicas. What is not "
        "given of these is searched.  [default: the profile's, or as many as what is given takes]",
    ),
    stages=click.option("--stages", type=COUNT, metavar="N", help="Pipeline stages."),
    memory=click.option(
        "--memory",
        type=MemoryLimits(),
        help="Limit of a device of each stage: 80GiB, or one each: 40GiB,80GiB.",
    ),
    steps=click.option(
        "--steps",
        type=COUNT,
        metavar="N",
        help="Steps to plan.  [default: once through the dataset]",
    ),
    policy=click.option("--policy", default="epp", help="How to schedule."),
)
@click.option(
    "--workers", type=COUNT, metavar="N", help="Planning processes.  [default: one per core]"
)
@click.option(
    "--resume", is_flag=True, help="Go on with an interrupted compile of the same inputs."
)
def compile_(
    dataset: Path,
    profile_path: Path,
    output: Path,
    devices: int | None,
    stages: int | None,
    sequence_parallel: int | None,
    replicas: int | None,
    devices_per_node: int | None,
    memory: tuple[int, ...] | None,
    batch_size: int | None,
    max_length: int | None,
    steps: int | None,
    seed: int,
    policy: str,
    loss_norm: LossNorm,
    workers: int | None,
    resume: bool,
) -> None:
    """Plan every step of training on DATASET, on the layout that is fastest for a sample of it.

    DATASET is JSON Lines, plain or gzip. A line has "text", or "input_ids" and perhaps "labels", or
    only "length".
    """
    from infinipipe.files import check_output
    from infinipipe.planner import CompileOptions, choose_layout, compile_plan
    from infinipipe.profiles import read_profile
    from infinipipe.reports.layouts import link_warning, search_table

    options = CompileOptions(
        num_devices=devices,
        num_stages=stages,
        sequence_parallel=sequence_parallel,
        num_replicas=replicas,
        devices_per_node=devices_per_node,
        memory_limit_bytes=memory,
        batch_size=batch_size,
        num_steps=steps,
        seed=seed,
        policy=policy,
        loss_norm=loss_norm,
    )
    check_output(output, "--output", dataset, profile_path)
    profile = read_profile(profile_path)
    rows = _open_dataset(dataset, profile, max_length)
    num_workers = workers or len(os.sched_getaffinity(0))
    with progress_bar("layouts") as progress:
        layout, search = choose_layout(rows, profile, options, progress, num_workers)
    if search is not None:
        say_tables(search_table(search))
    warning = link_warning(profile, layout)
    if warning is not None:
        say(warning)
    options = options.with_layout(layout)
    with progress_bar("compile") as progress:
        began = time.monotonic()
        try:
            compile_plan(
                rows, profile, options, output, progress, resume=resume, num_workers=num_workers
            )
        except KeyboardInterrupt:
            say(f"{output}: interrupted; the same command with --resume goes on")
            raise
    _report_plan(output, profile, rows.num_cut_tokens, time.monotonic() - began)


@click.command()
@planning_options(
    devices=click.option(
        "--devices",
        type=Counts(),
        help="Search the layouts of so many devices, or of several choices: 8,16. Every system is "
        "shown on its best one.",
    ),
    stages=click.option(
        "--stages",
        type=Counts(),
        help="Pipeline stages, or several choices: 4,8.  [default: the profile's]",
    ),
    memory=click.option(
        "--memory",
        type=MemoryLimits(),
        help="Limit of every stage, or several choices: 40GiB,80GiB.",
    ),
    steps=click.option(
        "--steps", type=COUNT, metavar="N", default=4, help="Steps to plan with each policy."
    ),
)
@click.option("--policies", metavar="A,B,...", help="Which to compare.  [default: all]")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print a list with an object per policy, or per layout, instead of tables.",
)
def compare(
    dataset: Path,
    profile_path: Path,
    devices: tuple[int, ...] | None,
    stages: tuple[int, ...] | None,
    sequence_parallel: int | None,
    replicas: int | None,
    devices_per_node: int | None,
    memory: tuple[int, ...] | None,
    batch_size: int | None,
    max_length: int | None,
    steps: int,
    seed: int,
    loss_norm: LossNorm,
    policies: str | None,
    as_json: bool,
) -> None:
    """Plan the same steps of DATASET with several policies and compare them by simulation.

    Several choices of --stages and --memory make a grid. With --devices, layouts are compared, and
    systems that only the simulator knows are among the rivals.
    """
    from infinipipe.planner import CompileOptions, compare_grid, compare_systems
    from infinipipe.profiles import read_profile
    from infinipipe.reports.compared import compare_rows, compare_tables
    from infinipipe.reports.layouts import contest_rows, contest_tables

    options = CompileOptions(
        sequence_parallel=sequence_parallel,
        num_replicas=replicas,
        devices_per_node=devices_per_node,
        batch_size=batch_size,
        num_steps=steps,
        seed=seed,
        loss_norm=loss_norm,
    )
    profile = read_profile(profile_path)
    rows = _open_dataset(dataset, profile, max_length)
    names = _split_names(policies)
    title = f"{profile.model.name} on {profile.device.name}, {profile.source} profile"
    if devices is None:
        with progress_bar("compare") as progress:
            cells = compare_grid(
                rows, profile, options, stages or (), memory or (), names, progress
            )
        say(title)
        if as_json:
            show_json(compare_rows(cells))
        else:
            show_tables(compare_tables(cells))
        return
    options = replace(options, num_stages=_only(stages))
    num_workers = len(os.sched_getaffinity(0))
    with progress_bar("layouts") as progress:
        contests = compare_systems(
            rows, profile, options, devices, memory or (), names, progress, num_workers
        )
    say(title)
    if as_json:
        show_json(contest_rows(contests))
    else:
        show_tables(contest_tables(contests))


def _open_dataset(path: Path, profile: Profile, max_length: int | None) -> Dataset:
    """Open a dataset for the profile's model."""
    from infinipipe.dataset import open_dataset

    model = profile.model
    with progress_bar("read") as progress:
        return open_dataset(path, model.tokenizer, model.vocabulary_size, max_length, progress)


def _only(stages: tuple[int, ...] | None) -> int | None:
    """Return the one choice of stages, None if there is none.

    Raises:
        InputError: there are several.
    """
    from infinipipe.errors import InputError

    if stages is None:
        return None
    if len(stages) > 1:
        choices = ",".join(map(str, stages))
        raise InputError(f"--stages {choices}: with --devices give one, or none to search them")
    return stages[0]


def _split_names(names: str | None) -> tuple[str, ...] | None:
    """Return the names of a list; None for all that there are."""
    if names is None:
        return None
    return tuple(name.strip() for name in names.split(","))


def _report_plan(path: Path, profile: Profile, num_cut_tokens: int, planning_s: float) -> None:
    from infinipipe.ir import open_plan
    from infinipipe.reports.compiled import plan_report

    with open_plan(path) as reader:
        model = reader.header.model
        say(f"{path}: {model.name} on {profile.device.name}, {profile.source} profile")
        for line in plan_report(reader, num_cut_tokens, planning_s):
            say(line)
