"""Valid plans pass; plans corrupted in every way the rules forbid are refused.

The message names the place.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from infinipipe.costs import PackedProgram, simulate
from infinipipe.errors import VerifyError
from infinipipe.ir import (
    Chunk,
    Header,
    Op,
    OpKind,
    PlanWriter,
    Replica,
    Sequence,
    Slice,
    Step,
    chunk_chains,
    loss_denominator,
    open_plan,
    show_program,
    verify_header,
    verify_plan,
    verify_step,
)
from infinipipe.ir.rules.header import check_sequence_parallel
from tests.plans import B, F, I, W, make_header, make_model, make_step, parse_program, write_plan

HEADER = make_header(num_stages=3, num_replicas=2, num_steps=4)
STEP = make_step(HEADER, 2)
SPLIT = make_step(HEADER, 2, split=True)
# Replica 0 has chunks 0 1 (one chain) and 2, replica 1 has 0 1 2 (one chain).
FIRST, SECOND = STEP.replicas


def refused(step: Step, header: Header = HEADER) -> str:
    with pytest.raises(VerifyError) as caught:
        verify_step(header, step)
    message = str(caught.value)
    assert "\n" not in message
    return message


def with_replica(number: int = 1, step: Step = STEP, **changes: Any) -> Step:
    replicas = list(step.replicas)
    replicas[number] = replace(replicas[number], **changes)
    return replace(step, replicas=tuple(replicas))


def with_program(stage: int, text: str, number: int = 1, step: Step = STEP) -> Step:
    programs = list(step.replicas[number].programs)
    programs[stage] = parse_program(stage, text)
    return with_replica(number, step, programs=tuple(programs))


def with_item(items: tuple[Any, ...], at: int, item: Any) -> tuple[Any, ...]:
    return (*items[:at], item, *items[at + 1 :])


def with_slices(chunk: int, *slices: Slice, number: int = 1) -> Step:
    return with_replica(
        number, chunks=with_item(STEP.replicas[number].chunks, chunk, Chunk(slices))
    )


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize("split", [False, True])
def test_valid_plans_pass(tmp_path: Path, num_stages: int, num_replicas: int, split: bool) -> None:
    header = make_header(num_stages, num_replicas)
    steps = write_plan(tmp_path / "plan", header, split=split)
    seen: list[Step] = []
    with open_plan(tmp_path / "plan") as reader:
        report = verify_plan(reader, on_step=seen.append)
    assert seen == steps
    assert report.num_steps == 2
    assert report.num_tokens == 160
    assert report.num_chunks == sum(len(r.chunks) for s in steps for r in s.replicas)
    assert report.num_slices == 18
    assert report.num_ops == report.num_chunks * num_stages * (3 if split else 2)
    assert report.num_transfers == report.num_chunks * 2 * (num_stages - 1)
    assert len(set(report.rules)) == len(report.rules) > 25
    assert all(rule.endswith(".") for rule in report.rules)


def test_more_replicas_than_sequences_have_empty_programs() -> None:
    header = make_header(num_stages=2, num_replicas=4)
    step = make_step(header, lengths=(5, 3, 9))
    assert step.replicas[3].programs == ((), ())
    verify_step(header, step)


def test_the_fixture_is_what_the_mutations_expect() -> None:
    assert show_program(1, SECOND.programs[1]) == "1F0 1F1 1F2 1B2 1B1 1B0"
    assert show_program(0, FIRST.programs[0]) == "0F0 0F1 0F2 0B1 0B0 0B2"
    assert show_program(2, SPLIT.replicas[1].programs[2]) == "2F0 2F1 2F2 2I2 2I1 2W2 2I0 2W1 2W0"
    assert SECOND.chunks[2].slices == (Slice(1, 32, 8), Slice(3, 0, 3), Slice(5, 0, 1))
    verify_step(HEADER, STEP)
    verify_step(HEADER, SPLIT)


PROGRAM_MUTATIONS = {
    "two F swapped": (
        1,
        "1F1 1F0 1F2 1B2 1B1 1B0",
        "stage 1: op 1F1 comes before the slice before it, chunk 0",
    ),
    "chain backward reversed": (
        1,
        "1F0 1F1 1F2 1B0 1B1 1B2",
        "op 1B0 comes before the slice after it, chunk 1",
    ),
    "B before its F": (
        2,
        "2F0 2F1 2B2 2F2 2B1 2B0",
        "stage 2: op 2B2 comes before 2F2: 2F0 2F1 >>2B2<< 2F2 2B1 2B0",
    ),
    "F missing": (0, "0F0 0F1 0B2 0B1 0B0", "stage 0: op 0F2 is missing: ... 0B2 0B1 0B0 >>end<<"),
    "B missing": (0, "0F0 0F1 0F2 0B2 0B1", "stage 0: op 0B0 is missing: ... 0F2 0B2 0B1 >>end<<"),
    "F twice": (
        1,
        "1F0 1F1 1F2 1F0 1B2 1B1 1B0",
        "op 1F0 comes twice, first at position 0: 1F0 1F1 1F2 >>1F0<<",
    ),
    "B twice": (1, "1F0 1F1 1F2 1B2 1B1 1B0 1B0", "op 1B0 comes twice, first at position 5"),
    "chunk that is not there": (
        1,
        "1F0 1F1 1F2 1B2 1B1 1B3",
        "op 1B3 is of no chunk, there are 3: ... 1F2 1B2",
    ),
    "huge chunk": (1, "1F1000000000 1F1 1F2 1B2 1B1 1B0", "op 1F1000000000 is of no chunk"),
    "B beside W": (
        2,
        "2F0 2F1 2F2 2B2 2B1 2W1 2B0",
        "op 2B1 stands beside an I or a W of its chunk",
    ),
    "B beside I": (
        2,
        "2F0 2F1 2F2 2B2 2B1 2I1 2B0",
        "op 2B1 stands beside an I or a W of its chunk",
    ),
    "I without W": (2, "2F0 2F1 2F2 2I2 2B1 2B0", "stage 2: op 2W2 is missing"),
    "W without I": (2, "2F0 2F1 2F2 2W2 2B1 2B0", "stage 2: op 2I2 is missing"),
    "W before I": (
        2,
        "2F0 2F1 2F2 2W2 2I2 2B1 2B0",
        "op 2W2 comes before 2I2: 2F0 2F1 2F2 >>2W2<< 2I2 2B1 2B0",
    ),
    "I before F": (2, "2F0 2F1 2I2 2F2 2W2 2B1 2B0", "op 2I2 comes before 2F2"),
    "empty program": (2, "", "stage 2: op 2F0 is missing: >>end<<"),
}


@pytest.mark.parametrize("name", PROGRAM_MUTATIONS)
def test_corrupt_programs_are_refused(name: str) -> None:
    stage, text, expected = PROGRAM_MUTATIONS[name]
    message = refused(with_program(stage, text))
    assert message.startswith(f"step 2, replica 1, stage {stage}")
    assert expected in message


def test_negative_chunk_is_refused() -> None:
    program = (Op(F, -1), *SECOND.programs[0][1:])
    message = refused(with_replica(programs=with_item(SECOND.programs, 0, program)))
    assert "stage 0: op 0F-1 is of no chunk" in message


def test_transfers_in_another_order_are_refused_with_both_ends() -> None:
    """Replica 0's chunks 1 and 2 are of different chains, so that each stage alone is valid."""
    message = refused(with_program(1, "1F0 1F2 1F1 1B1 1B0 1B2", number=0))
    assert message == (
        "step 2, replica 0, stage 0: op 0F1 meets 1F2 on stage 1: "
        "0F0 >>0F1<< 0F2 0B1 0B0 ...; 1F0 >>1F2<< 1F1 1B1 1B0 ..."
    )
    message = refused(with_program(2, "2F0 2F1 2F2 2B2 2B1 2B0", number=0))
    assert "stage 1: op 1B1 meets 2B2 on stage 2" in message


