"""The predicted timeline of a step as spans, and the files that other tools read it from."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from typing import Any

from infinipipe.costs.predict import Span
from infinipipe.ir.plan import Header, OpKind, Replica, Step
from infinipipe.ir.text import show_op
from infinipipe.reports.plan_view import chunk_kind

Event = dict[str, Any]

KIND_NAMES = {
    OpKind.FORWARD: "forward",
    OpKind.BACKWARD: "backward",
    OpKind.BACKWARD_INPUT: "backward input",
    OpKind.BACKWARD_WEIGHT: "backward weight",
}


def schedule_csv(replica: Replica) -> str:
    """Return a replica's programs as `torch.distributed.pipelining` reads them: a row per stage, compute ops only."""
    return "".join(
        ",".join(show_op(stage, op) for op in program) + "\r\n"
        for stage, program in enumerate(replica.programs)
    )


def chrome_trace(header: Header, step: Step, spans: SequenceOf[Span]) -> Event:
    """Return a step's timeline in the Trace Event Format, for Perfetto and chrome://tracing.

    A process per replica and a track per stage, with ops named in text form, recompute inside its B, an arrow
    for each transfer, and a counter of each stage's bytes.
    """
    events = [*_names(header), *_ops(step, spans), *_arrows(spans), *_counters(spans)]
    return {
        "displayTimeUnit": "ms",
        "otherData": {"policy": header.policy, "step": step.index, "makespan_s": step.makespan_s},
        "traceEvents": events,
    }


def _names(header: Header) -> Iterator[Event]:
    for replica in range(header.num_replicas):
        yield _event("M", replica, 0, name="process_name", args={"name": f"replica {replica}"})
        for number, stage in enumerate(header.stages):
            layers = f"layers {stage.first_layer} to {stage.first_layer + stage.num_layers - 1}"
            yield _event(
                "M", replica, number, name="thread_name", args={"name": f"stage {number}: {layers}"}
            )
            yield _event(
                "M", replica, number, name="thread_sort_index", args={"sort_index": number}
            )


def _ops(step: Step, spans: SequenceOf[Span]) -> Iterator[Event]:
    for span in spans:
        replica = step.replicas[span.replica]
        chunk = replica.chunks[span.op.chunk]
        args = {
            "chunk": chunk_kind(chunk, step.sequences),
            "tokens": chunk.num_tokens,
            "slices": [[piece.sequence, piece.start, piece.stop] for piece in chunk.slices],
            "recomputed layers": replica.recompute[span.stage][span.op.chunk],
        }
        yield _complete(span, span.name, KIND_NAMES[span.op.kind], span.end_s - span.start_s, args)
        if span.recompute_s > 0:
            yield _complete(span, "recompute", "recompute", span.recompute_s, {})


def _complete(span: Span, name: str, category: str, seconds: float, args: Event) -> Event:
    event = _event(
        "X",
        span.replica,
        span.stage,
        name=name,
        cat=category,
        ts=_microseconds(span.start_s),
        args=args,
    )
    return event | {"dur": _microseconds(seconds)}


def _arrows(spans: SequenceOf[Span]) -> Iterator[Event]:
    """Yield the start and the end of an arrow for every transfer between stages."""
    receivers = {
        (span.replica, span.stage, span.op.chunk, _direction(span)): span for span in spans
    }
    number = 0
    for span in spans:
        direction = _direction(span)
        receiver = receivers.get((span.replica, span.stage + direction, span.op.chunk, direction))
        if direction == 0 or receiver is None:
            continue
        number += 1
        # Inside the sender's span, for an arrow belongs to the span that encloses it.
        leaves = span.end_s - 0.001 * (span.end_s - span.start_s)
        same = {"name": "transfer", "cat": "transfer", "id": number}
        yield _event("s", span.replica, span.stage, ts=_microseconds(leaves), **same)
        yield _event(
            "f", span.replica, receiver.stage, ts=_microseconds(receiver.start_s), bp="e", **same
        )


def _direction(span: Span) -> int:
    """Return how many stages further an op's result goes."""
    if span.op.kind == OpKind.FORWARD:
        return 1
    return 0 if span.op.kind == OpKind.BACKWARD_WEIGHT else -1


def _counters(spans: SequenceOf[Span]) -> Iterator[Event]:
    for span in spans:
        name = f"stage {span.stage} bytes"
        for at, held in ((span.start_s, span.during_bytes), (span.end_s, span.after_bytes)):
            yield _event(
                "C", span.replica, span.stage, name=name, ts=_microseconds(at), args={"bytes": held}
            )


def _event(phase: str, replica: int, stage: int, **fields: Any) -> Event:
    return {"ph": phase, "pid": replica, "tid": stage, **fields}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
