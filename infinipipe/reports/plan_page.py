"""A self-contained HTML page of a plan: timeline, memory, bubbles and chunks of each step, without network."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from importlib import resources
from typing import Any

import msgspec

from infinipipe.costs.predict import Span
from infinipipe.ir.plan import Header, Replica, Step
from infinipipe.reports.plan_view import chunk_kind, profile_device

# About 10 MB of numbers; a browser still draws a step in a second.
MOST_SPANS = 150_000

Data = dict[str, Any]


def plan_page(header: Header, steps: Iterable[tuple[Step, SequenceOf[Span]]]) -> str:
    """Return the page for steps with their spans.

    Steps are taken from the front until they have `MOST_SPANS` spans, at least one; the page says when it lacks some.
    """
    # Imported here, as it takes longer than all the rest.
    from plotly.offline import get_plotlyjs

    template = (
        resources.files("infinipipe.reports").joinpath("plan_page.html").read_text(encoding="utf-8")
    )
    data = msgspec.json.encode(_plan_data(header, steps)).decode()
    # No name can end the script element, or open another.
    data = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    start, rest = template.split("{{plan}}")
    middle, end = rest.split("{{plotly}}")
    return "".join((start, data, middle, get_plotlyjs(), end))


def _plan_data(header: Header, steps: Iterable[tuple[Step, SequenceOf[Span]]]) -> Data:
    return {
        "model": header.model.name,
        "policy": header.policy,
        "dataset": header.dataset.path,
        "device": profile_device(header),
        "num_steps": header.num_steps,
        "stages": [
            {"layers": stage.num_layers, "limit": limit}
            for stage, limit in zip(header.stages, header.memory_limit_bytes, strict=True)
        ],
        "steps": _steps_data(steps),
    }


def _steps_data(steps: Iterable[tuple[Step, SequenceOf[Span]]]) -> list[Data]:
    found: list[Data] = []
    num_spans = 0
    for step, spans in steps:
        num_spans += len(spans)
        if found and num_spans > MOST_SPANS:
            break
        found.append(_step_data(step, spans))
    return found


def _step_data(step: Step, spans: SequenceOf[Span]) -> Data:
    by_replica: list[list[Span]] = [[] for _ in step.replicas]
    for span in spans:
        by_replica[span.replica].append(span)
    return {
        "index": step.index,
        "makespan": step.makespan_s,
        "bound": step.bound_s,
        "step": step.step_s,
        "tokens": step.num_tokens,
        "sequences": len(step.sequences),
        "replicas": [
            _replica_data(step, replica, mine)
            for replica, mine in zip(step.replicas, by_replica, strict=True)
        ],
    }


def _replica_data(step: Step, replica: Replica, spans: SequenceOf[Span]) -> Data:
    chunks = [
        {
            "kind": chunk_kind(chunk, step.sequences),
            "tokens": chunk.num_tokens,
            "pairs": chunk.num_pairs,
            "recompute": [counts[number] for counts in replica.recompute],
            "slices": [
                (step.sequences[s.sequence].row, s.start, s.stop, step.sequences[s.sequence].length)
                for s in chunk.slices
            ],
        }
        for number, chunk in enumerate(replica.chunks)
    ]
    predicted = [
        {"busy": p.busy_s, "recompute": p.recompute_s, "bubble": p.bubble_s, "peak": p.peak_bytes}
        for p in replica.predicted
    ]
    return {"chunks": chunks, "predicted": predicted, "ops": _columns(spans)}


def _columns(spans: SequenceOf[Span]) -> Data:
    """Return the spans as columns, which take a third of the room of records."""
    return {
        "stage": [span.stage for span in spans],
        "kind": [span.op.kind.value for span in spans],
        "chunk": [span.op.chunk for span in spans],
        "start": [round(span.start_s, 9) for span in spans],
        "seconds": [round(span.end_s - span.start_s, 9) for span in spans],
        "recompute": [round(span.recompute_s, 9) for span in spans],
        "during": [span.during_bytes for span in spans],
        "after": [span.after_bytes for span in spans],
    }