def test_input_gradients_travel_like_backwards() -> None:
    text = "2F0 2F1 2I1 2I0 2F2 2B2 2W1 2W0"
    verify_step(HEADER, with_program(2, text, number=0))
    message = refused(with_program(2, "2F0 2F1 2F2 2I2 2I1 2I0 2W1 2W0 2W2", number=0))
    assert "op 1B1 meets 2I2 on stage 2" in message


def test_deadlock_is_named_on_all_its_stages() -> None:
    """Stage 1 waits for a gradient before its F, on which stage 2's B of the same chain waits."""
    header = make_header(num_stages=2)
    step = make_step(header, lengths=(16, 16, 16, 16, 16))
    order = {
        0: "0F0 0F1 0F2 0F3 0F4 0B0 0B1 0B2 0B3 0B4",
        1: "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 1F4 1B4",
    }
    for stage, text in order.items():
        step = with_program(stage, text, number=0, step=step)
    message = refused(step, header)
    assert message.startswith("step 0, replica 0, stage ")
    assert (
        "op 0F3 waits for stage 1 to post its receive: 0F0 0F1 0F2 >>0F3<< 0F4 0B0 0B1 ..."
        in message
    )
    assert (
        "op 1B1 waits for stage 0 to post its receive: 1F0 1B0 1F1 >>1B1<< 1F2 1B2 1F3 ..."
        in message
    )


