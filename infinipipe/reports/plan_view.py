"""Plans as plain data, for `inspect` and everything that reads JSON; the structs are its schema."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import accumulate
from typing import Any, Literal

import msgspec

from infinipipe.ir import (
    Chunk,
    Header,
    LossNorm,
    PlanReader,
    Replica,
    Search,
    Sequence,
    StagePrediction,
    Step,
    TimeShares,
    Totals,
    chunk_chains,
    profile_origin,
    show_program,
)
from infinipipe.ir.file.encoding import Index

Document = dict[str, Any]
ChunkKind = Literal["batched", "split", "hybrid"]


class _View(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class SequenceView(_View, frozen=True):
    """One sequence of the global batch, by its row in the dataset."""

    row: int
    length: int
    num_targets: int


class SliceView(_View, frozen=True):
    """A slice of a sequence; `positions` are the first and one past the last."""

    sequence: int
    row: int
    positions: tuple[int, int]


class ChunkView(_View, frozen=True):
    """One micro-batch.

    Its slices lie between the boundaries `cu_seqlens`. They are isolated: a token attends to its
    own sequence only, which is the slice it stands in and what came before it in earlier chunks.
    """

    index: int
    kind: ChunkKind
    num_tokens: int
    num_pairs: int
    isolated: bool
    cu_seqlens: tuple[int, ...]
    slices: tuple[SliceView, ...]
    recompute: tuple[int, ...]
    """Layers that keep only their input, per stage."""
    keep_attention: tuple[int, ...]
    """Further layers that are recomputed but for attention, per stage."""


class PredictionView(_View, frozen=True):
    """What the simulator expects of one stage."""

    busy_s: float
    recompute_s: float
    bubble_s: float
    peak_bytes: int


class ReplicaView(_View, frozen=True):
    """What one replica does in a step; programs are in text form, one per stage."""

    chunks: tuple[ChunkView, ...]
    chains: tuple[tuple[int, ...], ...]
    programs: tuple[str, ...]
    predicted: tuple[PredictionView, ...]
    search: Search | None


class StepView(_View, frozen=True):
    """A whole step."""

    index: int
    loss_norm: LossNorm
    denominator: int
    makespan_s: float
    bound_s: float
    step_s: float
    sequences: tuple[SequenceView, ...]
    replicas: tuple[ReplicaView, ...]


class StepSummary(_View, frozen=True):
    """Counts, times and memory of a step; fractions are of the stages' busy time,
    bubbles of busy and bubble.
    """

    index: int
    num_sequences: int
    num_tokens: int
    num_targets: int
    longest_tokens: int
    num_chunks: int
    num_batched: int
    num_split: int
    num_hybrid: int
    num_slices: int
    makespan_s: float
    bound_s: float
    step_s: float
    ratio_to_bound: float | None
    bubble_fraction: float | None
    recompute_fraction: float | None
    peak_bytes: tuple[int, ...]
    """Per stage, the most of all replicas."""
    winners: tuple[str | None, ...]
    """What search found the schedule of each replica."""


class HeaderView(Header, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The header, with the profile as data."""

    profile: dict[str, Any]  # type: ignore[assignment]


class PlanView(_View, frozen=True):
    """What holds for the whole plan, and a summary of every step."""

    sha256: str
    header: HeaderView
    totals: Totals
    steps: tuple[StepSummary, ...]


def plan_schema() -> Document:
    """Return the JSON Schema of what `inspect` prints.

    That is a `PlanView`, or with options `HeaderView` and `StepView`. `Header`, `Step` and `Index`
    are the objects of the file itself.
    """
    shown = (PlanView, StepView, HeaderView)
    stored = (Header, Step, Index)
    _, definitions = msgspec.json.schema_components(
        (*shown, *stored), ref_template="#/$defs/{name}"
    )
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "infinipipe inspect",
        "anyOf": [{"$ref": f"#/$defs/{type_.__name__}"} for type_ in shown],
        "$defs": definitions,
    }


def plan_document(reader: PlanReader, steps: Iterable[Step]) -> Document:
    """Return what holds for the whole plan, and a summary of every step, as plain data.

    It is a `PlanView`.
    """
    view = PlanView(
        sha256=reader.sha256,
        header=_header_view(reader.header),
        totals=reader.totals,
        steps=tuple(step_summary(step) for step in steps),
    )
    return _plain(view)


def header_document(header: Header) -> Document:
    """Return the header as plain data: a `HeaderView`."""
    return _plain(_header_view(header))


