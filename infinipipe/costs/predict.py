"""The timeline of a step drawn again from the plan alone, as it holds the profile it was made with."""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import numpy as np

from infinipipe.aliases import Floats
from infinipipe.costs.cost import (
    MemoryTrace,
    chunk_costs,
    chunk_loads,
    op_seconds,
    optimizer_seconds,
    replay_memory,
    split_costs,
)
from infinipipe.costs.simulate import Timeline, simulate
from infinipipe.errors import InfinipipeError, PlanFileError, VerifyError
from infinipipe.ir import Header, Op, OpKind, Replica, StagePrediction, Step
from infinipipe.ir.text import show_op, window
from infinipipe.profiles import Profile

_SPLIT = (OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT)
_RECOMPUTING = (OpKind.BACKWARD, OpKind.BACKWARD_INPUT)
_TOLERANCE = 1e-9


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """One op from its start to its end, in seconds from the start of the step."""

    replica: int
    stage: int
    op: Op
    start_s: float
    end_s: float
    recompute_s: float
    """How much of it recomputes what F dropped."""
    during_bytes: int
    """The most that the stage holds while the op runs."""
    after_bytes: int
    """What the stage holds when it has ended."""

    @property
    def name(self) -> str:
        """The op's text form."""
        return show_op(self.stage, self.op)


def step_spans(header: Header, step: Step) -> tuple[Span, ...]:
    """Return every op of a step with its predicted times and memory.

    Raises:
        PlanFileError: the step has I and W, which the plan's profile does not price.
        VerifyError: the plan's profile cannot be used.
    """
    if not is_priced(header, step):
        raise PlanFileError(
            f"step {step.index} has ops I and W; the plan's profile prices F and B, so it has no times"
        )
    spans: list[Span] = []
    for number, drawn in _redraw(header, _profile(header), step):
        spans += drawn.spans(number, step.replicas[number])
    return tuple(spans)


def is_priced(header: Header, step: Step) -> bool:
    """Return whether the plan's profile prices all ops of a step: I and W are not in every profile."""
    if not _has_split(step.replicas):
        return True
    try:
        return _profile(header).prices_split
    except VerifyError:
        return False


def _has_split(replicas: SequenceOf[Replica]) -> bool:
    return any(
        op.kind in _SPLIT for replica in replicas for program in replica.programs for op in program
    )


def check_predictions(header: Header, step: Step) -> None:
    """Check that a step's times and peaks are those that the plan's profile gives; `is_priced` must hold.

    Raises:
        VerifyError: they are not, or the profile cannot be used.
    """
    profile, makespan_s = _profile(header), 0.0
    for number, drawn in _redraw(header, profile, step):
        makespan_s = max(makespan_s, drawn.timeline.makespan_s)
        for stage, told in enumerate(step.replicas[number].predicted):
            where = f"step {step.index}, replica {number}, stage {stage}"
            _compare(
                where,
                told,
                drawn.prediction(stage),
                drawn.around_peak(stage, step.replicas[number]),
            )
    whole = makespan_s + max(optimizer_seconds(profile, stage) for stage in header.stages)
    for name, found in (("makespan_s", makespan_s), ("step_s", whole)):
        _compare_number(f"step {step.index}", name, getattr(step, name), found)


def _compare(where: str, told: StagePrediction, found: StagePrediction, around_peak: str) -> None:
    if told.peak_bytes != found.peak_bytes:
        raise VerifyError(
            f"{where}: a predicted peak of {told.peak_bytes} bytes; "
            f"the plan's profile gives {found.peak_bytes}: {around_peak}"
        )
    for name in ("busy_s", "recompute_s", "bubble_s"):
        _compare_number(
            where, name, getattr(told, name), getattr(found, name), found.busy_s + found.bubble_s
        )