def test_a_backward_needed_before_its_forward_was_sent_is_a_deadlock() -> None:
    header = make_header(num_stages=2)
    step = make_step(header, lengths=(16, 16))
    step = with_program(0, "0F0 0B0 0F1 0B1", number=0, step=step)
    step = with_program(1, "1F0 1F1 1B0 1B1", number=0, step=step)
    message = refused(step, header)
    assert "op 0B0 waits for stage 1 to send: 0F0 >>0B0<< 0F1 0B1" in message
    assert "op 1F1 waits for stage 0 to send: 1F0 >>1F1<< 1B0 1B1" in message


def mutated_slices() -> Iterator[tuple[str, Step, str]]:
    last = SECOND.chunks[2].slices
    yield "slice dropped", with_slices(2, *last[:2]), "sequence 5: tokens [0, 1) are in no slice"
    yield "tail dropped", with_slices(2, *last[1:]), "sequence 1: tokens [32, 40) are in no slice"
    yield "middle dropped", with_slices(1, Slice(3, 0, 3)), "leaves tokens from 16 out"
    yield (
        "overlap",
        with_slices(1, Slice(1, 15, 17)),
        "chunk 1: sequence 1 [15, 32) overlaps the slice before: >>1[15,32)<<",
    )
    yield (
        "gap",
        with_slices(1, Slice(1, 17, 15)),
        "chunk 1: sequence 1 [17, 32) leaves tokens from 16 out",
    )
    yield (
        "twice",
        with_slices(2, *last, last[2]),
        "[0, 1) overlaps the slice before: ... 3[0,3) 5[0,1) >>5[0,1)<<",
    )
    yield (
        "empty slice",
        with_slices(2, Slice(1, 40, 0), *last),
        "chunk 2: sequence 1 [40, 40) is empty or outside",
    )
    yield (
        "negative length",
        with_slices(2, Slice(1, 40, -8), *last),
        "sequence 1 [40, 32) is empty or outside its 40 tokens",
    )
    yield (
        "negative start",
        with_slices(0, Slice(1, -1, 17)),
        "chunk 0: sequence 1 [-1, 16) is empty or outside",
    )
    yield (
        "beyond",
        with_slices(2, Slice(1, 32, 9), *last[1:]),
        "sequence 1 [32, 41) is empty or outside its 40 tokens",
    )
    yield (
        "no sequence",
        with_slices(2, *last, Slice(6, 0, 1)),
        "chunk 2: there is no sequence 6: ... 3[0,3) 5[0,1) >>6[0,1)<<",
    )
    yield (
        "huge sequence",
        with_slices(2, *last, Slice(2**63, 0, 1)),
        f"there is no sequence {2**63}",
    )
    yield (
        "negative sequence",
        with_slices(2, *last, Slice(-1, 0, 1)),
        "chunk 2: there is no sequence -1",
    )
    yield "no slices", with_slices(2), "chunk 2: it has no slice"
    halves = (Slice(1, 0, 8), Slice(1, 8, 8))
    yield (
        "two parts",
        with_slices(0, *halves),
        "[8, 16) are both parts of a sequence: 1[0,8) >>1[8,16)<<",
    )


@pytest.mark.parametrize(
    ("step", "expected"), [pytest.param(s, e, id=name) for name, s, e in mutated_slices()]
)
def test_corrupt_slices_are_refused(step: Step, expected: str) -> None:
    message = refused(step)
    assert message.startswith("step 2")
    assert expected in message


def test_a_sequence_in_two_replicas_is_refused() -> None:
    first = replace(FIRST, chunks=(*FIRST.chunks[:2], Chunk((Slice(2, 0, 5), Slice(5, 0, 1)))))
    moved = with_slices(2, *SECOND.chunks[2].slices[:2])
    verify_step(HEADER, replace(moved, replicas=(first, moved.replicas[1])))
    first = replace(FIRST, chunks=(*FIRST.chunks[:2], Chunk((Slice(2, 0, 5), Slice(1, 32, 8)))))
    moved = with_slices(2, *SECOND.chunks[2].slices[1:])
    message = refused(replace(moved, replicas=(first, moved.replicas[1])))
    assert (
        "sequence 1 is also in replica 0" in message or "sequence 1 is also in replica 1" in message
    )


def with_sequence(at: int, **changes: int) -> Step:
    return replace(
        STEP, sequences=with_item(STEP.sequences, at, replace(STEP.sequences[at], **changes))
    )


