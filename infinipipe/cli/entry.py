"""The `infinipipe` command: the only place that prints and exits.

Every command imports what it needs when it runs, so that only `profile` and `run` wait for torch.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from infinipipe import __version__
from infinipipe.aliases import Progress
from infinipipe.errors import InfinipipeError, InputError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from infinipipe.ir import LossNorm, PlanReader, Step
    from infinipipe.planner.compare import Cell
    from infinipipe.profiles import Profile


INTERRUPTED = 130
"""What a shell reports for SIGINT."""

_UNITS = {"": 1, "B": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("IB", 1024))
}


class MemoryLimits(click.ParamType[tuple[int, ...]]):
    """Bytes with a unit, such as `80GiB`; a comma list gives every stage its own limit."""

    name = "size"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Return the bytes."""
        limits = tuple(_parse_bytes(part) for part in str(value).split(","))
        if not all(limits):
            self.fail(
                f"{value!r} is no size such as 80GiB, 512MiB, 40GB or 40GiB,80GiB", param, ctx
            )
        return limits


def _parse_bytes(text: str) -> int:
    """Return the bytes, 0 for what is no size."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text, re.ASCII)
    return int(float(match[1]) * _UNITS.get(match[2].upper(), 0)) if match else 0


_PATH = click.Path(path_type=Path)
_COUNT = click.IntRange(min=1)


class _Counts(click.ParamType[tuple[int, ...]]):
    """Positive numbers, separated by commas."""

    name = "n,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        return tuple(_COUNT(part, param, ctx) for part in str(value).split(","))


_SEED = click.IntRange(min=0, max=2**63 - 1)


class _InOrder(click.Group):
    """Lists the commands in the order in which they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(
    cls=_InOrder, context_settings={"help_option_names": ["-h", "--help"], "show_default": True}
)
@click.version_option(__version__, prog_name="infinipipe")
def cli() -> None:
    """Plan and run pipeline-parallel training of LLMs on long, variable-length sequences.

    \b
    infinipipe profile                  measure this machine    -> profile.json
    infinipipe compile dataset.jsonl    lengths -> schedule     -> plan.msgpack
    infinipipe run plan.msgpack         replay it: train        -> infinipipe-run/
    """


@cli.command()
@click.argument("model", default="tiny")
@click.option(
    "-o",
    "--output",
    type=_PATH,
    help="Profile to write.  [default: profile.json; the one to --refine]",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    help="Device to measure.",
)
@click.option("--quick", is_flag=True, help="Measure in half the time, less accurately.")
@click.option(
    "--analytic",
    metavar="DEVICE",
    help="Compute the profile of a device that is not here: a800-80g, ...",
)
@click.option(
    "--refine",
    type=_PATH,
    metavar="RUN_DIR",
    help="Correct a profile's times by what a run of it measured.",
)
@click.option(
    "-p", "--profile", "source", type=_PATH, default="profile.json", help="Profile to refine."
)
@click.option("--show", type=_PATH, metavar="FILE", help="Show a profile and how accurate it is.")
@click.option(
    "--html",
    type=_PATH,
    metavar="FILE",
    help="With --show: write a page that plots measured against fitted.",
)
def profile(
    model: str,
    output: Path | None,
    device: str,
    quick: bool,
    analytic: str | None,
    refine: Path | None,
    source: Path,
    show: Path | None,
    html: Path | None,
) -> None:
    """Measure what MODEL costs on this machine, in seconds and in bytes.

    MODEL is a preset (tiny, llama-7b, llama-13b, llama-30b, ...), a Hugging Face model directory or a config.json.
    """
    from infinipipe.files import check_output
    from infinipipe.profiles import read_profile, write_profile

    _check_profile_options(click.get_current_context())
    if show is not None:
        _show_profile(read_profile(show), show, html)
        return
    output = output or (source if refine is not None else Path("profile.json"))
    if refine is not None:
        from infinipipe.measure.refine import refine_profile
        from infinipipe.run_record import read_run

        check_output(output, "--output")
        result = refine_profile(read_profile(source), read_run(refine), refine)
    else:
        check_output(output, "--output", Path(model))
        result = _make_profile(model, device, quick, analytic)
    write_profile(result, output)
    _say(f"{output}: {result.model.name} on {result.device.name}, {result.source}")
    for line in _accuracy_lines(result):
        _say(line)


