"""A plan's predictions made again from the plan alone, as it holds the profile it was made with."""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import numpy as np

from infinipipe.aliases import Floats
from infinipipe.costs.chunks import Recompute
from infinipipe.costs.model import CostModel
from infinipipe.costs.program import PackedProgram
from infinipipe.costs.simulate import Timeline, simulate
from infinipipe.errors import InfinipipeError, PlanFileError, VerifyError
from infinipipe.ir import TRAITS, Header, Op, OpKind, Replica, StagePrediction, Step, show_op
from infinipipe.ir.text import excerpt
from infinipipe.profiles import Profile

# Relative. Sums of many floats may differ in their last digits, by the version of numpy or by the
# processor, which is far less than this.
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
            f"step {step.index} has ops I and W; the plan's profile prices F and B, "
            "so it has no times"
        )
    costs = plan_costs(header)
    spans: list[Span] = []
    for number, prediction in _predict(costs, step):
        replica = step.replicas[number]
        spans += prediction.spans(number, replica)
    return tuple(spans)


def is_priced(header: Header, step: Step) -> bool:
    """Return whether the plan's profile prices all ops of a step: I and W are not in every one."""
    if not _has_input_weight(step.replicas):
        return True
    try:
        return plan_costs(header).profile.prices_input_weight
    except VerifyError:
        return False


def _has_input_weight(replicas: SequenceOf[Replica]) -> bool:
    for replica in replicas:
        for program in replica.programs:
            if any(op.kind == OpKind.BACKWARD_INPUT for op in program):
                return True
    return False


def check_predictions(header: Header, step: Step) -> None:
    """Check that a step's times and peaks are those that the plan's profile gives.

    `is_priced` must hold.

    Raises:
        VerifyError: they are not, or the profile cannot be used.
    """
    costs = plan_costs(header)
    makespan_s = 0.0
    for number, prediction in _predict(costs, step):
        makespan_s = max(makespan_s, prediction.timeline.makespan_s)
        replica = step.replicas[number]
        for stage, stated in enumerate(replica.predicted):
            where = f"step {step.index}, replica {number}, stage {stage}"
            around = prediction.around_peak(stage, replica)
            _compare(where, stated, prediction.of_stage(stage), around)
    where = f"step {step.index}"
    step_s = makespan_s + costs.end_of_step_s
    _compare_number(where, "makespan_s", step.makespan_s, makespan_s)
    _compare_number(where, "step_s", step.step_s, step_s)


def _compare(
    where: str, stated: StagePrediction, actual: StagePrediction, around_peak: str
) -> None:
    if stated.peak_bytes != actual.peak_bytes:
        raise VerifyError(
            f"{where}: a predicted peak of {stated.peak_bytes} bytes; "
            f"the plan's profile gives {actual.peak_bytes}: {around_peak}"
        )
    # A bubble is a difference of large numbers: what is next to nothing of those is equal.
    scale = actual.busy_s + actual.bubble_s
    _compare_number(where, "busy_s", stated.busy_s, actual.busy_s, scale)
    _compare_number(where, "recompute_s", stated.recompute_s, actual.recompute_s, scale)
    _compare_number(where, "bubble_s", stated.bubble_s, actual.bubble_s, scale)


def _compare_number(
    where: str, name: str, stated: float, actual: float, scale: float = 0.0
) -> None:
    absolute = _TOLERANCE * scale
    if not math.isclose(stated, actual, rel_tol=_TOLERANCE, abs_tol=absolute):
        raise VerifyError(
            f"{where}: a predicted {name} of {stated}; the plan's profile gives {actual}"
        )


def plan_costs(header: Header) -> CostModel:
    """Return the cost model that a plan was made with.

    Raises:
        VerifyError: the profile in the header cannot be used.
    """
    try:
        profile = msgspec.msgpack.decode(header.profile, type=Profile)
    except (msgspec.MsgspecError, InfinipipeError, ValueError, RecursionError) as error:
        raise VerifyError(f"header: the profile cannot be used: {error}") from None
    return CostModel(profile, header.layout, header.stages, header.logits_tokens)


@dataclass(frozen=True)
class _ReplicaPrediction:
    """One replica of a step."""

    timeline: Timeline
    recompute_s: Floats
    """(stages, chunks)"""
    during_bytes: tuple[Floats, ...]
    """(ops,) for each stage."""
    after_bytes: tuple[Floats, ...]

    def of_stage(self, stage: int) -> StagePrediction:
        busy_s = self.timeline.busy_s(stage)
        recompute_s = self.recompute_s[stage].sum()
        peak_bytes = self.during_bytes[stage].max()
        return StagePrediction(
            busy_s=busy_s,
            recompute_s=float(recompute_s),
            bubble_s=max(0.0, self.timeline.makespan_s - busy_s),
            peak_bytes=round(peak_bytes),
        )

    def around_peak(self, stage: int, replica: Replica) -> str:
        """Show the ops around the one at which the stage holds most."""
        peak = self.during_bytes[stage].argmax()
        return excerpt(stage, replica.programs[stage], int(peak))

    def spans(self, number: int, replica: Replica) -> Iterator[Span]:
        """Yield the spans of one replica, stage by stage."""
        for stage, program in enumerate(replica.programs):
            start_s = self.timeline.start_s[stage]
            end_s = self.timeline.end_s[stage]
            during = self.during_bytes[stage]
            after = self.after_bytes[stage]
            for position, op in enumerate(program):
                recompute_s = 0.0
                if TRAITS[op.kind].recomputes:
                    recompute_s = float(self.recompute_s[stage, op.chunk])
                yield Span(
                    replica=number,
                    stage=stage,
                    op=op,
                    start_s=float(start_s[position]),
                    end_s=float(end_s[position]),
                    recompute_s=recompute_s,
                    during_bytes=round(during[position]),
                    after_bytes=round(after[position]),
                )


def _predict(costs: CostModel, step: Step) -> Iterator[tuple[int, _ReplicaPrediction]]:
    """Yield the number and the prediction of every replica that has work."""
    for number, replica in enumerate(step.replicas):
        if replica.chunks:
            with _finite(step):
                prediction = _predict_replica(costs, step, replica)
            yield number, prediction


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


def _predict_replica(costs: CostModel, step: Step, replica: Replica) -> _ReplicaPrediction:
    costed = costs.price(replica.chunks, step.sequences)
    programs = [PackedProgram.pack(program) for program in replica.programs]
    recompute = Recompute(
        keep_input=np.array(replica.recompute, dtype=np.int64),
        keep_attention=np.array(replica.keep_attention, dtype=np.int64),
    )
    seconds: list[Floats] = []
    during: list[Floats] = []
    after: list[Floats] = []
    for stage, program in enumerate(programs):
        counts = Recompute(recompute.keep_input[stage], recompute.keep_attention[stage])
        memory = costs.memory(stage, costed, program)
        seconds.append(costs.op_seconds(stage, costed, program, counts))
        during.append(memory.during(counts))
        after.append(memory.after(counts))
    timeline = simulate(programs, seconds, costed.transfer_s)
    peaks = [float(held.max()) for held in during]
    if not all(map(math.isfinite, (timeline.makespan_s, *peaks))):
        raise ArithmeticError("they overflow")
    return _ReplicaPrediction(
        timeline=timeline,
        recompute_s=costed.recompute_seconds(recompute),
        during_bytes=tuple(during),
        after_bytes=tuple(after),
    )
