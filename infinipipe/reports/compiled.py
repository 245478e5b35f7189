"""What `compile` says of the plan it made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as SequenceOf

import numpy as np

from infinipipe.ir import Chunk, Header, PlanReader, Replica, StagePrediction, Step, TimeShares
from infinipipe.units import show_bytes, show_fraction


class _Summary:
    """What is said of all steps, gathered one by one, as memory may not hold all."""

    def __init__(self, header: Header) -> None:
        self.num_layers = sum(stage.num_layers for stage in header.stages)
        self.lengths: list[int] = []
        self.num_split = 0
        """Sequences of two slices or more."""
        self.num_slices = 0
        """Of the split sequences."""
        self.num_packed = 0
        """Sequences that share a chunk with another one."""
        self.num_recomputed = 0
        """Tokens times layers whose activations are recomputed."""
        self.num_without_attention = 0
        """Of these, with layers that keep what attention gave."""
        self.num_activations = 0
        """Tokens times layers."""
        self.shares = TimeShares()
        self.peaks = [0] * len(header.stages)
        self.winners = Counter[str]()
        """How many replicas' schedules each policy found."""

    def add(self, step: Step) -> None:
        self.lengths += [sequence.length for sequence in step.sequences]
        for replica in step.replicas:
            self._add_slices(replica.chunks)
            self._add_recompute(replica)
            self._add_predictions(replica.predicted)
            if replica.search is not None:
                # A winner is a policy and, after a colon, the settings it chose.
                policy, _, _ = replica.search.winner.partition(":")
                self.winners[policy] += 1

    def _add_slices(self, chunks: SequenceOf[Chunk]) -> None:
        num_slices = Counter[int]()
        packed: set[int] = set()
        for chunk in chunks:
            sequences = [part.sequence for part in chunk.slices]
            num_slices.update(sequences)
            if len(sequences) > 1:
                packed.update(sequences)
        split = [count for count in num_slices.values() if count > 1]
        self.num_split += len(split)
        self.num_slices += sum(split)
        self.num_packed += len(packed)

    def _add_recompute(self, replica: Replica) -> None:
        for number, chunk in enumerate(replica.chunks):
            num_tokens = chunk.num_tokens
            num_whole = sum(counts[number] for counts in replica.recompute)
            num_kept = sum(counts[number] for counts in replica.keep_attention)
            self.num_recomputed += num_tokens * (num_whole + num_kept)
            self.num_without_attention += num_tokens * num_kept
            self.num_activations += num_tokens * self.num_layers

    def _add_predictions(self, predicted: SequenceOf[StagePrediction]) -> None:
        # Replica by replica, as sums of floats depend on their order.
        self.shares = self.shares.plus(TimeShares.of(predicted))
        for stage, prediction in enumerate(predicted):
            self.peaks[stage] = max(self.peaks[stage], prediction.peak_bytes)


def plan_report(reader: PlanReader, num_cut_tokens: int, planning_s: float) -> list[str]:
    """Return lines for a person; `num_cut_tokens` is what `max_length` cut off the dataset.

    `planning_s` is how long planning took: it is said here and not in the plan, for a plan's bytes
    are the same on every machine.
    """
    header = reader.header
    summary = _Summary(header)
    for step in reader:
        summary.add(step)
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
    fraction = show_fraction(summary.num_split, len(summary.lengths))
    return f"{fraction} of the sequences, into {summary.num_slices:,} slices"


def _show_packed(summary: _Summary) -> str:
    fraction = show_fraction(summary.num_packed, len(summary.lengths))
    return f"{fraction} of the sequences, without padding"


def _show_recomputed(summary: _Summary) -> str:
    activations = show_fraction(summary.num_recomputed, summary.num_activations)
    without = show_fraction(summary.num_without_attention, summary.num_activations)
    time = summary.shares.recompute_fraction or 0.0
    kinds = f"{activations} of the layers' activations ({without} without attention)"
    return f"{kinds}, {time:.1%} of the busy time"


def _show_time(reader: PlanReader, shares: TimeShares) -> str:
    totals = reader.totals
    bound = "no lower bound"
    if totals.bound_s:
        bound = f"{totals.makespan_s / totals.bound_s:.3f} times the lower bound"
    step_s = totals.step_s / totals.num_steps
    return f"{step_s:.4g} s a step, {bound}; bubble {shares.bubble_fraction or 0.0:.1%}"


def _show_planning(winners: Counter[str], planning_s: float) -> str:
    policies = ", ".join(f"{policy} {count:,}" for policy, count in winners.most_common())
    return f"in {planning_s:.1f} s; by {policies}"


def _show_memory(header: Header, stage: int, peak: int) -> str:
    num_layers = header.stages[stage].num_layers
    limit = header.memory_limit_bytes[stage]
    return f"{num_layers} layers, peak {show_bytes(peak)} of {show_bytes(limit)}"
