"""Small valid plans made by hand.

1F1B over any number of stages, with split sequences and packed short ones.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from infinipipe.costs import PackedProgram, Span, simulate
from infinipipe.errors import InputError
from infinipipe.ir import (
    FORMAT_VERSION,
    Chunk,
    DatasetInfo,
    Header,
    Model,
    Op,
    OpKind,
    PlanWriter,
    Replica,
    Sequence,
    Slice,
    Stage,
    StagePrediction,
    Step,
    chunk_chains,
    loss_denominator,
)

F = OpKind.FORWARD
B = OpKind.BACKWARD
I = OpKind.BACKWARD_INPUT  # noqa: E741
W = OpKind.BACKWARD_WEIGHT

LENGTHS = (7, 40, 5, 3, 24, 1)

# Eighteen digits fit every integer that the plan file can hold without a sign.
_NUMBER = "(0|[1-9][0-9]{0,17})"
_LETTERS = "".join(OpKind)
_OP = re.compile(f"{_NUMBER}([{_LETTERS}]){_NUMBER}")

# Enough to recognise a wrong text by, few enough to keep the error on one line.
_QUOTED_CHARACTERS = 40


def make_model(num_layers: int = 8, **changes: Any) -> Model:
    model = Model(
        name="tiny",
        config='{"model_type":"llama"}',
        tokenizer="bytes",
        architecture="llama",
        num_layers=num_layers,
        hidden_size=64,
        intermediate_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocabulary_size=256,
        tied=False,
        layer_parameters=40_000,
    )
    return msgspec.structs.replace(model, **changes)


def make_header(
    num_stages: int = 2, num_replicas: int = 1, num_steps: int = 2, **changes: Any
) -> Header:
    """Return a header whose layers are spread evenly.

    The first stages have one more where they do not divide.
    """
    model = changes.pop("model", None) or make_model()
    bounds = [-(-model.num_layers * s // num_stages) for s in range(num_stages + 1)]
    profile = msgspec.msgpack.encode(
        {"format_version": 2, "source": "analytic", "model": model, "dtype": "float32"}
    )
    header = Header(
        format_version=FORMAT_VERSION,
        infinipipe_version="0",
        model=model,
        model_sha256=model.sha256,
        dtype="float32",
        stages=tuple(
            Stage(first_layer=a, num_layers=b - a, embedding=a == 0, head=b == model.num_layers)
            for a, b in itertools.pairwise(bounds)
        ),
        num_replicas=num_replicas,
        sequence_parallel=1,
        devices_per_node=8,
        memory_limit_bytes=(10**9,) * num_stages,
        batch_size=8,
        num_steps=num_steps,
        seed=0,
        max_length=None,
        loss_norm="token",
        logits_tokens=1024,
        dataset=DatasetInfo(
            path="dataset.jsonl",
            sha256="0" * 64,
            tokenizer="ids",
            tokenizer_sha256="",
            num_sequences=100,
            num_tokens=5000,
            num_truncated=0,
        ),
        policy="by-hand",
        profile_sha256=hashlib.sha256(profile).hexdigest(),
        profile=msgspec.Raw(profile),
    )
    return msgspec.structs.replace(header, **changes)


def make_chunks(
    lengths: SequenceOf[int], indices: SequenceOf[int], chunk_tokens: int = 16
) -> tuple[Chunk, ...]:
    """Slice the sequences longer than a chunk.

    Their last slice and the short ones are packed with what comes next.
    """
    chunks: list[list[Slice]] = []
    for index in sorted(indices, key=lambda i: -lengths[i]):
        start = 0
        while lengths[index] - start > chunk_tokens:
            chunks.append([Slice(index, start, chunk_tokens)])
            start += chunk_tokens
        rest = Slice(index, start, lengths[index] - start)
        room = chunk_tokens - sum(s.length for s in chunks[-1]) if chunks else 0
        if start == 0 and rest.length <= room:
            chunks[-1].append(rest)
        else:
            chunks.append([rest])
    return tuple(Chunk(tuple(slices)) for slices in chunks)


def parse_op(text: str) -> tuple[int, Op]:
    """Return the stage and the op that a text form names: `show_op` backwards.

    Raises:
        InputError: the text is not exactly one op.
    """
    match = _OP.fullmatch(text)
    if match is None:
        quoted = ascii(text[:_QUOTED_CHARACTERS])
        letters = f"{', '.join(_LETTERS[:-1])} or {_LETTERS[-1]}"
        raise InputError(f"not an op: {quoted}; write stage, kind ({letters}) and chunk, as in 2F0")
    stage, kind, chunk = match.groups()
    return int(stage), Op(OpKind(kind), int(chunk))


def parse_program(stage: int, text: str) -> tuple[Op, ...]:
    """Return the program that `show_program` showed.

    Raises:
        InputError: a word is not an op.
        ValueError: an op is of another stage.
    """
    program = []
    for word in text.split(" ") if text else ():
        stated, op = parse_op(word)
        if stated != stage:
            raise ValueError(f"op {word} is of stage {stated}, in the program of stage {stage}")
        program.append(op)
    return tuple(program)


def order_1f1b(chains: SequenceOf[tuple[int, ...]], stage: int, num_stages: int) -> tuple[Op, ...]:
    """1F1B over chains: each chain's forwards ascend, its backwards descend (Seq1F1B's warm-up)."""
    forwards = [Op(F, c) for chain in chains for c in chain]
    backwards = [Op(B, c) for chain in chains for c in reversed(chain)]
    warm_up = min(len(forwards), num_stages - stage - 1 + max(map(len, chains), default=1) - 1)
    program = forwards[:warm_up]
    for position, backward in enumerate(backwards):
        program += forwards[warm_up + position : warm_up + position + 1]
        program.append(backward)
    return tuple(program)


def split_backwards(program: SequenceOf[Op]) -> tuple[Op, ...]:
    """Replace every B by I, and do the W of a chunk right after the next I.

    The last ones come at the end.
    """
    split: list[Op] = []
    waiting: list[Op] = []
    for op in program:
        if op.kind == F:
            split.append(op)
            continue
        split += [Op(I, op.chunk), *waiting]
        waiting = [Op(W, op.chunk)]
    return (*split, *waiting)


def split_some(program: SequenceOf[Op], generator: np.random.Generator) -> tuple[Op, ...]:
    """Make I of some B, each with its W anywhere behind."""
    split: list[Op] = []
    waiting: list[Op] = []
    for op in program:
        if op.kind == B and generator.random() < 0.7:
            split.append(Op(I, op.chunk))
            waiting.append(Op(W, op.chunk))
        else:
            split.append(op)
        while waiting and generator.random() < 0.4:
            split.append(waiting.pop(generator.integers(len(waiting))))
    return (*split, *waiting)


def make_replica(
    header: Header,
    sequences: SequenceOf[Sequence],
    indices: SequenceOf[int],
    *,
    split: bool = False,
) -> Replica:
    lengths = [s.length for s in sequences]
    chunks = make_chunks(lengths, indices)
    chains = chunk_chains(chunks, sequences)
    num_stages = len(header.stages)
    programs = [order_1f1b(chains, s, num_stages) for s in range(num_stages)]
    return Replica(
        chunks=chunks,
        recompute=tuple(
            tuple((c + s) % (stage.num_layers + 1) for c in range(len(chunks)))
            for s, stage in enumerate(header.stages)
        ),
        # Of the layers that are left all, half or none, rounded down.
        keep_attention=tuple(
            tuple(
                (stage.num_layers - (c + s) % (stage.num_layers + 1)) // (1 + c % 3)
                for c in range(len(chunks))
            )
            for s, stage in enumerate(header.stages)
        ),
        programs=tuple(split_backwards(p) if split else p for p in programs),
        predicted=(StagePrediction(busy_s=0.5, recompute_s=0.125, bubble_s=0.5, peak_bytes=10**6),)
        * num_stages,
    )


def make_step(
    header: Header, index: int = 0, lengths: SequenceOf[int] = LENGTHS, *, split: bool = False
) -> Step:
    """Return a step; sequences are dealt to the replicas in turn."""
    sequences = tuple(
        Sequence(
            row=(index * header.batch_size + i) % header.dataset.num_sequences,
            length=n,
            num_targets=n - 1,
        )
        for i, n in enumerate(lengths)
    )
    return Step(
        index=index,
        sequences=sequences,
        denominator=loss_denominator(sequences, header.loss_norm),
        replicas=tuple(
            make_replica(
                header, sequences, range(r, len(sequences), header.num_replicas), split=split
            )
            for r in range(header.num_replicas)
        ),
        makespan_s=1.0,
        bound_s=0.75,
        step_s=1.25,
    )


def make_spans(step: Step) -> tuple[Span, ...]:
    """Return a timeline in which F takes 1 s, B 3 s, I and W 1 s each, and transfers nothing.

    Of a B, 1 s is recompute.
    """
    seconds = {F: 1.0, B: 3.0, I: 1.0, W: 1.0}
    spans = []
    for number, replica in enumerate(step.replicas):
        durations = [np.array([seconds[op.kind] for op in program]) for program in replica.programs]
        programs = [PackedProgram.pack(program) for program in replica.programs]
        at_once = np.zeros((len(programs) - 1, len(replica.chunks)))
        timeline = simulate(programs, durations, at_once)
        for stage, program in enumerate(replica.programs):
            spans += [
                Span(
                    replica=number,
                    stage=stage,
                    op=op,
                    start_s=float(timeline.start_s[stage][position]),
                    end_s=float(timeline.end_s[stage][position]),
                    recompute_s=1.0 if op.kind == B else 0.0,
                    during_bytes=2000 + position,
                    after_bytes=1000 + position,
                )
                for position, op in enumerate(program)
            ]
    return tuple(spans)


def write_plan(path: Path, header: Header | None = None, *, split: bool = False) -> list[Step]:
    """Write a plan of equal steps and return them."""
    header = header or make_header()
    steps = [make_step(header, k, split=split) for k in range(header.num_steps)]
    with PlanWriter(path, header) as writer:
        for step in steps:
            writer.append(step)
    return steps
