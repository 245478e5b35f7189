"""What `compile` tells of the plan it made, and `compare` of several policies: for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
from rich.console import Group
from rich.table import Table

from infinipipe.ir import Header, Replica
from infinipipe.ir.file.store import PlanReader
from infinipipe.planner.compare import Cell, InfeasibleRow, Row
from infinipipe.units import show_bytes


class _Figures(NamedTuple):
    """Sums over replicas, then over steps."""

    num_split: int = 0
    """Sequences of two slices or more."""
    num_slices: int = 0
    """Of the split sequences."""
    num_packed: int = 0
    """Sequences that share a chunk with another one."""
    dropped: int = 0
    """Tokens times layers whose activations are recomputed."""
    layers: int = 0
    """Tokens times layers."""
    recompute_s: float = 0.0
    busy_s: float = 0.0
    bubble_s: float = 0.0

    def plus(self, other: _Figures) -> _Figures:
        return _Figures._make(a + b for a, b in zip(self, other, strict=True))


def compare_tables(cells: SequenceOf[Cell]) -> Group:
    """Return a table for each choice of stages and memory, the fastest policy marked."""
    return Group(*map(_compare_table, cells))


def _compare_table(cell: Cell) -> Table:
    limits = "/".join(show_bytes(limit) for limit in dict.fromkeys(cell.memory_limit_bytes))
    table = Table(title=f"{cell.num_stages} stages of {limits}", title_justify="left", box=None)
    table.add_column("policy")
    for name in (
        "s a step",
        "bound",
        "ratio",
        "bubble",
        "recompute",
        "peak",
        "chunks",
        "s to plan",
    ):
        table.add_column(name, justify="right")
    feasible = [row for row in cell.rows if isinstance(row, Row)]
    best = min((row.step_seconds for row in feasible), default=0.0)
    for row in cell.rows:
        if isinstance(row, Row):
            style = "bold" if row.step_seconds == best else None
            table.add_row(row.policy, *_compare_cells(row), style=style)
        else:
            table.add_row(row.policy, "infeasible")
    reasons = dict.fromkeys(row.reason for row in cell.rows if isinstance(row, InfeasibleRow))
    table.caption, table.caption_justify = "\n".join(reasons), "left"
    return table


def _compare_cells(row: Row) -> list[str]:
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


def plan_report(reader: PlanReader, num_cut_tokens: int, planning_s: float) -> list[str]:
    """Return lines for a person; `num_cut_tokens` is what `max_length` cut off the dataset.

    `planning_s` is how long planning took: it is told here, for a plan's bytes are the same on every machine.
    """
    header, totals = reader.header, reader.totals
    lengths: list[int] = []
    peaks = [0] * len(header.stages)
    figures, winners = _Figures(), Counter[str]()
    for step in reader:
        lengths += [s.length for s in step.sequences]
        for replica in step.replicas:
            figures = figures.plus(_figures(header, replica))
            if replica.search is not None:
                winners[replica.search.winner.partition(":")[0]] += 1
            peaks = [
                max(peak, p.peak_bytes) for peak, p in zip(peaks, replica.predicted, strict=True)
            ]
    rows = [
        (
            "data",
            f"{totals.num_sequences:,} sequences, {totals.num_tokens:,} tokens in {totals.num_steps:,} steps",
        ),
        ("lengths", _lengths(lengths)),
        *_truncated(header, num_cut_tokens),
        (
            "split",
            f"{_percent(figures.num_split, len(lengths))} of the sequences, into {figures.num_slices:,} slices",
        ),
        (
            "packed",
            f"{_percent(figures.num_packed, len(lengths))} of the sequences, without padding",
        ),
        ("recomputed", _recomputed(figures)),
        ("time", _time(reader, figures)),
        (
            "planned",
            f"in {planning_s:.1f} s; by {', '.join(f'{name} {n:,}' for name, n in winners.most_common())}",
        ),
        *((f"stage {s}", _memory(header, s, peak)) for s, peak in enumerate(peaks)),
    ]
    return [f"  {name:<11} {text}" for name, text in rows]


def _figures(header: Header, replica: Replica) -> _Figures:
    slices = Counter(piece.sequence for chunk in replica.chunks for piece in chunk.slices)
    split = [count for count in slices.values() if count > 1]
    packed = {
        piece.sequence
        for chunk in replica.chunks
        if len(chunk.slices) > 1
        for piece in chunk.slices
    }
    tokens = [chunk.num_tokens for chunk in replica.chunks]
    return _Figures(
        num_split=len(split),
        num_slices=sum(split),
        num_packed=len(packed),
        dropped=sum(
            t * r for counts in replica.recompute for t, r in zip(tokens, counts, strict=True)
        ),
        layers=sum(tokens) * sum(stage.num_layers for stage in header.stages),
        recompute_s=sum(p.recompute_s for p in replica.predicted),
        busy_s=sum(p.busy_s for p in replica.predicted),
        bubble_s=sum(p.bubble_s for p in replica.predicted),
    )


def _lengths(lengths: list[int]) -> str:
    least, median, p99, most = np.percentile(lengths, (0, 50, 99, 100))
    return f"min {least:,.0f}, median {median:,.0f}, p99 {p99:,.0f}, max {most:,.0f} tokens"


def _truncated(header: Header, num_cut_tokens: int) -> list[tuple[str, str]]:
    info = header.dataset
    if not info.num_truncated:
        return []
    lost = f"{num_cut_tokens:,} tokens ({_percent(num_cut_tokens, num_cut_tokens + info.num_tokens)}) of the dataset"
    return [
        (
            "cut",
            f"{info.num_truncated:,} sequences to --max-length {header.max_length:,}, which drops {lost}",
        )
    ]


def _recomputed(figures: _Figures) -> str:
    dropped, time = (
        _percent(figures.dropped, figures.layers),
        _percent(figures.recompute_s, figures.busy_s),
    )
    return f"{dropped} of the layers' activations, {time} of the busy time"


def _time(reader: PlanReader, figures: _Figures) -> str:
    totals = reader.totals
    bubble = _percent(figures.bubble_s, figures.busy_s + figures.bubble_s)
    bound = (
        f"{totals.makespan_s / totals.bound_s:.3f} times the lower bound"
        if totals.bound_s
        else "no lower bound"
    )
    return f"{totals.makespan_s / totals.num_steps:.4g} s a step, {bound}; bubble {bubble}"


def _memory(header: Header, stage: int, peak: int) -> str:
    layers = header.stages[stage].num_layers
    return f"{layers} layers, peak {show_bytes(peak)} of {show_bytes(header.memory_limit_bytes[stage])}"


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "0.0%"