def with_prediction(stage: int, **changes: Any) -> Step:
    return with_replica(
        predicted=with_item(SECOND.predicted, stage, replace(SECOND.predicted[stage], **changes))
    )


def with_recompute(stage: int, chunk: int, count: int) -> Step:
    counts = with_item(SECOND.recompute[stage], chunk, count)
    return with_replica(recompute=with_item(SECOND.recompute, stage, counts))


def with_keep_attention(stage: int, chunk: int, count: int) -> Step:
    counts = with_item(SECOND.keep_attention[stage], chunk, count)
    return with_replica(keep_attention=with_item(SECOND.keep_attention, stage, counts))


NAN, INF = float("nan"), float("inf")
STEP_MUTATIONS: list[tuple[str, Step, str]] = [
    ("index", replace(STEP, index=4), "step 4: the plan has steps 0 to 3"),
    ("negative index", replace(STEP, index=-1), "step -1: the plan has steps 0 to 3"),
    ("no sequence", replace(STEP, sequences=()), "step 2: 0 sequences in a batch of 8"),
    (
        "too many",
        replace(STEP, sequences=STEP.sequences * 2),
        "step 2: 12 sequences in a batch of 8",
    ),
    ("length 0", with_sequence(5, length=0), "step 2: sequence 5 has 0 tokens"),
    ("too long", with_sequence(5, length=2**31), "sequence 5 has 2147483648 tokens"),
    ("targets", with_sequence(0, num_targets=7), "step 2: sequence 0 has 7 targets in 7 tokens"),
    ("negative targets", with_sequence(0, num_targets=-1), "sequence 0 has -1 targets"),
    ("row", with_sequence(0, row=100), "sequence 0 is row 100 of a dataset of 100"),
    ("negative row", with_sequence(0, row=-1), "sequence 0 is row -1"),
    ("row twice", with_sequence(3, row=STEP.sequences[0].row), "sequence 3 repeats row 16"),
    (
        "denominator",
        replace(STEP, denominator=73),
        "step 2: the denominator is 73; its sequences give 74",
    ),
    (
        "other targets",
        with_sequence(0, num_targets=5),
        "the denominator is 74; its sequences give 73",
    ),
    ("nan", replace(STEP, makespan_s=NAN), "expected 0 to 1e+12"),
    ("inf", replace(STEP, step_s=INF), "expected 0 to 1e+12"),
    ("for ever", replace(STEP, step_s=1e308), "expected 0 to 1e+12"),
    ("negative", replace(STEP, bound_s=-1.0), "expected 0 to 1e+12"),
    ("bound over makespan", replace(STEP, bound_s=1.1), "must not fall"),
    ("makespan over step", replace(STEP, step_s=0.9), "must not fall"),
    (
        "replica missing",
        replace(STEP, replicas=STEP.replicas[:1]),
        "step 2: 1 replicas; the header has 2",
    ),
    (
        "program missing",
        with_replica(programs=SECOND.programs[:2]),
        "replica 1, stage 2: programs of 2 stages",
    ),
    (
        "program more",
        with_replica(programs=(*SECOND.programs, ())),
        "replica 1, stage 3: programs of 4 stages",
    ),
    ("recompute missing", with_replica(recompute=()), "replica 1, stage 0: recompute of 0 stages"),
    (
        "count missing",
        with_replica(recompute=((0, 0), *SECOND.recompute[1:])),
        "stage 0: 2 recompute counts",
    ),
    (
        "keep attention missing",
        with_replica(keep_attention=SECOND.keep_attention[:2]),
        "replica 1, stage 2: keep_attention of 2 stages",
    ),
    (
        "keep attention of a chunk missing",
        with_replica(keep_attention=((0, 0), *SECOND.keep_attention[1:])),
        "stage 0: 2 keep_attention counts for 3 chunks",
    ),
    ("predictions missing", with_replica(predicted=()), "stage 0: predicted of 0 stages"),
    (
        "recompute too many",
        with_recompute(1, 2, 4),
        "stage 1: op 1B2 recomputes 4 layers and 0 without attention, of 3: "
        "1F0 1F1 1F2 >>1B2<< 1B1 1B0",
    ),
    (
        "recompute negative",
        with_recompute(2, 0, -1),
        "stage 2: op 2B0 recomputes -1 layers and 0 without attention, of 2",
    ),
    (
        "keep attention negative",
        with_keep_attention(2, 0, -1),
        "stage 2: op 2B0 recomputes 2 layers and -1 without attention, of 2",
    ),
    (
        "both counts too many",
        with_keep_attention(1, 2, 1),
        "stage 1: op 1B2 recomputes 3 layers and 1 without attention, of 3",
    ),
    (
        "peak",
        with_prediction(1, peak_bytes=10**9 + 1),
        "stage 1: a predicted peak of 1000000001 bytes",
    ),
    ("negative peak", with_prediction(1, peak_bytes=-1), "stage 1: a predicted peak of -1 bytes"),
    ("busy nan", with_prediction(2, busy_s=NAN), "stage 2: predicted times"),
    (
        "recompute over busy",
        with_prediction(0, recompute_s=0.6),
        "stage 0: recompute, busy and bubble",
    ),
    ("busy over makespan", with_prediction(0, busy_s=0.6), "in a makespan of 1.0"),
]


