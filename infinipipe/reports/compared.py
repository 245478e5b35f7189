"""What `compare` shows of several policies: tables for people, rows for programs."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import msgspec
from rich.console import Group
from rich.table import Table

from infinipipe.planner import Cell, InfeasibleRow, Row
from infinipipe.units import show_bytes

_NUMBERS = ("s a step", "bound", "ratio", "bubble", "recompute", "peak", "chunks", "s to plan")
"""Columns beside the policy's."""


def compare_tables(cells: SequenceOf[Cell]) -> Group:
    """Return a table for each choice of stages and memory, the fastest policy marked."""
    return Group(*(_table(cell) for cell in cells))


def compare_rows(cells: SequenceOf[Cell]) -> list[dict[str, Any]]:
    """Return a row of plain data for each policy in each choice of stages and memory."""
    rows: list[dict[str, Any]] = []
    for cell in cells:
        rows.extend(_plain_row(cell, row) for row in cell.rows)
    return rows


def _plain_row(cell: Cell, row: Row | InfeasibleRow) -> dict[str, Any]:
    choice = {"stages": cell.num_stages, "memory_limit_bytes": cell.memory_limit_bytes}
    return choice | msgspec.structs.asdict(row)


def _table(cell: Cell) -> Table:
    table = Table(title=_title(cell), title_justify="left", box=None)
    table.add_column("policy")
    for name in _NUMBERS:
        table.add_column(name, justify="right")
    fastest_s = _fastest_seconds(cell)
    for row in cell.rows:
        if isinstance(row, InfeasibleRow):
            table.add_row(row.policy, "infeasible")
        else:
            style = "bold" if row.step_seconds == fastest_s else None
            table.add_row(row.policy, *_numbers(row), style=style)
    table.caption = _reasons(cell)
    table.caption_justify = "left"
    return table


def _fastest_seconds(cell: Cell) -> float | None:
    seconds = [row.step_seconds for row in cell.rows if isinstance(row, Row)]
    return min(seconds, default=None)


def _reasons(cell: Cell) -> str:
    """Return why policies are infeasible, each reason once, as many share one."""
    reasons = [row.reason for row in cell.rows if isinstance(row, InfeasibleRow)]
    return "\n".join(dict.fromkeys(reasons))


def _title(cell: Cell) -> str:
    # Once where all stages have the same.
    different = dict.fromkeys(cell.memory_limit_bytes)
    limits = "/".join(show_bytes(limit) for limit in different)
    return f"{cell.num_stages} stages of {limits}"


def _numbers(row: Row) -> list[str]:
    return [
        f"{row.step_seconds:.3f}",
        f"{row.bound_seconds:.3f}",
        f"{row.ratio_to_bound:.3f}",
        f"{row.bubble_fraction:.1%}",
        f"{row.recompute_fraction:.1%}",
        show_bytes(max(row.peak_bytes)),
        f"{row.num_chunks:.0f}",
        f"{row.plan_seconds:.2f}",
    ]
