"""`infinipipe run`: train as a plan says, and say how that went against its predictions."""

from __future__ import annotations

import os
from pathlib import Path

import click

from infinipipe.cli.arguments import COUNT, DEVICE, PATH, SEED
from infinipipe.cli.console import say


@click.command()
@click.argument("plan", type=PATH)
@click.option(
    "--data",
    type=PATH,
    metavar="DATASET",
    help="Where the plan's dataset is.  [default: as the plan says]",
)
@click.option(
    "--model", type=PATH, metavar="DIR", help="Start from the weights of a Hugging Face directory."
)
@click.option("--device", type=DEVICE, default="auto", help="Device to train on.")
@click.option(
    "--steps",
    type=COUNT,
    metavar="N",
    help="Stop after so many steps.  [default: all of the plan]",
)
@click.option(
    "--lr", type=click.FloatRange(min=0), metavar="X", default=3e-4, help="Learning rate of AdamW."
)
@click.option("--seed", type=SEED, metavar="N", default=0, help="Draws random weights.")
@click.option(
    "--output",
    type=PATH,
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
    from infinipipe.runtime import RunOptions, run_plan

    options = RunOptions(
        plan=plan,
        data=data,
        model=model,
        device=device,
        num_steps=steps,
        lr=lr,
        seed=seed,
        output=output,
    )
    run_plan(options)
    # Torchrun starts a process per rank, and one of them is enough to say it.
    if os.environ.get("RANK", "0") == "0":
        _report_run(plan, output)


def _report_run(plan: Path, output: Path) -> None:
    """Say how the run went against its predictions, and leave what it followed with it."""
    from infinipipe.ir import open_plan
    from infinipipe.reports.run import compare_run
    from infinipipe.run_record import read_run, record_run

    with open_plan(plan) as reader:
        record_run(output, reader.header, reader.sha256)
    for line in compare_run(read_run(output), output):
        say(line)
