"""Plans as plain data, for `inspect` and everything that reads JSON."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from typing import Any, Literal

import msgspec

from infinipipe.ir.plan import Chunk, Header, Replica, Sequence, Step, chunk_chains
from infinipipe.ir.store import PlanReader
from infinipipe.ir.text import show_program

Document = dict[str, Any]
ChunkKind = Literal["batched", "split", "hybrid"]


def chunk_kind(chunk: Chunk, sequences: tuple[Sequence, ...]) -> ChunkKind:
    """Return whether a chunk holds whole sequences, one slice of a split one, or both."""
    if chunk.split_slice(sequences) is None:
        return "batched"
    return "split" if len(chunk.slices) == 1 else "hybrid"


def plan_document(reader: PlanReader) -> Document:
    """Return what holds for the whole plan, and a summary of every step."""
    return {
        "sha256": reader.sha256,
        "header": header_document(reader.header),
        "totals": msgspec.to_builtins(reader.totals),
        "steps": [step_summary(step) for step in reader],
    }


def header_document(header: Header) -> Document:
    """Return the header with its profile and the model's config as data."""
    fields = {name: getattr(header, name) for name in header.__struct_fields__}
    fields["profile"] = msgspec.msgpack.decode(header.profile)
    # Through JSON: msgpack knows more kinds of data.
    document: Document = msgspec.json.decode(msgspec.json.encode(fields))
    document["model"]["config"] = msgspec.json.decode(header.model.config)
    document["model"]["sha256"] = header.model.sha256
    return document


def step_summary(step: Step) -> Document:
    """Return the counts, times and memory of a step."""
    chunks = [chunk for replica in step.replicas for chunk in replica.chunks]
    kinds = Counter(chunk_kind(chunk, step.sequences) for chunk in chunks)
    predicted = [stage for replica in step.replicas for stage in replica.predicted]
    busy_s, bubble_s = sum(p.busy_s for p in predicted), sum(p.bubble_s for p in predicted)
    by_stage = zip(*(replica.predicted for replica in step.replicas), strict=True)
    return {
        "index": step.index,
        "num_sequences": len(step.sequences),
        "num_tokens": step.num_tokens,
        "num_targets": step.num_targets,
        "longest": max(s.length for s in step.sequences),
        "num_chunks": len(chunks),
        "num_batched": kinds["batched"],
        "num_split": kinds["split"],
        "num_hybrid": kinds["hybrid"],
        "num_slices": sum(len(chunk.slices) for chunk in chunks),
        "makespan_s": step.makespan_s,
        "bound_s": step.bound_s,
        "step_s": step.step_s,
        "ratio_to_bound": _ratio(step.makespan_s, step.bound_s),
        "bubble_fraction": _ratio(bubble_s, busy_s + bubble_s),
        "recompute_fraction": _ratio(sum(p.recompute_s for p in predicted), busy_s),
        "peak_bytes": [max(p.peak_bytes for p in stages) for stages in by_stage],
    }


def step_document(header: Header, step: Step) -> Document:
    """Return a whole step: sequences, chunks with their slices, programs in text form, predictions."""
    return {
        "index": step.index,
        "loss_norm": header.loss_norm,
        "denominator": step.denominator,
        "makespan_s": step.makespan_s,
        "bound_s": step.bound_s,
        "step_s": step.step_s,
        "sequences": [_fields(s) for s in step.sequences],
        "replicas": [_replica_document(step, replica) for replica in step.replicas],
    }


def _replica_document(step: Step, replica: Replica) -> Document:
    return {
        "chunks": [
            {"index": c, **_chunk_document(step, chunk), "recompute": [counts[c] for counts in replica.recompute]}
            for c, chunk in enumerate(replica.chunks)
        ],
        "chains": [list(chain) for chain in chunk_chains(replica.chunks, step.sequences)],
        "programs": [show_program(stage, program) for stage, program in enumerate(replica.programs)],
        "predicted": [_fields(p) for p in replica.predicted],
    }


def _chunk_document(step: Step, chunk: Chunk) -> Document:
    """Describe a chunk. Attention never crosses a boundary in `cu_seqlens`, except to the slice's own context."""
    return {
        "kind": chunk_kind(chunk, step.sequences),
        "num_tokens": chunk.num_tokens,
        "num_pairs": chunk.num_pairs,
        "isolated": True,
        "cu_seqlens": list(accumulate((piece.length for piece in chunk.slices), initial=0)),
        "slices": [
            {
                "sequence": piece.sequence,
                "row": step.sequences[piece.sequence].row,
                "positions": [piece.start, piece.stop],
            }
            for piece in chunk.slices
        ],
    }


def _fields(struct: msgspec.Struct) -> Document:
    """Return a struct as a map, also where it travels as an array."""
    return msgspec.structs.asdict(struct)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
