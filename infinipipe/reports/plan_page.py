"""A plan as a self-contained HTML page, without network: a step's timeline, memory and chunks."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from importlib import resources
from typing import Any

import msgspec

from infinipipe.costs import Span
from infinipipe.ir import Chunk, Header, Replica, Slice, Step
from infinipipe.reports.plan_view import chunk_kind, profile_device

MOST_SPANS = 150_000
"""In one page: about 10 MB of numbers, of which a browser still draws a step in a second."""

_DECIMALS = 9
"""Of seconds: a nanosecond is less than any op takes; more digits would only add to the page."""

Data = dict[str, Any]


def plan_page(header: Header, steps: Iterable[tuple[Step, SequenceOf[Span]]]) -> str:
    """Return the page for steps with their spans.

    Steps are taken from the front until they have `MOST_SPANS` spans, at least one; the page says
    when it lacks some.
    """
    # Imported here, as it takes longer than all the rest.
    from plotly.offline import get_plotlyjs

    template = resources.files("infinipipe.reports").joinpath("plan_page.html")
    start, rest = template.read_text(encoding="utf-8").split("{{plan}}")
    middle, end = rest.split("{{plotly}}")
    data = msgspec.json.encode(_plan_data(header, steps)).decode()
    return "".join((start, _as_script(data), middle, get_plotlyjs(), end))


def _as_script(data: str) -> str:
    """Return JSON in which no name can end the script element, or open another."""
    return data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _plan_data(header: Header, steps: Iterable[tuple[Step, SequenceOf[Span]]]) -> Data:
    stages = [
        {"layers": stage.num_layers, "limit": limit}
        for stage, limit in zip(header.stages, header.memory_limit_bytes, strict=True)
    ]
    return {
        "model": header.model.name,
        "policy": header.policy,
        "dataset": header.dataset.path,
        "device": profile_device(header),
        "num_steps": header.num_steps,
        "stages": stages,
        "steps": _steps_data(steps),
    }


def _steps_data(steps: Iterable[tuple[Step, SequenceOf[Span]]]) -> list[Data]:
    drawn: list[Data] = []
    num_spans = 0
    for step, spans in steps:
        num_spans += len(spans)
        if drawn and num_spans > MOST_SPANS:
            break
        drawn.append(_step_data(step, spans))
    return drawn


def _step_data(step: Step, spans: SequenceOf[Span]) -> Data:
    by_replica: list[list[Span]] = [[] for _ in step.replicas]
    for span in spans:
        by_replica[span.replica].append(span)
    replicas = [
        _replica_data(step, replica, its_spans)
        for replica, its_spans in zip(step.replicas, by_replica, strict=True)
    ]
    return {
        "index": step.index,
        "makespan": step.makespan_s,
        "bound": step.bound_s,
        "step": step.step_s,
        "tokens": step.num_tokens,
        "sequences": len(step.sequences),
        "replicas": replicas,
    }


def _replica_data(step: Step, replica: Replica, spans: SequenceOf[Span]) -> Data:
    chunks = []
    for number, chunk in enumerate(replica.chunks):
        recompute = [counts[number] for counts in replica.recompute]
        keep_attention = [counts[number] for counts in replica.keep_attention]
        counts = {"recompute": recompute, "keepAttention": keep_attention}
        chunks.append(_chunk_data(step, chunk) | counts)
    predicted = [
        {
            "busy": stage.busy_s,
            "recompute": stage.recompute_s,
            "bubble": stage.bubble_s,
            "peak": stage.peak_bytes,
        }
        for stage in replica.predicted
    ]
    return {"chunks": chunks, "predicted": predicted, "ops": _columns(spans)}


def _chunk_data(step: Step, chunk: Chunk) -> Data:
    return {
        "kind": chunk_kind(chunk, step.sequences),
        "tokens": chunk.num_tokens,
        "pairs": chunk.num_pairs,
        "slices": [_slice_data(step, part) for part in chunk.slices],
    }


def _slice_data(step: Step, part: Slice) -> tuple[int, int, int, int]:
    sequence = step.sequences[part.sequence]
    return (sequence.row, part.start, part.stop, sequence.length)


def _columns(spans: SequenceOf[Span]) -> Data:
    """Return the spans as columns, which take a third of the room of records."""
    stages = [span.stage for span in spans]
    kinds = [span.op.kind.value for span in spans]
    chunks = [span.op.chunk for span in spans]
    starts_s = [round(span.start_s, _DECIMALS) for span in spans]
    seconds = [round(span.end_s - span.start_s, _DECIMALS) for span in spans]
    recompute_s = [round(span.recompute_s, _DECIMALS) for span in spans]
    during_bytes = [span.during_bytes for span in spans]
    after_bytes = [span.after_bytes for span in spans]
    return {
        "stage": stages,
        "kind": kinds,
        "chunk": chunks,
        "start": starts_s,
        "seconds": seconds,
        "recompute": recompute_s,
        "during": during_bytes,
        "after": after_bytes,
    }