def step_document(header: Header, step: Step) -> Document:
    """Return a whole step as plain data: a `StepView`."""
    sequences = tuple(SequenceView(**_fields(sequence)) for sequence in step.sequences)
    replicas = tuple(_replica_view(step, replica) for replica in step.replicas)
    view = StepView(
        index=step.index,
        loss_norm=header.loss_norm,
        denominator=step.denominator,
        makespan_s=step.makespan_s,
        bound_s=step.bound_s,
        step_s=step.step_s,
        sequences=sequences,
        replicas=replicas,
    )
    return _plain(view)


def step_summary(step: Step) -> StepSummary:
    """Return the counts, times and memory of a step."""
    chunks: list[Chunk] = []
    predicted: list[StagePrediction] = []
    for replica in step.replicas:
        chunks.extend(replica.chunks)
        predicted.extend(replica.predicted)
    lengths = [sequence.length for sequence in step.sequences]
    kinds = Counter(chunk_kind(chunk, step.sequences) for chunk in chunks)
    shares = TimeShares.of(predicted)
    return StepSummary(
        index=step.index,
        num_sequences=len(step.sequences),
        num_tokens=step.num_tokens,
        num_targets=step.num_targets,
        longest_tokens=max(lengths),
        num_chunks=len(chunks),
        num_batched=kinds["batched"],
        num_split=kinds["split"],
        num_hybrid=kinds["hybrid"],
        num_slices=sum(len(chunk.slices) for chunk in chunks),
        makespan_s=step.makespan_s,
        bound_s=step.bound_s,
        step_s=step.step_s,
        ratio_to_bound=step.makespan_s / step.bound_s if step.bound_s > 0 else None,
        bubble_fraction=shares.bubble_fraction,
        recompute_fraction=shares.recompute_fraction,
        peak_bytes=_peaks(step),
        winners=_winners(step),
    )


def _peaks(step: Step) -> tuple[int, ...]:
    """Return the most that each stage of any replica holds."""
    peaks = []
    for replica in step.replicas:
        peaks.append([stage.peak_bytes for stage in replica.predicted])
    return tuple(max(of_stage) for of_stage in zip(*peaks, strict=True))


def _winners(step: Step) -> tuple[str | None, ...]:
    """Return what won the search of each replica, None where there was no search."""
    searches = [replica.search for replica in step.replicas]
    return tuple(None if search is None else search.winner for search in searches)


def chunk_kind(chunk: Chunk, sequences: tuple[Sequence, ...]) -> ChunkKind:
    """Return whether a chunk holds whole sequences, one slice of a split one, or both."""
    if chunk.split_slice(sequences) is None:
        return "batched"
    return "split" if len(chunk.slices) == 1 else "hybrid"


def profile_device(header: Header) -> str:
    """Return the device that a plan was made for, and whether its costs were measured."""
    try:
        origin = profile_origin(header)
    except msgspec.ValidationError:
        return "an unknown device"
    return f"{origin.device.name} ({origin.source})"


def _header_view(header: Header) -> HeaderView:
    profile = msgspec.msgpack.decode(header.profile)
    # Through JSON, for msgpack knows more kinds of data.
    plain = msgspec.json.decode(msgspec.json.encode(profile))
    return HeaderView(**_fields(header) | {"profile": plain})


def _replica_view(step: Step, replica: Replica) -> ReplicaView:
    num_chunks = len(replica.chunks)
    chunks = [_chunk_view(step, replica, index) for index in range(num_chunks)]
    programs = [show_program(stage, program) for stage, program in enumerate(replica.programs)]
    predicted = [PredictionView(**_fields(stage)) for stage in replica.predicted]
    return ReplicaView(
        chunks=tuple(chunks),
        chains=tuple(chunk_chains(replica.chunks, step.sequences)),
        programs=tuple(programs),
        predicted=tuple(predicted),
        search=replica.search,
    )


def _chunk_view(step: Step, replica: Replica, index: int) -> ChunkView:
    chunk = replica.chunks[index]
    slices = [
        SliceView(
            sequence=part.sequence,
            row=step.sequences[part.sequence].row,
            positions=(part.start, part.stop),
        )
        for part in chunk.slices
    ]
    lengths = [part.length for part in chunk.slices]
    return ChunkView(
        index=index,
        kind=chunk_kind(chunk, step.sequences),
        num_tokens=chunk.num_tokens,
        num_pairs=chunk.num_pairs,
        isolated=True,
        cu_seqlens=tuple(accumulate(lengths, initial=0)),
        slices=tuple(slices),
        recompute=tuple(counts[index] for counts in replica.recompute),
        keep_attention=tuple(counts[index] for counts in replica.keep_attention),
    )


def _fields(struct: msgspec.Struct) -> Document:
    return msgspec.structs.asdict(struct)


def _plain(view: msgspec.Struct) -> Document:
    return msgspec.json.decode(msgspec.json.encode(view), type=Document)