@pytest.mark.parametrize(
    ("step", "expected"), [pytest.param(s, e, id=name) for name, s, e in STEP_MUTATIONS]
)
def test_corrupt_steps_are_refused(step: Step, expected: str) -> None:
    assert expected in refused(step)


def test_max_length_and_kernel_sizes() -> None:
    assert "sequence 1 has 40 tokens; expected 1 to 39" in refused(
        STEP, replace(HEADER, max_length=39)
    )
    verify_step(replace(HEADER, max_length=40), STEP)
    wide = replace(
        HEADER, model=replace(HEADER.model, num_heads=2**20, num_kv_heads=2**20, head_dim=128)
    )
    assert "replica 0, chunk 0: 16 tokens, context 16: too large for 32-bit kernels" in refused(
        STEP, wide
    )
    wide = replace(HEADER, model=replace(HEADER.model, intermediate_size=2**27))
    assert "replica 0, chunk 0: 16 tokens, context 16: too large for 32-bit kernels" in refused(
        STEP, wide
    )
    verify_step(replace(HEADER, model=replace(HEADER.model, intermediate_size=2**27 - 1)), STEP)


def test_both_loss_norms() -> None:
    header = replace(HEADER, loss_norm="sequence")
    assert "the denominator is 74; its sequences give 5" in refused(STEP, header)
    verify_step(header, replace(STEP, denominator=5))


def test_a_step_without_targets_is_valid() -> None:
    sequences = tuple(replace(s, num_targets=0) for s in STEP.sequences)
    verify_step(HEADER, replace(STEP, sequences=sequences, denominator=0))


def with_stage(at: int, **changes: Any) -> Header:
    return replace(
        HEADER, stages=with_item(HEADER.stages, at, replace(HEADER.stages[at], **changes))
    )


def with_profile(profile: bytes) -> Header:
    return replace(
        HEADER, profile=msgspec.Raw(profile), profile_sha256=hashlib.sha256(profile).hexdigest()
    )


CONTRADICTIONS = {
    "model_type": "qwen3",
    "num_hidden_layers": 9,
    "hidden_size": 65,
    "intermediate_size": 127,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": "256",
    "tie_word_embeddings": True,
}


def with_dataset(**changes: Any) -> Header:
    return replace(HEADER, dataset=replace(HEADER.dataset, **changes))


def with_config(key: str, value: object) -> Header:
    return make_header(
        num_stages=3, model=make_model(config=msgspec.json.encode({key: value}).decode())
    )