def _compare_number(where: str, name: str, told: float, found: float, scale: float = 0.0) -> None:
    if not math.isclose(told, found, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE * scale):
        raise VerifyError(
            f"{where}: a predicted {name} of {told}; the plan's profile gives {found}"
        )


def _profile(header: Header) -> Profile:
    try:
        return msgspec.msgpack.decode(header.profile, type=Profile)
    except (msgspec.MsgspecError, InfinipipeError, ValueError, RecursionError) as error:
        raise VerifyError(f"header: the profile cannot be used: {error}") from None


@dataclass(frozen=True)
class _Drawn:
    """One replica of a step, drawn again."""

    timeline: Timeline
    recompute_s: Floats
    """Of each stage and chunk."""
    memory: tuple[MemoryTrace, ...]

    def prediction(self, stage: int) -> StagePrediction:
        busy = self.timeline.busy_s(stage)
        return StagePrediction(
            busy_s=busy,
            recompute_s=float(self.recompute_s[stage].sum()),
            bubble_s=max(0.0, self.timeline.makespan_s - busy),
            peak_bytes=round(self.memory[stage].during.max()),
        )

    def around_peak(self, stage: int, replica: Replica) -> str:
        return window(stage, replica.programs[stage], int(self.memory[stage].during.argmax()))

    def spans(self, number: int, replica: Replica) -> Iterator[Span]:
        for stage, program in enumerate(replica.programs):
            start_s, end_s, memory = (
                self.timeline.start_s[stage],
                self.timeline.end_s[stage],
                self.memory[stage],
            )
            for position, op in enumerate(program):
                yield Span(
                    replica=number,
                    stage=stage,
                    op=op,
                    start_s=float(start_s[position]),
                    end_s=float(end_s[position]),
                    recompute_s=float(self.recompute_s[stage, op.chunk])
                    if op.kind in _RECOMPUTING
                    else 0.0,
                    during_bytes=round(memory.during[position]),
                    after_bytes=round(memory.after[position]),
                )


def _redraw(header: Header, profile: Profile, step: Step) -> Iterator[tuple[int, _Drawn]]:
    """Yield the number and the drawing of every replica that has work."""
    for number, replica in enumerate(step.replicas):
        if replica.chunks:
            with _finite(step):
                drawn = _redraw_replica(header, profile, step, replica)
            yield number, drawn


@contextmanager
def _finite(step: Step) -> Iterator[None]:
    """Refuse a profile whose numbers, each of them possible, are too large together."""
    try:
        with np.errstate(over="raise", invalid="raise", divide="raise"):
            yield
    except (ArithmeticError, ValueError, IndexError) as error:
        raise VerifyError(
            f"step {step.index}: the profile gives no finite times and bytes: {error}"
        ) from None


def _redraw_replica(header: Header, profile: Profile, step: Step, replica: Replica) -> _Drawn:
    loads = chunk_loads(replica.chunks, step.sequences)
    costs = chunk_costs(profile, header.stages, loads, header.logits_tokens)
    split = split_costs(profile, header.stages, loads) if _has_split((replica,)) else None
    recompute_s = np.array(replica.recompute) * costs.recompute_s
    tables = [
        op_seconds(costs, split, stage, counts) for stage, counts in enumerate(replica.recompute)
    ]
    seconds = [
        [table[op.kind][op.chunk] for op in ops]
        for table, ops in zip(tables, replica.programs, strict=True)
    ]
    timeline = simulate(replica.programs, seconds, costs.transfer_s.tolist())
    memory = tuple(
        replay_memory(
            profile,
            header.stages,
            stage,
            step.sequences,
            loads,
            costs,
            program,
            replica.recompute[stage],
            split,
        )
        for stage, program in enumerate(replica.programs)
    )
    numbers = (timeline.makespan_s, *(float(trace.during.max()) for trace in memory))
    if not all(map(math.isfinite, numbers)):
        raise ArithmeticError("they overflow")
    return _Drawn(timeline, recompute_s, memory)
