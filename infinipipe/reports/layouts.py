"""What is said of layouts: which was chosen, and why the others were not."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

from rich.console import Group
from rich.table import Table

from infinipipe.ir import Layout
from infinipipe.planner import Contest, LayoutSearch, Trial
from infinipipe.profiles import Profile
from infinipipe.units import show_bytes

_NUMBERS = ("s a step", "over pure work", "peak")
"""Columns of what was planned."""


def link_warning(profile: Profile, layout: Layout) -> str | None:
    """Say what of a layout the profile knows no price for; None where it knows all."""
    if layout.num_ranks == 1:
        return None
    if profile.times.links.num_ranks == 1:
        return (
            "warning: the profile was measured on one device, so what devices exchange is taken to "
            "cost nothing; profile on a machine with several"
        )
    if layout.num_ranks > layout.devices_per_node and profile.times.links_between is None:
        return (
            "warning: the profile knows links inside a node only; those between nodes are taken to "
            "be as fast"
        )
    return None


def search_table(search: LayoutSearch, title: str | None = None) -> Table:
    """Return a row for each layout, the fastest one first and marked."""
    table = Table(title=title or _title(search), title_justify="left", box=None)
    table.add_column("stages x sequence parallel x replicas")
    for name in _NUMBERS:
        table.add_column(name, justify="right")
    table.add_column("")
    for trial in search.trials:
        style = "bold" if trial is search.best else None
        table.add_row(trial.name, *_numbers(search, trial), verdict(search, trial), style=style)
    return table


def verdict(search: LayoutSearch, trial: Trial) -> str:
    """Say why a layout was chosen, or why it was not."""
    if trial.reason is not None:
        return first_clause(trial.reason)
    best = search.best
    assert best is not None, "only what is slower than the best is left unplanned"
    assert best.step_s is not None
    if trial is best:
        return "fastest"
    slower = trial.at_least_s / best.step_s - 1
    if trial.step_s is None:
        return f"at least {slower:.1%} slower"
    return f"{slower:.1%} slower"


def first_clause(reason: str) -> str:
    """Return what is wrong, without what would help: that is said once."""
    clause, _, _ = reason.partition(";")
    return clause


def _title(search: LayoutSearch) -> str:
    steps = "1 step" if search.num_steps == 1 else f"{search.num_steps} steps"
    return f"layouts of {search.num_devices} devices, on a sample of {steps}"


def _numbers(search: LayoutSearch, trial: Trial) -> list[str]:
    if trial.step_s is None or trial.makespan_s is None or trial.peak_bytes is None:
        return [""] * len(_NUMBERS)
    return [
        f"{trial.step_s:.4g}",
        f"{trial.makespan_s / search.pure_work_s:.3f}",
        show_bytes(trial.peak_bytes),
    ]


def contest_tables(contests: SequenceOf[Contest]) -> Group:
    """Return for each choice of devices and memory the first system's layouts, and a table of every
    system on its best one."""
    tables = []
    for contest in contests:
        first = next(iter(contest.searches))
        tables.append(search_table(contest.searches[first], _layouts_title(contest, first)))
        tables.append(_systems_table(contest))
    return Group(*tables)


def contest_rows(contests: SequenceOf[Contest]) -> list[dict[str, Any]]:
    """Return a row of plain data for each layout of each system, in each choice."""
    rows = []
    for contest in contests:
        for system, search in contest.searches.items():
            rows += [_plain_row(contest, system, search, trial) for trial in search.trials]
    return rows


def _plain_row(contest: Contest, system: str, search: LayoutSearch, trial: Trial) -> dict[str, Any]:
    layout = trial.layout
    ratio = None
    if trial.makespan_s is not None:
        ratio = trial.makespan_s / search.pure_work_s
    return {
        "devices": contest.num_devices,
        "memory_limit_bytes": contest.memory_limit_bytes,
        "policy": system,
        "layout": trial.name,
        "stages": layout and layout.num_stages,
        "sequence_parallel": layout and layout.sequence_parallel,
        "replicas": layout and layout.num_replicas,
        "feasible": trial.reason is None,
        "best": trial is search.best,
        "step_seconds": trial.step_s,
        "at_least_seconds": trial.at_least_s if trial.reason is None else None,
        "ratio_to_pure_work": ratio,
        "peak_bytes": trial.peak_bytes,
        "reason": trial.reason,
    }


def _systems_table(contest: Contest) -> Table:
    """Return a row for each system on its best layout, the fastest marked."""
    table = Table(title="every system on its best layout", title_justify="left", box=None)
    table.add_column("system")
    table.add_column("layout")
    for name in (*_NUMBERS, "over the fastest"):
        table.add_column(name, justify="right")
    fastest_s = _fastest_seconds(contest)
    for system, search in contest.searches.items():
        best = search.best
        if best is None or best.step_s is None:
            reason = first_clause(search.trials[0].reason or "")
            table.add_row(system, f"infeasible: {reason}")
            continue
        style = "bold" if best.step_s == fastest_s else None
        slower = f"{best.step_s / fastest_s:.3f}"
        table.add_row(system, best.name, *_numbers(search, best), slower, style=style)
    return table


def _fastest_seconds(contest: Contest) -> float:
    bests = [search.best for search in contest.searches.values()]
    seconds = [best.step_s for best in bests if best and best.step_s is not None]
    return min(seconds, default=0.0)


def _layouts_title(contest: Contest, system: str) -> str:
    limit = show_bytes(contest.memory_limit_bytes)
    return f"{contest.num_devices} devices of {limit}, layouts of {system}"
