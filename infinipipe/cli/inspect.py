"""`infinipipe inspect` and `infinipipe verify`: look at a plan, and prove it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from infinipipe.cli.arguments import INDEX, PATH
from infinipipe.cli.console import (
    compact_json,
    progress_bar,
    read_steps,
    say,
    show,
    show_json,
    show_tables,
)
from infinipipe.errors import InputError

if TYPE_CHECKING:
    from infinipipe.costs import Span
    from infinipipe.dataset import Dataset
    from infinipipe.ir import PlanReader, Replica, Step


@click.command()
@click.argument("plan", type=PATH)
@click.option("--step", "index", type=INDEX, metavar="K", help="Show step K whole.")
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
    type=PATH,
    metavar="FILE",
    help="Write a page that draws timelines.  [default: every step's]",
)
@click.option(
    "--trace",
    type=PATH,
    metavar="FILE",
    help="Write a step's timeline for Perfetto.  [default: step 0]",
)
@click.option(
    "--csv",
    type=PATH,
    metavar="FILE",
    help="Write a step's programs for torch.  [default: step 0]",
)
@click.option("--replica", type=INDEX, metavar="N", default=0, help="Whose programs --csv writes.")
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
    from infinipipe.ir import open_plan

    named = {"--html": html, "--trace": trace, "--csv": csv}
    files = {option: path for option, path in named.items() if path is not None}
    kinds = [everything, table, schema, bool(files)]
    if kinds.count(True) > 1 or (index is not None and (everything or schema)):
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
            _show_plan_tables(reader, index)
        elif schema:
            _show_schema()
        elif everything:
            _show_everything(reader)
        else:
            _show_document(reader, index)


@click.command()
@click.argument("plan", type=PATH)
@click.option(
    "--data",
    type=PATH,
    metavar="DATASET",
    help="Also check that the plan was compiled from this dataset.",
)
def verify(plan: Path, data: Path | None) -> None:
    """Check every byte and every rule of PLAN, and that its times and peaks are what its profile
    gives.
    """
    from infinipipe.ir import open_plan, verify_plan
    from infinipipe.reports.verification import Verification

    with open_plan(plan) as reader:
        dataset = None if data is None else _open_dataset(reader, data)
        verification = Verification(reader.header, dataset)
        with progress_bar("verify") as progress:

            def add(step: Step) -> None:
                verification.add(step)
                progress(step.index + 1, reader.num_steps)

            report = verify_plan(reader, add)
    for line in verification.lines(report):
        show(line)
    say(f"{plan}: the plan is valid")


def _open_dataset(reader: PlanReader, path: Path) -> Dataset:
    from infinipipe.reports.verification import open_planned_dataset

    with progress_bar("read") as progress:
        return open_planned_dataset(reader, path, progress)


def _show_schema() -> None:
    from infinipipe.reports.plan_view import plan_schema

    show_json(plan_schema())


def _show_everything(reader: PlanReader) -> None:
    from infinipipe.reports.plan_view import header_document, step_document

    show(compact_json(header_document(reader.header)))
    for step in read_steps(reader):
        show(compact_json(step_document(reader.header, step)))


def _show_document(reader: PlanReader, index: int | None) -> None:
    from infinipipe.reports.plan_view import plan_document, step_document

    if index is None:
        show_json(plan_document(reader, read_steps(reader)))
    else:
        show_json(step_document(reader.header, reader.step(index)))


def _show_plan_tables(reader: PlanReader, index: int | None) -> None:
    from infinipipe.reports.plan_table import plan_tables, step_tables

    if index is None:
        show_tables(plan_tables(reader, read_steps(reader)))
    else:
        show_tables(step_tables(reader.header, reader.step(index)))


def _write_views(
    reader: PlanReader, index: int | None, replica: int, files: dict[str, Path]
) -> None:
    from infinipipe.files import write_output

    for option, path in files.items():
        if option == "--html":
            text = _page(reader, index)
        elif option == "--trace":
            text = _trace(reader, index or 0)
        else:
            text = _csv(reader, index or 0, replica)
        write_output(path, option, text)
        say(f"{path}: written")


def _page(reader: PlanReader, index: int | None) -> str:
    from infinipipe.reports.plan_page import plan_page

    steps: Iterable[Step] = read_steps(reader) if index is None else [reader.step(index)]
    return plan_page(reader.header, ((step, _spans(reader, step)) for step in steps))


def _trace(reader: PlanReader, index: int) -> str:
    from infinipipe.reports.timeline import chrome_trace

    step = reader.step(index)
    return compact_json(chrome_trace(reader.header, step, _spans(reader, step)))


def _csv(reader: PlanReader, index: int, replica: int) -> str:
    from infinipipe.reports.timeline import schedule_csv

    return schedule_csv(_find_replica(reader, index, replica))


def _find_replica(reader: PlanReader, index: int, replica: int) -> Replica:
    replicas = reader.step(index).replicas
    if replica >= len(replicas):
        last = len(replicas) - 1
        raise InputError(f"{reader.path}: no replica {replica}; choose 0 to {last} with --replica")
    return replicas[replica]


def _spans(reader: PlanReader, step: Step) -> tuple[Span, ...]:
    from infinipipe.costs import step_spans
    from infinipipe.ir.file.encoding import named_faults

    with named_faults(reader.path):
        return step_spans(reader.header, step)
