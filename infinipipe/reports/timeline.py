"""A step's predicted timeline and programs as the files that other tools read."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from typing import Any

from infinipipe.costs import Span
from infinipipe.ir import TRAITS, Direction, Header, Replica, Step, show_op
from infinipipe.reports.plan_view import chunk_kind

Event = dict[str, Any]
"""One object of the Trace Event Format."""

_ARROW_BEFORE_END = 0.001
"""Share of the sender's span by which an arrow leaves before it ends: an arrow belongs to the span
that encloses it, and the end itself lies outside; so little cannot be seen."""

_DECIMALS = 3
"""Of microseconds: a nanosecond is less than any op or transfer takes."""


def schedule_csv(replica: Replica) -> str:
    """Return a replica's programs as `torch.distributed.pipelining` reads them.

    A row per stage, compute ops only.
    """
    rows = []
    for stage, program in enumerate(replica.programs):
        ops = [show_op(stage, op) for op in program]
        rows.append(",".join(ops) + "\r\n")
    return "".join(rows)


def chrome_trace(header: Header, step: Step, spans: SequenceOf[Span]) -> Event:
    """Return a step's timeline in the Trace Event Format, for Perfetto and chrome://tracing.

    A process per replica and a track per stage, with ops named in text form, recompute inside its
    B, an arrow for each transfer, and a counter of each stage's bytes.
    """
    events = [*_names(header), *_ops(step, spans), *_arrows(spans), *_counters(spans)]
    return {
        "displayTimeUnit": "ms",
        "otherData": {"policy": header.policy, "step": step.index, "makespan_s": step.makespan_s},
        "traceEvents": events,
    }


def _names(header: Header) -> Iterator[Event]:
    for replica in range(header.num_replicas):
        yield _metadata(replica, 0, "process_name", {"name": f"replica {replica}"})
        for number, stage in enumerate(header.stages):
            last_layer = stage.first_layer + stage.num_layers - 1
            name = f"stage {number}: layers {stage.first_layer} to {last_layer}"
            yield _metadata(replica, number, "thread_name", {"name": name})
            yield _metadata(replica, number, "thread_sort_index", {"sort_index": number})


def _ops(step: Step, spans: SequenceOf[Span]) -> Iterator[Event]:
    for span in spans:
        replica = step.replicas[span.replica]
        chunk = replica.chunks[span.op.chunk]
        facts = {
            "chunk": chunk_kind(chunk, step.sequences),
            "tokens": chunk.num_tokens,
            "slices": [[part.sequence, part.start, part.stop] for part in chunk.slices],
            "recomputed layers": replica.recompute[span.stage][span.op.chunk],
            "recomputed without attention": replica.keep_attention[span.stage][span.op.chunk],
        }
        seconds = span.end_s - span.start_s
        yield _complete(span, span.name, TRAITS[span.op.kind].name, seconds, facts)
        if span.recompute_s > 0:
            yield _complete(span, "recompute", "recompute", span.recompute_s, {})


def _arrows(spans: SequenceOf[Span]) -> Iterator[Event]:
    """Yield the start and the end of an arrow for every transfer between stages."""
    receivers = {
        (span.replica, span.stage, span.op.chunk, _direction(span)): span for span in spans
    }
    number = 0
    for sender in spans:
        direction = _direction(sender)
        next_stage = sender.stage + direction
        receiver = receivers.get((sender.replica, next_stage, sender.op.chunk, direction))
        if direction == Direction.STAY or receiver is None:
            continue
        number += 1
        yield _arrow_start(sender, number)
        yield _arrow_end(receiver, number)


def _direction(span: Span) -> Direction:
    """Return where an op's result goes."""
    return TRAITS[span.op.kind].travels


def _counters(spans: SequenceOf[Span]) -> Iterator[Event]:
    for span in spans:
        yield _counter(span, span.start_s, span.during_bytes)
        yield _counter(span, span.end_s, span.after_bytes)


def _metadata(replica: int, stage: int, name: str, args: Event) -> Event:
    return _event("M", replica, stage, name=name, args=args)


def _complete(span: Span, name: str, category: str, seconds: float, args: Event) -> Event:
    return _event(
        "X",
        span.replica,
        span.stage,
        name=name,
        cat=category,
        ts=_microseconds(span.start_s),
        args=args,
        dur=_microseconds(seconds),
    )


def _arrow_start(sender: Span, number: int) -> Event:
    leaves_s = sender.end_s - _ARROW_BEFORE_END * (sender.end_s - sender.start_s)
    return _event(
        "s",
        sender.replica,
        sender.stage,
        ts=_microseconds(leaves_s),
        name="transfer",
        cat="transfer",
        id=number,
    )


def _arrow_end(receiver: Span, number: int) -> Event:
    return _event(
        "f",
        receiver.replica,
        receiver.stage,
        ts=_microseconds(receiver.start_s),
        bp="e",
        name="transfer",
        cat="transfer",
        id=number,
    )


def _counter(span: Span, at_s: float, num_bytes: int) -> Event:
    return _event(
        "C",
        span.replica,
        span.stage,
        name=f"stage {span.stage} bytes",
        ts=_microseconds(at_s),
        args={"bytes": num_bytes},
    )


def _event(phase: str, replica: int, stage: int, **fields: Any) -> Event:
    return {"ph": phase, "pid": replica, "tid": stage, **fields}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, _DECIMALS)