HEADER_MUTATIONS: list[tuple[str, Header, str]] = [
    ("version", replace(HEADER, format_version=1), "format 1, not 2"),
    ("no stage", replace(HEADER, stages=()), "no stage"),
    (
        "gap",
        with_stage(1, first_layer=4),
        "stage 1 has 3 layers from 4; expected at least one, from 3",
    ),
    ("empty stage", with_stage(1, num_layers=0), "stage 1 has 0 layers"),
    ("layers missing", with_stage(2, num_layers=1), "the stages hold 7 layers, the model has 8"),
    ("two embeddings", with_stage(1, embedding=True), "stage 1: the first stage embeds"),
    (
        "no head",
        with_stage(2, head=False),
        "stage 2: the first stage embeds, the last has the head",
    ),
    ("replicas", replace(HEADER, num_replicas=0), "num_replicas is 0"),
    ("batch", replace(HEADER, batch_size=0), "batch_size is 0"),
    ("steps", replace(HEADER, num_steps=0), "num_steps is 0"),
    ("max length", replace(HEADER, max_length=0), "max_length is 0"),
    ("logits", replace(HEADER, logits_tokens=0), "logits_tokens is 0"),
    (
        "many logits",
        replace(HEADER, logits_tokens=2**31),
        "logits_tokens is 2147483648; expected 1 to 2147483647",
    ),
    ("truncated", with_dataset(num_truncated=1), "num_truncated is 1; expected 0 to 0"),
    (
        "too many truncated",
        replace(with_dataset(num_truncated=101), max_length=9),
        "is 101; expected 0 to 100",
    ),
    (
        "path with newline",
        with_dataset(path="a\nb"),
        "dataset.path 'a\\nb' has a character that no plan can hold",
    ),
    ("path with NUL", with_dataset(path="a\0b"), "dataset.path 'a\\x00b' has a character"),
    ("path not UTF-8", with_dataset(path="caf\udce9"), "dataset.path 'caf\\udce9' has a character"),
    (
        "tokenizer",
        with_dataset(tokenizer="\x1b[2J"),
        "dataset.tokenizer '\\x1b[2J' has a character",
    ),
    ("policy", replace(HEADER, policy="\r"), "policy '\\r' has a character"),
    (
        "name",
        make_header(num_stages=3, model=make_model(name="\x9b")),
        "model.name '\\x9b' has a character",
    ),
    ("limits", replace(HEADER, memory_limit_bytes=(1, 2)), "2 memory limits for 3 stages"),
    ("limit 0", replace(HEADER, memory_limit_bytes=(1, 0, 1)), "or one is not positive"),
    (
        "heads",
        replace(HEADER, model=replace(HEADER.model, num_kv_heads=3)),
        "4 heads cannot share 3",
    ),
    (
        "no width",
        replace(HEADER, model=replace(HEADER.model, head_dim=0)),
        "the model's head_dim is 0",
    ),
    (
        "config",
        replace(HEADER, model=replace(HEADER.model, config="[1]")),
        "config is not a JSON object",
    ),
    (
        "deep config",
        replace(HEADER, model=replace(HEADER.model, config="[" * 10**5)),
        "config is not a JSON object",
    ),
    *(
        (f"config {key}", with_config(key, value), f"config says {key} {value!r}, its ")
        for key, value in CONTRADICTIONS.items()
    ),
    (
        "dataset",
        replace(HEADER, dataset=replace(HEADER.dataset, num_sequences=0)),
        "dataset.num_sequences is 0",
    ),
    (
        "digest",
        replace(HEADER, dataset=replace(HEADER.dataset, sha256="x")),
        "dataset.sha256 is not a sha256",
    ),
    (
        "profile",
        replace(HEADER, profile=msgspec.Raw(b"\x80")),
        "profile_sha256 is not the digest of the profile",
    ),
    ("profile list", with_profile(b"\x90"), "the profile cannot be used"),
    ("deep profile", with_profile(b"\x81\xa1a" * 10**5), "the profile cannot be used"),
    (
        "profile's model",
        with_profile(msgspec.msgpack.encode({"model": make_model(9), "dtype": "float32"})),
        "another model",
    ),
    ("profile's dtype", replace(HEADER, dtype="bfloat16"), "the profile is of another dtype"),
    (
        "model digest",
        replace(HEADER, model_sha256="0" * 64),
        "model_sha256 is not the digest of the model's config",
    ),
    ("no ranks", replace(HEADER, sequence_parallel=0), "sequence_parallel is 0"),
    ("no devices", replace(HEADER, devices_per_node=0), "devices_per_node is 0"),
    (
        "uneven ranks",
        replace(HEADER, sequence_parallel=3),
        "sequence_parallel is 3; 4 heads and 2 key-value heads",
    ),
]


@pytest.mark.parametrize(
    ("ranks", "kv_heads", "fits"),
    [(2, 4, True), (4, 4, True), (4, 2, True), (12, 1, True), (4, 6, False), (8, 4, False)],
)
def test_ranks_that_share_sequences_share_heads_evenly(
    ranks: int, kv_heads: int, fits: bool
) -> None:
    """A rank has several key-value heads, or several ranks have the same one."""
    model = msgspec.structs.replace(HEADER.model, num_heads=12, num_kv_heads=kv_heads)
    header = replace(HEADER, model=model, sequence_parallel=ranks)
    if fits:
        check_sequence_parallel(header)
        return
    with pytest.raises(VerifyError, match=f"12 heads and {kv_heads} key-value heads cannot"):
        check_sequence_parallel(header)


@pytest.mark.parametrize(
    ("header", "expected"), [pytest.param(h, e, id=name) for name, h, e in HEADER_MUTATIONS]
)
def test_corrupt_headers_are_refused(header: Header, expected: str) -> None:
    with pytest.raises(VerifyError, match=r"^header: ") as caught:
        verify_header(header)
    assert expected in str(caught.value)


def test_configs_may_leave_defaults_out() -> None:
    verify_header(with_config("head_dim", None))
    verify_header(with_config("head_dim", 16))


