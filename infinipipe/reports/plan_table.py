"""Plans as tables for people, with rich."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from rich.console import Group
from rich.table import Table
from rich.text import Text

from infinipipe.ir import (
    Chunk,
    Header,
    Op,
    PlanReader,
    Replica,
    Stage,
    Step,
    show_program,
    show_recompute,
)
from infinipipe.reports.plan_view import StepSummary, chunk_kind, profile_device, step_summary
from infinipipe.units import show_bytes, shown

# A plan may hold any number of each. These are what a person still reads: slices that fit a line of
# a wide terminal, the rest within seconds of drawing and scrolling; JSON has them all.
_MOST_SLICES = 6
_MOST_CHUNKS = 200
_MOST_OPS = 400
_MOST_STEPS = 1000


def plan_tables(reader: PlanReader, steps: Iterable[Step]) -> Group:
    """Return the plan's title, its stages and a row for each step."""
    header = reader.header
    summaries = [step_summary(step) for step in steps]
    # Text, as names may look like markup.
    return Group(
        Text(shown(_title(header)), style="bold"),
        _stages_table(header, summaries),
        _steps_table(summaries[:_MOST_STEPS]),
        *_more(len(summaries) - _MOST_STEPS, "steps"),
    )


def _title(header: Header) -> str:
    return (
        f"{header.model.name} by {header.policy}: {header.num_steps} steps, "
        f"{header.num_replicas} replicas on {profile_device(header)}"
    )


def step_tables(header: Header, step: Step) -> Group:
    """Return the stages, chunks and programs of a step's replicas."""
    parts: list[Table | Text] = []
    for number, replica in enumerate(step.replicas):
        programs = [_show_program(stage, ops) for stage, ops in enumerate(replica.programs)]
        parts += [
            Text(f"step {step.index}, replica {number}", style="bold"),
            _predictions_table(header, replica),
            _chunks_table(step, replica),
            *_more(len(replica.chunks) - _MOST_CHUNKS, "chunks"),
            *(Text(program) for program in programs),
        ]
    return Group(*parts)


def _more(count: int, what: str) -> list[Text]:
    return [Text(f"and {count:,} more {what}")] if count > 0 else []


def _show_program(stage: int, program: SequenceOf[Op]) -> str:
    first = show_program(stage, program[:_MOST_OPS])
    rest = len(program) - _MOST_OPS
    return f"{first} and {rest:,} more" if rest > 0 else first


def _stages_table(header: Header, summaries: SequenceOf[StepSummary]) -> Table:
    table = _table("stage", "layers", "holds", "highest peak", "limit")
    for number, stage in enumerate(header.stages):
        last_layer = stage.first_layer + stage.num_layers - 1
        highest = max(summary.peak_bytes[number] for summary in summaries)
        table.add_row(
            str(number),
            f"{stage.first_layer}-{last_layer}",
            ", ".join(_ends(stage)),
            show_bytes(highest),
            show_bytes(header.memory_limit_bytes[number]),
        )
    return table


def _ends(stage: Stage) -> list[str]:
    ends = []
    if stage.embedding:
        ends.append("embedding")
    if stage.head:
        ends.append("head")
    return ends


def _steps_table(summaries: SequenceOf[StepSummary]) -> Table:
    counts = "step sequences tokens longest chunks batched split hybrid"
    figures = "makespan /bound bubble recompute peak"
    table = _table(*counts.split(), *figures.split())
    for summary in summaries:
        table.add_row(
            f"{summary.index:,}",
            f"{summary.num_sequences:,}",
            f"{summary.num_tokens:,}",
            f"{summary.longest_tokens:,}",
            f"{summary.num_chunks:,}",
            f"{summary.num_batched:,}",
            f"{summary.num_split:,}",
            f"{summary.num_hybrid:,}",
            f"{summary.makespan_s:.4g} s",
            "-" if summary.ratio_to_bound is None else f"{summary.ratio_to_bound:.3f}",
            _percent(summary.bubble_fraction),
            _percent(summary.recompute_fraction),
            show_bytes(max(summary.peak_bytes)),
        )
    return table


def _predictions_table(header: Header, replica: Replica) -> Table:
    table = _table("stage", "ops", "busy", "recompute", "bubble", "peak", "limit")
    for stage, prediction in enumerate(replica.predicted):
        table.add_row(
            str(stage),
            str(len(replica.programs[stage])),
            f"{prediction.busy_s:.4g} s",
            f"{prediction.recompute_s:.4g} s",
            f"{prediction.bubble_s:.4g} s",
            show_bytes(prediction.peak_bytes),
            show_bytes(header.memory_limit_bytes[stage]),
        )
    return table


def _chunks_table(step: Step, replica: Replica) -> Table:
    table = _table("chunk", "kind", "tokens", "recompute", "rows [start, stop) of length")
    table.columns[-1].justify = "left"
    for number, chunk in enumerate(replica.chunks[:_MOST_CHUNKS]):
        pairs = zip(replica.recompute, replica.keep_attention, strict=True)
        recomputed = [show_recompute(whole[number], kept[number]) for whole, kept in pairs]
        table.add_row(
            str(number),
            chunk_kind(chunk, step.sequences),
            f"{chunk.num_tokens:,}",
            " ".join(recomputed),
            # Text, as brackets are markup.
            Text(_show_slices(step, chunk)),
        )
    return table


def _show_slices(step: Step, chunk: Chunk) -> str:
    shown_slices = []
    for part in chunk.slices[:_MOST_SLICES]:
        sequence = step.sequences[part.sequence]
        shown_slices.append(f"{sequence.row} [{part.start}, {part.stop}) of {sequence.length}")
    first = ", ".join(shown_slices)
    rest = len(chunk.slices) - len(shown_slices)
    return f"{first} and {rest} more" if rest else first


def _table(*names: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in names:
        table.add_column(name, justify="right")
    return table


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction:.1%}"
