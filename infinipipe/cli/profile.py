"""`infinipipe profile`: measure, compute, refine or show what a model costs on a device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from infinipipe.cli.arguments import DEVICE, PATH
from infinipipe.cli.console import progress_bar, say, show_tables

if TYPE_CHECKING:
    from infinipipe.profiles import Profile

_MEASURE = "measure"

_WAYS = {
    _MEASURE: {"model", "output", "device", "quick"},
    "analytic": {"model", "output"},
    "refine": {"output", "source"},
    "show": {"html"},
}
"""The ways to get a profile, and what each takes beside the option that chooses it.

What no option chooses is to measure."""


@click.command()
@click.argument("model", default="tiny")
@click.option(
    "-o",
    "--output",
    type=PATH,
    help="Profile to write.  [default: profile.json; the one to --refine]",
)
@click.option("--device", type=DEVICE, default="auto", help="Device to measure.")
@click.option("--quick", is_flag=True, help="Measure in half the time, less accurately.")
@click.option(
    "--analytic",
    metavar="DEVICE",
    help="Compute the profile of a device that is not here: a800-80g, ...",
)
@click.option(
    "--refine",
    type=PATH,
    metavar="RUN_DIR",
    help="Correct a profile's times by what a run of it measured.",
)
@click.option(
    "-p", "--profile", "source", type=PATH, default="profile.json", help="Profile to refine."
)
@click.option("--show", type=PATH, metavar="FILE", help="Show a profile and how accurate it is.")
@click.option(
    "--html",
    type=PATH,
    metavar="FILE",
    help="With --show: write a page that plots measured against fitted.",
)
@click.pass_context
def profile(
    context: click.Context,
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

    MODEL is a preset (tiny, llama-7b, llama-13b, llama-30b, ...), a Hugging Face model directory or
    a config.json.
    """
    _refuse_unused(context)
    if show is not None:
        _show_profile(show, html)
    elif refine is not None:
        _write_refined(refine, source, output or source)
    else:
        _write_new(model, device, quick, analytic, output or Path("profile.json"))


def _refuse_unused(context: click.Context) -> None:
    """Refuse two ways at once, and an argument that the chosen way would ignore."""
    given = [param for param in context.command.params if _is_given(context, param)]
    chosen = [param.name for param in given if param.name in _WAYS]
    if len(chosen) > 1:
        raise click.UsageError("choose one of --analytic, --refine and --show")
    way = chosen[0] if chosen else _MEASURE
    for param in given:
        if param.name == way or param.name in _WAYS[way]:
            continue
        if way == _MEASURE:
            raise click.UsageError(f"{_name(param)} goes with --{_way_that_takes(param)}")
        raise click.UsageError(f"{_name(param)} is not used with --{way}")


def _is_given(context: click.Context, param: click.Parameter) -> bool:
    if param.name is None:
        return False
    return context.get_parameter_source(param.name) is click.core.ParameterSource.COMMANDLINE


def _name(param: click.Parameter) -> str:
    return param.opts[-1] if isinstance(param, click.Option) else param.human_readable_name


def _way_that_takes(param: click.Parameter) -> str:
    return next(way for way, taken in _WAYS.items() if param.name in taken)


def _write_refined(run: Path, source: Path, output: Path) -> None:
    from infinipipe.files import check_output
    from infinipipe.measure.refine import refine_profile
    from infinipipe.profiles import read_profile, write_profile
    from infinipipe.run_record import read_run

    check_output(output, "--output")
    refined = refine_profile(read_profile(source), read_run(run), run)
    write_profile(refined, output)
    _report(refined, output)


def _write_new(model: str, device: str, quick: bool, analytic: str | None, output: Path) -> None:
    from infinipipe.files import check_output
    from infinipipe.profiles import write_profile

    check_output(output, "--output", Path(model))
    made = _measure(model, device, quick) if analytic is None else _compute(model, analytic)
    write_profile(made, output)
    _report(made, output)


def _measure(model: str, device: str, quick: bool) -> Profile:
    from infinipipe.profiles import read_model

    shape = read_model(model)
    # Torch is imported only when the model can be used.
    from infinipipe.measure.measure import measure_profile

    with progress_bar("profile") as progress:
        return measure_profile(shape, device=device, quick=quick, progress=progress)


def _compute(model: str, device: str) -> Profile:
    from infinipipe.profiles import read_model
    from infinipipe.profiles.analytic import analytic_profile

    return analytic_profile(read_model(model), device)


def _report(made: Profile, path: Path) -> None:
    say(f"{path}: {made.model.name} on {made.device.name}, {made.source}")
    for line in _accuracy_lines(made):
        say(line)


def _accuracy_lines(made: Profile) -> Iterator[str]:
    for row in made.accuracy:
        if row.held_out:
            error = f"{row.median_error:.1%} median error"
            yield f"  {row.op:<11} {error} on {row.num_samples} chunks held out"
    if made.refinements:
        yield f"  {'refined':<11} times x {made.refinements[-1].scale:.3f}"


def _show_profile(path: Path, html: Path | None) -> None:
    from infinipipe.files import check_output, write_output
    from infinipipe.profiles import read_profile
    from infinipipe.reports.profile_table import profile_tables

    shown = read_profile(path)
    if html is not None:
        from infinipipe.reports.profile_page import profile_page

        check_output(html, "--html", path)
        write_output(html, "--html", profile_page(shown))
        say(f"{html}: written")
    show_tables(profile_tables(shown))