def test_a_row_comes_again_only_when_all_have_come(tmp_path: Path) -> None:
    def write(num_rows: int, *batches: tuple[int, ...]) -> None:
        dataset = replace(HEADER.dataset, num_sequences=num_rows, num_tokens=2**62)
        header = make_header(num_steps=len(batches), dataset=dataset)
        with PlanWriter(tmp_path / "plan", header) as writer:
            for index, rows in enumerate(batches):
                step = make_step(header, index, lengths=[5] * len(rows))
                sequences = tuple(
                    replace(s, row=row) for s, row in zip(step.sequences, rows, strict=True)
                )
                writer.append(replace(step, sequences=sequences))

    def check() -> None:
        with open_plan(tmp_path / "plan") as reader:
            verify_plan(reader)

    write(5, (0, 4), (1, 3), (2,), (3, 0), (4,))
    check()
    write(2**62, (0, 2**62 - 1), (1, 3), (64,), (65,))
    check()
    write(5, (0, 4), (1, 3), (2,), (3, 0), (3,))
    with pytest.raises(
        VerifyError,
        match=r"plan: step 4: sequence 0 is row 3 again, with 2 of 5 rows seen; compile",
    ):
        check()


def test_steps_that_need_receives_posted_ahead_are_counted(tmp_path: Path) -> None:
    """Without, 1F1B stands still: F goes down while B comes up."""
    header = make_header(num_stages=2, num_steps=2)
    eager = make_step(header, 0, lengths=(16, 16, 16))
    patient = make_step(header, 1, lengths=(16, 16, 16))
    for stage in (0, 1):
        text = " ".join(f"{stage}F{c} {stage}B{c}" for c in range(3))
        patient = with_program(stage, text, number=0, step=patient)
    eager = with_program(0, "0F0 0F1 0B0 0F2 0B1 0B2", number=0, step=eager)
    eager = with_program(1, "1F0 1B0 1F1 1B1 1F2 1B2", number=0, step=eager)
    with PlanWriter(tmp_path / "plan", header) as writer:
        writer.append(eager)
        writer.append(patient)
    with open_plan(tmp_path / "plan") as reader:
        assert verify_plan(reader).num_rendezvous_steps == 1


def test_readers_verify_what_they_read_and_name_the_file(tmp_path: Path) -> None:
    """Nothing of a plan that breaks a rule can be shown or run."""
    end = r"; compile it again with `infinipipe compile`"
    write_plan(
        tmp_path / "plan", make_header(num_replicas=2, memory_limit_bytes=(10**6, 10**6 - 1))
    )
    with open_plan(tmp_path / "plan") as reader:
        with pytest.raises(
            VerifyError, match=r".*/plan: step 1, replica 0, stage 1: a predicted peak .*" + end
        ):
            reader.step(1)
        with pytest.raises(
            VerifyError, match=r".*/plan: step 0, replica 0, stage 1: a predicted peak .*" + end
        ):
            verify_plan(reader)
    write_plan(tmp_path / "plan", make_header(logits_tokens=0))
    with pytest.raises(
        VerifyError, match=r".*/plan: header: logits_tokens is 0; expected 1 to 2147483647" + end
    ):
        open_plan(tmp_path / "plan")


