"""What `compile` says of the plan it made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np

from infinipipe.ir import Chunk, Header, PlanReader, Replica
from infinipipe.ir.time_shares import TimeShares
from infinipipe.units import show_bytes, show_fraction


class _Counts(NamedTuple):
    """What became of sequences and layers, summed over replicas, then over steps."""

    num_split: int = 0
    """Sequences of two slices or more."""
    num_slices: int = 0
    """Of the split sequences."""
    num_packed: int = 0
    """Sequences that share a chunk with another one."""
    recomputed: int = 0
    """Tokens times layers whose activations are recomputed."""
    layers: int = 0
    """Tokens times layers."""

    def plus(self, other: _Counts) -> _Counts:
        return _Counts._make(a + b for a, b in zip(self, other, strict=True))


class _Summary:
    """Gathers what is said of a plan, step by step, for a plan may have more than memory holds."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.lengths: list[int] = []
        self.counts = _Counts()
        self.shares = TimeShares()
        self.peaks = [0] * len(header.stages)
        self.winners = Counter[str]()

    def add(self, replica: Replica) -> None:
        self.counts = self.counts.plus(_count(self.header, replica))
        self.shares = self.shares.plus(TimeShares.of(replica.predicted))
        for stage, prediction in enumerate(replica.predicted):
            self.peaks[stage] = max(self.peaks[stage], prediction.peak_bytes)
        if replica.search is not None:
            # A winner is a policy and, after a colon, the settings it chose.
            policy = replica.search.winner.partition(":")[0]
            self.winners[policy] += 1


def plan_report(reader: PlanReader, num_cut_tokens: int, planning_s: float) -> list[str]:
    """Return lines for a person; `num_cut_tokens` is what `max_length` cut off the dataset.

    `planning_s` is how long planning took: it is said here and not in the plan, for a plan's bytes
    are the same on every machine.
    """
    header = reader.header
    summary = _Summary(header)
    for step in reader:
        summary.lengths += [sequence.length for sequence in step.sequences]
        for replica in step.replicas:
            summary.add(replica)
    lines = {
        "data": _show_data(reader),
        "lengths": _show_lengths(summary.lengths),
        "cut": _show_cut(header, num_cut_tokens),
        "split": _show_split(summary),
        "packed": _show_packed(summary),
        "recomputed": _show_recomputed(summary),
        "time": _show_time(reader, summary.shares),
        "planned": _show_planning(summary.winners, planning_s),
    }
    for stage, peak in enumerate(summary.peaks):
        lines[f"stage {stage}"] = _show_memory(header, stage, peak)
    return [f"  {name:<11} {text}" for name, text in lines.items() if text is not None]


def _count(header: Header, replica: Replica) -> _Counts:
    slices = Counter(part.sequence for chunk in replica.chunks for part in chunk.slices)
    split = [count for count in slices.values() if count > 1]
    tokens = [chunk.num_tokens for chunk in replica.chunks]
    num_layers = sum(stage.num_layers for stage in header.stages)
    return _Counts(
        num_split=len(split),
        num_slices=sum(split),
        num_packed=_count_packed(replica.chunks),
        recomputed=_count_recomputed(replica, tokens),
        layers=sum(tokens) * num_layers,
    )


def _count_packed(chunks: SequenceOf[Chunk]) -> int:
    shared = [chunk for chunk in chunks if len(chunk.slices) > 1]
    return len({part.sequence for chunk in shared for part in chunk.slices})


def _count_recomputed(replica: Replica, tokens: SequenceOf[int]) -> int:
    total = 0
    for counts in replica.recompute:
        total += sum(num_tokens * count for num_tokens, count in zip(tokens, counts, strict=True))
    return total


def _show_data(reader: PlanReader) -> str:
    totals = reader.totals
    return (
        f"{totals.num_sequences:,} sequences, {totals.num_tokens:,} tokens "
        f"in {totals.num_steps:,} steps"
    )


def _show_lengths(lengths: SequenceOf[int]) -> str:
    least, median, p99, most = np.percentile(lengths, (0, 50, 99, 100))
    return f"min {least:,.0f}, median {median:,.0f}, p99 {p99:,.0f}, max {most:,.0f} tokens"


def _show_cut(header: Header, num_cut_tokens: int) -> str | None:
    """Return what `max_length` cut off; None where it cut nothing."""
    dataset = header.dataset
    if not dataset.num_truncated:
        return None
    fraction = show_fraction(num_cut_tokens, num_cut_tokens + dataset.num_tokens)
    return (
        f"{dataset.num_truncated:,} sequences to --max-length {header.max_length:,}, "
        f"which drops {num_cut_tokens:,} tokens ({fraction}) of the dataset"
    )


def _show_split(summary: _Summary) -> str:
    fraction = show_fraction(summary.counts.num_split, len(summary.lengths))
    return f"{fraction} of the sequences, into {summary.counts.num_slices:,} slices"


def _show_packed(summary: _Summary) -> str:
    fraction = show_fraction(summary.counts.num_packed, len(summary.lengths))
    return f"{fraction} of the sequences, without padding"


def _show_recomputed(summary: _Summary) -> str:
    activations = show_fraction(summary.counts.recomputed, summary.counts.layers)
    time = summary.shares.recompute_fraction or 0.0
    return f"{activations} of the layers' activations, {time:.1%} of the busy time"


def _show_time(reader: PlanReader, shares: TimeShares) -> str:
    totals = reader.totals
    bound = "no lower bound"
    if totals.bound_s:
        bound = f"{totals.makespan_s / totals.bound_s:.3f} times the lower bound"
    step_s = totals.makespan_s / totals.num_steps
    return f"{step_s:.4g} s a step, {bound}; bubble {shares.bubble_fraction or 0.0:.1%}"


def _show_planning(winners: Counter[str], planning_s: float) -> str:
    policies = ", ".join(f"{policy} {count:,}" for policy, count in winners.most_common())
    return f"in {planning_s:.1f} s; by {policies}"


def _show_memory(header: Header, stage: int, peak: int) -> str:
    num_layers = header.stages[stage].num_layers
    limit = header.memory_limit_bytes[stage]
    return f"{num_layers} layers, peak {show_bytes(peak)} of {show_bytes(limit)}"