@cli.command("compile")
@click.argument("dataset", type=_PATH)
@click.option(
    "-p",
    "--profile",
    "profile_path",
    type=_PATH,
    default="profile.json",
    help="Profile to plan with.",
)
@click.option("-o", "--output", type=_PATH, default="plan.msgpack", help="Plan to write.")
@click.option(
    "--stages", type=_COUNT, metavar="N", help="Pipeline stages.  [default: the profile's devices]"
)
@click.option(
    "--replicas", type=_COUNT, metavar="N", default=1, help="Data-parallel copies of the pipeline."
)
@click.option(
    "--memory", type=MemoryLimits(), help="Limit of each stage: 80GiB, or one each: 40GiB,80GiB."
)
@click.option("--batch-size", type=_COUNT, metavar="N", help="Sequences in a step.  [default: 512]")
@click.option(
    "--max-length", type=_COUNT, metavar="N", help="Cut longer sequences to so many tokens."
)
@click.option(
    "--steps", type=_COUNT, metavar="N", help="Steps to plan.  [default: once through the dataset]"
)
@click.option("--seed", type=_SEED, metavar="N", default=0, help="Draws the batches.")
@click.option("--policy", default="epp", help="How to schedule.")
@click.option(
    "--loss-norm",
    type=click.Choice(["token", "sequence"]),
    default="token",
    help="What the loss averages.",
)
@click.option(
    "--workers", type=_COUNT, metavar="N", help="Planning processes.  [default: one per core]"
)
@click.option(
    "--resume", is_flag=True, help="Go on with an interrupted compile of the same inputs."
)
def compile_(
    dataset: Path,
    profile_path: Path,
    output: Path,
    stages: int | None,
    replicas: int,
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
    """Plan every step of training on DATASET.

    DATASET is JSON Lines, plain or gzip. A line has "text", or "input_ids" and perhaps "labels", or only "length".
    """
    from infinipipe.dataset import open_dataset
    from infinipipe.files import check_output
    from infinipipe.ir.file.store import open_plan
    from infinipipe.planner.compile import compile_plan
    from infinipipe.planner.options import CompileOptions
    from infinipipe.profiles import read_profile
    from infinipipe.reports.compiled import plan_report

    options = CompileOptions(
        num_stages=stages,
        num_replicas=replicas,
        memory_limit_bytes=memory,
        batch_size=batch_size,
        num_steps=steps,
        seed=seed,
        policy=policy,
        loss_norm=loss_norm,
    )
    check_output(output, "--output", dataset, profile_path)
    costs = read_profile(profile_path)
    with _progress("read") as progress:
        data = open_dataset(
            dataset, costs.model.tokenizer, costs.model.vocabulary_size, max_length, progress
        )
    with _progress("compile") as progress:
        num_workers, began = workers or len(os.sched_getaffinity(0)), time.monotonic()
        try:
            compile_plan(
                data, costs, options, output, progress, resume=resume, num_workers=num_workers
            )
        except KeyboardInterrupt:
            _say(f"{output}: interrupted; the same command with --resume goes on")
            raise
    planning_s = time.monotonic() - began
    with open_plan(output) as reader:
        _say(f"{output}: {reader.header.model.name} on {costs.device.name}, {costs.source} profile")
        for line in plan_report(reader, data.num_cut_tokens, planning_s):
            _say(line)


@cli.command()
@click.argument("dataset", type=_PATH)
@click.option(
    "-p",
    "--profile",
    "profile_path",
    type=_PATH,
    default="profile.json",
    help="Profile to plan with.",
)
@click.option(
    "--stages",
    type=_Counts(),
    help="Pipeline stages, or several choices: 4,8.  [default: the profile's]",
)
@click.option(
    "--replicas", type=_COUNT, metavar="N", default=1, help="Data-parallel copies of the pipeline."
)
@click.option(
    "--memory", type=MemoryLimits(), help="Limit of every stage, or several choices: 40GiB,80GiB."
)
@click.option("--batch-size", type=_COUNT, metavar="N", help="Sequences in a step.  [default: 512]")
@click.option(
    "--max-length", type=_COUNT, metavar="N", help="Cut longer sequences to so many tokens."
)
@click.option(
    "--steps", type=_COUNT, metavar="N", default=4, help="Steps to plan with each policy."
)
@click.option("--seed", type=_SEED, metavar="N", default=0, help="Draws the batches.")
@click.option(
    "--loss-norm",
    type=click.Choice(["token", "sequence"]),
    default="token",
    help="What the loss averages.",
)
@click.option("--policies", metavar="A,B,...", help="Which to compare.  [default: all]")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print a list with an object per policy instead of tables.",
)
def compare(
    dataset: Path,
    profile_path: Path,
    stages: tuple[int, ...] | None,
    replicas: int,
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

    Several choices of --stages and --memory make a grid.
    """
    from infinipipe.dataset import open_dataset
    from infinipipe.planner.compare import compare_grid
    from infinipipe.planner.options import CompileOptions
    from infinipipe.planner.policies import POLICIES
    from infinipipe.profiles import read_profile

    options = CompileOptions(
        num_replicas=replicas,
        batch_size=batch_size,
        num_steps=steps,
        seed=seed,
        loss_norm=loss_norm,
    )
    costs = read_profile(profile_path)
    with _progress("read") as progress:
        data = open_dataset(
            dataset, costs.model.tokenizer, costs.model.vocabulary_size, max_length, progress
        )
    names = (
        tuple(POLICIES) if policies is None else tuple(name.strip() for name in policies.split(","))
    )
    with _progress("compare") as progress:
        cells = compare_grid(data, costs, options, stages or (), memory or (), names, progress)
    _say(f"{costs.model.name} on {costs.device.name}, {costs.source} profile")
    _print_comparison(cells, as_json)


@cli.command()
@click.argument("plan", type=_PATH)
@click.option("--step", "index", type=click.IntRange(min=0), metavar="K", help="Show step K whole.")
@click.option(
    "--all", "everything", is_flag=True, help="Show the header and every step whole, one a line."
)
@click.option(
    "--table",
    is_flag=True,
    help="Show tables instead of JSON; with --step that step's chunks and programs.",
)
@click.option(
    "--html",
    type=_PATH,
    metavar="FILE",
    help="Write a page that draws timelines.  [default: every step's]",
)
@click.option(
    "--trace",
    type=_PATH,
    metavar="FILE",
    help="Write a step's timeline for Perfetto.  [default: step 0]",
)
@click.option(
    "--csv",
    type=_PATH,
    metavar="FILE",
    help="Write a step's programs for torch.  [default: step 0]",
)
@click.option(
    "--replica",
    type=click.IntRange(min=0),
    metavar="N",
    default=0,
    help="Whose programs --csv writes.",
)
@click.option("--schema", is_flag=True, help="Show the JSON Schema of all that inspect shows.")
def inspect(
    plan: Path,
    index: int | None,
    everything: bool,
    table: bool,
    html: Path | None,
    trace: Path | None,
    csv: Path | None,
    replica: int,
    schema: bool,
) -> None:
    """Show PLAN as JSON: the header, totals and a summary of each step."""
    from infinipipe.files import check_output
    from infinipipe.ir.file.store import open_plan

    views = {"--html": html, "--trace": trace, "--csv": csv}
    files = {option: path for option, path in views.items() if path is not None}
    if everything + table + schema + bool(files) > 1 or (
        index is not None and (everything or schema)
    ):
        raise click.UsageError(
            "choose one of --all, --table, --schema and files to write; --step is for one step"
        )
    if len(set(files.values())) < len(files):
        raise click.UsageError("give every view a file of its own")
    for option, path in files.items():
        check_output(path, option, plan)
    with open_plan(plan) as reader:
        if files:
            _write_views(reader, index, replica, files)
        elif table:
            _print_plan_tables(reader, index)
        else:
            _print_documents(reader, index, everything, schema)


@cli.command()
@click.argument("plan", type=_PATH)
@click.option(
    "--data",
    type=_PATH,
    metavar="DATASET",
    help="Also check that the plan was compiled from this dataset.",
)
def verify(plan: Path, data: Path | None) -> None:
    """Check every byte and every rule of PLAN, and that its times and peaks are what its profile gives."""
    from infinipipe.ir.file.check import verify_plan
    from infinipipe.ir.file.store import open_plan
    from infinipipe.reports.verification import Proof, open_planned_dataset

    with open_plan(plan) as reader:
        dataset = None
        if data is not None:
            with _progress("read") as progress:
                dataset = open_planned_dataset(reader, data, progress)
        proof = Proof(reader.header, dataset)
        with _progress("verify") as progress:

            def add(step: Step) -> None:
                proof.add(step)
                progress(step.index + 1, reader.num_steps)

            report = verify_plan(reader, add)
    for line in proof.lines(report):
        click.echo(line)
    _say(f"{plan}: the plan is valid")


@cli.command()
@click.argument("plan", type=_PATH)
@click.option(
    "--data",
    type=_PATH,
    metavar="DATASET",
    help="Where the plan's dataset is.  [default: as the plan says]",
)
@click.option(
    "--model", type=_PATH, metavar="DIR", help="Start from the weights of a Hugging Face directory."
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    help="Device to train on.",
)
@click.option(
    "--steps",
    type=_COUNT,
    metavar="N",
    help="Stop after so many steps.  [default: all of the plan]",
)
@click.option(
    "--lr", type=click.FloatRange(min=0), metavar="X", default=3e-4, help="Learning rate of AdamW."
)
@click.option("--seed", type=_SEED, metavar="N", default=0, help="Draws random weights.")
@click.option(
    "--output",
    type=_PATH,
    metavar="DIR",
    default="infinipipe-run",
    help="Folder for metrics and weights.",
)
def run(
    plan: Path,
    data: Path | None,
    model: Path | None,
    device: str,
    steps: int | None,
    lr: float,
    seed: int,
    output: Path,
) -> None:
    """Train as PLAN says, with one process per stage and replica.

    Starts its own processes on this machine, or is one of them under torchrun.
    """
    from infinipipe.runtime.launch import run_plan
    from infinipipe.runtime.prepare import RunOptions

    run_plan(
        RunOptions(
            plan=plan,
            data=data,
            model=model,
            device=device,
            num_steps=steps,
            lr=lr,
            seed=seed,
            output=output,
        )
    )
    if os.environ.get("RANK", "0") == "0":
        _compare_run(plan, output)


def main() -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 wrong usage."""
    sys.exit(run_command(sys.argv[1:]))


def run_command(arguments: list[str]) -> int:
    """Run one command and return its exit code; what a user can cause is reported here, in one line."""
    try:
        cli.main(arguments, prog_name="infinipipe", standalone_mode=False)
    except InfinipipeError as error:
        for note in getattr(error, "__notes__", ()):
            _say(note)
        _say(f"error: {error}")
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return INTERRUPTED
    return 0


@contextmanager
def _progress(what: str) -> Iterator[Progress]:
    """Show a progress bar on stderr while something runs, if somebody can see it move."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    with Bar(console=console, transient=True, disable=not console.is_interactive) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _print_comparison(cells: list[Cell], as_json: bool) -> None:
    from msgspec import to_builtins

    from infinipipe.reports.compiled import compare_tables

    if not as_json:
        _print_tables(compare_tables(cells))
        return
    rows = [
        {
            "stages": cell.num_stages,
            "memory_limit_bytes": cell.memory_limit_bytes,
            **to_builtins(row),
        }
        for cell in cells
        for row in cell.rows
    ]
    click.echo(_json(rows, indent=2))


_PROFILE_OPTIONS = {
    "measure": {"model", "output", "device", "quick"},
    "analytic": {"model", "output", "analytic"},
    "refine": {"output", "refine", "source"},
    "show": {"show", "html"},
}
"""What each way to get a profile takes."""


def _check_profile_options(context: click.Context) -> None:
    """Refuse an argument that would be ignored."""
    given = [
        param
        for param in context.command.params
        if param.name is not None
        and context.get_parameter_source(param.name) is click.core.ParameterSource.COMMANDLINE
    ]
    ways = [param.name for param in given if param.name in _PROFILE_OPTIONS]
    if len(ways) > 1:
        raise click.UsageError("choose one of --analytic, --refine and --show")
    way = next(iter(ways), None) or "measure"
    for param in given:
        if param.name not in _PROFILE_OPTIONS[way]:
            name = param.opts[-1] if isinstance(param, click.Option) else param.human_readable_name
            others = [
                f"--{w}"
                for w, taken in _PROFILE_OPTIONS.items()
                if w != "measure" and param.name in taken
            ]
            hint = (
                f"goes with {' or '.join(others)}"
                if others and way == "measure"
                else f"is not used with --{way}"
            )
            raise click.UsageError(f"{name} {hint}")


def _make_profile(model: str, device: str, quick: bool, analytic: str | None) -> Profile:
    from infinipipe.profiles import read_model

    shape = read_model(model)
    if analytic is not None:
        from infinipipe.profiles.analytic import analytic_profile

        return analytic_profile(shape, analytic)
    from infinipipe.measure.measure import measure_profile

    with _progress("profile") as progress:
        return measure_profile(shape, device=device, quick=quick, progress=progress)


def _accuracy_lines(profile: Profile) -> Iterator[str]:
    for row in profile.accuracy:
        if row.held_out:
            yield f"  {row.op:<11} {row.median_error:.1%} median error on {row.num_samples} chunks held out"
    for refinement in profile.refinements[-1:]:
        yield f"  {'refined':<11} times x {refinement.scale:.3f}"


def _show_profile(profile: Profile, path: Path, html: Path | None) -> None:
    from infinipipe.files import check_output, write_output
    from infinipipe.reports.profile_table import profile_tables

    if html is not None:
        from infinipipe.reports.profile_page import profile_page

        check_output(html, "--html", path)
        write_output(html, "--html", profile_page(profile))
        _say(f"{html}: written")
    _print_tables(profile_tables(profile))


def _compare_run(plan: Path, output: Path) -> None:
    """Say how the run went against its predictions, and leave what it followed with it."""
    from infinipipe.ir.file.store import open_plan
    from infinipipe.run_record import compare_run, read_run, record_run

    with open_plan(plan) as reader:
        record_run(output, reader.header, reader.sha256)
    for line in compare_run(read_run(output), output):
        _say(line)


def _print_documents(reader: PlanReader, index: int | None, everything: bool, schema: bool) -> None:
    from infinipipe.reports.plan_view import (
        header_document,
        plan_document,
        plan_schema,
        step_document,
    )

    if everything:
        click.echo(_json(header_document(reader.header)))
        for step in _steps(reader):
            click.echo(_json(step_document(reader.header, step)))
    elif schema:
        click.echo(_json(plan_schema(), indent=2))
    elif index is not None:
        click.echo(_json(step_document(reader.header, reader.step(index)), indent=2))
    else:
        click.echo(_json(plan_document(reader, _steps(reader)), indent=2))


def _print_plan_tables(reader: PlanReader, index: int | None) -> None:
    from infinipipe.reports.plan_table import plan_tables, step_tables

    _print_tables(
        plan_tables(reader, _steps(reader))
        if index is None
        else step_tables(reader.header, reader.step(index))
    )


def _print_tables(tables: RenderableType) -> None:
    from rich.console import Console

    # A pipe or a file has no width of its own to fit.
    Console(width=None if sys.stdout.isatty() else 120).print(tables)


def _steps(reader: PlanReader) -> Iterator[Step]:
    """Yield every step and show how many there have been."""
    with _progress("read") as progress:
        for step in reader:
            yield step
            progress(step.index + 1, reader.num_steps)


def _write_views(
    reader: PlanReader, index: int | None, replica: int, files: dict[str, Path]
) -> None:
    from infinipipe.costs.predict import Span, step_spans
    from infinipipe.files import write_output
    from infinipipe.ir.file.encoding import named_faults
    from infinipipe.reports.plan_page import plan_page
    from infinipipe.reports.timeline import chrome_trace, schedule_csv

    header = reader.header

    def spans(step: Step) -> tuple[Span, ...]:
        with named_faults(reader.path):
            return step_spans(header, step)

    def page() -> str:
        steps = _steps(reader) if index is None else [reader.step(index)]
        return plan_page(header, ((step, spans(step)) for step in steps))

    def trace() -> str:
        step = reader.step(index or 0)
        return _json(chrome_trace(header, step, spans(step)))

    def csv() -> str:
        replicas = reader.step(index or 0).replicas
        if replica >= len(replicas):
            raise InputError(
                f"{reader.path}: no replica {replica}; choose 0 to {len(replicas) - 1} with --replica"
            )
        return schedule_csv(replicas[replica])

    makers = {"--html": page, "--trace": trace, "--csv": csv}
    for option, path in files.items():
        write_output(path, option, makers[option]())
        _say(f"{path}: written")


def _json(document: object, indent: int = 0) -> str:
    import msgspec

    encoded = msgspec.json.encode(document)
    return (msgspec.json.format(encoded, indent=indent) if indent else encoded).decode()


def _say(line: str) -> None:
    click.echo(line, err=True)