INTEGERS = st.integers(-3, 50) | st.sampled_from([-(2**63), 2**63, 10**9])
SLICES = st.builds(Slice, INTEGERS, INTEGERS, INTEGERS)
REPLICAS = st.builds(
    Replica,
    chunks=st.lists(st.builds(Chunk, st.lists(SLICES, max_size=3).map(tuple)), max_size=3).map(
        tuple
    ),
    recompute=st.lists(st.lists(INTEGERS, max_size=3).map(tuple), max_size=3).map(tuple),
    keep_attention=st.lists(st.lists(INTEGERS, max_size=3).map(tuple), max_size=3).map(tuple),
    programs=st.lists(
        st.lists(st.builds(Op, st.sampled_from(OpKind), INTEGERS), max_size=8).map(tuple),
        max_size=3,
    ).map(tuple),
    predicted=st.just(STEP.replicas[0].predicted) | st.just(()),
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(REPLICAS, st.lists(st.builds(Sequence, INTEGERS, INTEGERS, INTEGERS), max_size=3), INTEGERS)
def test_garbage_is_refused_and_never_crashes_a_rule(
    garbage: Replica, sequences: list[Sequence], index: int
) -> None:
    for step in (
        replace(STEP, replicas=(garbage, SECOND)),
        replace(STEP, replicas=(FIRST, replace(garbage, chunks=SECOND.chunks))),
        replace(STEP, replicas=(FIRST, replace(SECOND, programs=garbage.programs))),
        replace(
            STEP,
            replicas=(
                FIRST,
                replace(SECOND, recompute=garbage.recompute, programs=garbage.programs),
            ),
        ),
        replace(STEP, replicas=(FIRST, replace(SECOND, keep_attention=garbage.keep_attention))),
        replace(
            STEP,
            index=index,
            sequences=tuple(sequences),
            denominator=loss_denominator(sequences, "token"),
        ),
    ):
        if step != STEP:
            refused(step)


@pytest.mark.parametrize("mutate", ["swap", "move", "drop", "repeat", "kind"])
def test_random_mutations_of_programs(mutate: str) -> None:
    """Every changed program is refused, or is another valid schedule.

    Then the order of its chains still holds.
    """
    draw = random.Random(1)
    edits = {"swap": swap, "move": move, "drop": drop, "repeat": repeat, "kind": other_kind}
    for _ in range(200):
        step = draw.choice((STEP, SPLIT))
        number, stage = draw.randrange(2), draw.randrange(3)
        programs = step.replicas[number].programs
        changed = tuple(edits[mutate](draw, list(programs[stage])))
        if changed == programs[stage]:
            continue
        broken = with_replica(number, step, programs=with_item(programs, stage, changed))
        if mutate in ("drop", "repeat", "kind"):
            message = refused(broken)
            assert f"replica {number}, stage {stage}: op {stage}" in message or " meets " in message
        else:
            passes_or_names(broken, number)


def passes_or_names(step: Step, number: int) -> None:
    """What passes must be a schedule that the independent simulator brings to its end.

    Its chains are in order.
    """
    try:
        verify_step(HEADER, step)
    except VerifyError:
        assert re.match(rf"step 2, replica {number}, stage \d: .*op \d[FBIW]\d", refused(step))
        return
    replica = step.replicas[number]
    programs = [PackedProgram.pack(program) for program in replica.programs]
    seconds = [np.ones(len(program)) for program in replica.programs]
    timeline = simulate(programs, seconds, np.zeros((len(programs) - 1, len(replica.chunks))))
    ends = {}
    for stage, program in enumerate(replica.programs):
        for op, end in zip(program, timeline.end_s[stage], strict=True):
            ends[stage, op.kind, op.chunk] = float(end)
    backward = I if any(op.kind == I for op in replica.programs[0]) else B
    for chain in chunk_chains(replica.chunks, step.sequences):
        for before, after in itertools.pairwise(chain):
            for stage in range(3):
                assert ends[stage, F, before] < ends[stage, F, after]
                assert ends[stage, backward, before] > ends[stage, backward, after]
    for chunk in range(len(replica.chunks)):
        assert ends[0, F, chunk] < ends[1, F, chunk] < ends[2, F, chunk]
        assert ends[2, F, chunk] < ends[2, backward, chunk]
        assert ends[2, backward, chunk] < ends[1, backward, chunk] < ends[0, backward, chunk]


def swap(draw: random.Random, program: list[Op]) -> list[Op]:
    a, b = draw.sample(range(len(program)), 2)
    program[a], program[b] = program[b], program[a]
    return program


def move(draw: random.Random, program: list[Op]) -> list[Op]:
    program.insert(draw.randrange(len(program)), program.pop(draw.randrange(len(program))))
    return program


def drop(draw: random.Random, program: list[Op]) -> list[Op]:
    del program[draw.randrange(len(program))]
    return program


def repeat(draw: random.Random, program: list[Op]) -> list[Op]:
    program.insert(draw.randrange(len(program)), draw.choice(program))
    return program


def other_kind(draw: random.Random, program: list[Op]) -> list[Op]:
    at = draw.randrange(len(program))
    program[at] = replace(
        program[at], kind=draw.choice([k for k in (F, B, I, W) if k != program[at].kind])
    )
    return program


def test_verifying_is_fast() -> None:
    """20 steps a second of 512 sequences on 8 stages.

    The best of a few, as test machines are busy.
    """
    draw = random.Random(0)
    dataset = replace(HEADER.dataset, num_sequences=10**6, num_tokens=10**9)
    header = make_header(num_stages=8, batch_size=512, dataset=dataset)
    lengths = [draw.choice((3, 5, 9, 16, 30)) for _ in range(512)]
    encoded = msgspec.msgpack.encode(make_step(header, lengths=lengths))
    seconds = []
    for _ in range(5):
        start = time.process_time()
        step = msgspec.msgpack.decode(encoded, type=Step)
        verify_step(header, step)
        seconds.append(time.process_time() - start)
    assert sum(map(len, step.replicas[0].programs)) > 4000
    assert min(seconds) < 0.05
