"""Plans as tables for people, with rich."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from rich.console import Group
from rich.table import Table
from rich.text import Text

from infinipipe.ir.file.store import PlanReader
from infinipipe.ir.plan import Header, Op, Replica, Step
from infinipipe.ir.text import show_program
from infinipipe.reports.plan_view import StepSummary, chunk_kind, profile_device, step_summary
from infinipipe.units import shown

# A plan may hold any number of each; a person reads the first, and JSON has them all.
_MOST_SLICES, _MOST_CHUNKS, _MOST_OPS, _MOST_STEPS = 6, 200, 400, 1000


def plan_tables(reader: PlanReader, steps: Iterable[Step]) -> Group:
    """Return the plan's title, its stages and a row for each step."""
    header = reader.header
    summaries = [step_summary(step) for step in steps]
    title = (
        f"{header.model.name} by {header.policy}: {reader.num_steps} steps, {header.num_replicas} replicas "
        f"on {profile_device(header)}"
    )
    # Text, as names may look like markup.
    return Group(
        Text(shown(title), style="bold"),
        _stages_table(header, summaries),
        _steps_table(summaries[:_MOST_STEPS]),
        *_more(len(summaries) - _MOST_STEPS, "steps"),
    )


def step_tables(header: Header, step: Step) -> Group:
    """Return the stages, chunks and programs of a step's replicas."""
    parts: list[Table | Text] = []
    for number, replica in enumerate(step.replicas):
        parts += [
            Text(f"step {step.index}, replica {number}", style="bold"),
            _predictions_table(header, replica),
            _chunks_table(step, replica),
            *_more(len(replica.chunks) - _MOST_CHUNKS, "chunks"),
            *(Text(_program(stage, program)) for stage, program in enumerate(replica.programs)),
        ]
    return Group(*parts)


def _more(count: int, what: str) -> list[Text]:
    return [Text(f"and {count:,} more {what}")] if count > 0 else []


def _program(stage: int, program: SequenceOf[Op]) -> str:
    rest = len(program) - _MOST_OPS
    return show_program(stage, program[:_MOST_OPS]) + (f" and {rest:,} more" if rest > 0 else "")


def _stages_table(header: Header, summaries: SequenceOf[StepSummary]) -> Table:
    table = _table("stage", "layers", "holds", "highest peak", "limit")
    for number, stage in enumerate(header.stages):
        ends = [
            name for name, there in (("embedding", stage.embedding), ("head", stage.head)) if there
        ]
        table.add_row(
            str(number),
            f"{stage.first_layer}-{stage.first_layer + stage.num_layers - 1}",
            ", ".join(ends),
            _bytes(max(summary.peak_bytes[number] for summary in summaries)),
            _bytes(header.memory_limit_bytes[number]),
        )
    return table


def _steps_table(summaries: SequenceOf[StepSummary]) -> Table:
    names = "step sequences tokens longest chunks batched split hybrid makespan /bound bubble recompute peak"
    table = _table(*names.split())
    for s in summaries:
        counts = (s.index, s.num_sequences, s.num_tokens, s.longest_tokens)
        kinds = (s.num_chunks, s.num_batched, s.num_split, s.num_hybrid)
        table.add_row(
            *(f"{count:,}" for count in (*counts, *kinds)),
            f"{s.makespan_s:.4g} s",
            "-" if s.ratio_to_bound is None else f"{s.ratio_to_bound:.3f}",
            _percent(s.bubble_fraction),
            _percent(s.recompute_fraction),
            _bytes(max(s.peak_bytes)),
        )
    return table


def _predictions_table(header: Header, replica: Replica) -> Table:
    table = _table("stage", "ops", "busy", "recompute", "bubble", "peak", "limit")
    for stage, (program, found) in enumerate(zip(replica.programs, replica.predicted, strict=True)):
        times = (found.busy_s, found.recompute_s, found.bubble_s)
        table.add_row(
            str(stage),
            str(len(program)),
            *(f"{seconds:.4g} s" for seconds in times),
            _bytes(found.peak_bytes),
            _bytes(header.memory_limit_bytes[stage]),
        )
    return table


def _chunks_table(step: Step, replica: Replica) -> Table:
    table = _table("chunk", "kind", "tokens", "recompute", "rows [start, stop) of length")
    table.columns[-1].justify = "left"
    for number, chunk in enumerate(replica.chunks[:_MOST_CHUNKS]):
        slices = [
            f"{step.sequences[s.sequence].row} [{s.start}, {s.stop}) of {step.sequences[s.sequence].length}"
            for s in chunk.slices[:_MOST_SLICES]
        ]
        rest = len(chunk.slices) - len(slices)
        table.add_row(
            str(number),
            chunk_kind(chunk, step.sequences),
            f"{chunk.num_tokens:,}",
            " ".join(str(counts[number]) for counts in replica.recompute),
            # Text, as brackets are markup.
            Text(", ".join(slices) + (f" and {rest} more" if rest else "")),
        )
    return table


def _table(*names: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in names:
        table.add_column(name, justify="right")
    return table


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction:.1%}"


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
