"""The predicted timeline of a step, drawn again from the plan alone: it holds the profile it was made with."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import msgspec
import numpy as np

from infinipipe.errors import PlanFileError
from infinipipe.ir import Header, Op, OpKind, Replica, Step
from infinipipe.ir.timeline import Span
from infinipipe.planner.simulate import simulate
from infinipipe.profiles import Profile
from infinipipe.profiles.cost import Costs, Loads, chunk_costs, chunk_loads, replay_memory


def step_spans(header: Header, step: Step) -> tuple[Span, ...]:
    """Return every op of a step with its predicted times and memory.

    Raises:
        PlanFileError: the plan's profile is of another format, or prices no I and W although the step has some.
    """
    profile = _profile(header)
    spans: list[Span] = []
    for number, replica in enumerate(step.replicas):
        if replica.chunks:
            spans += _replica_spans(header, profile, step, number, replica)
    return tuple(spans)


def _profile(header: Header) -> Profile:
    try:
        return msgspec.msgpack.decode(header.profile, type=Profile)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise PlanFileError(f"the plan's profile is of another format: {error}; compile the plan again") from None


def _replica_spans(header: Header, profile: Profile, step: Step, number: int, replica: Replica) -> list[Span]:
    loads = chunk_loads(replica.chunks, step.sequences)
    costs = chunk_costs(profile, header.stages, loads, header.logits_tokens)
    recompute_s = np.array(replica.recompute) * costs.recompute_s
    seconds = [
        [_op_seconds(costs, recompute_s[stage], stage, op) for op in program]
        for stage, program in enumerate(replica.programs)
    ]
    timeline = simulate(replica.programs, seconds, costs.transfer_s.tolist())
    spans = []
    for stage, program in enumerate(replica.programs):
        memory = _memory(header, profile, step, replica, loads, costs, stage)
        for position, op in enumerate(program):
            during, after = memory[position]
            spans.append(
                Span(
                    replica=number,
                    stage=stage,
                    op=op,
                    start_s=float(timeline.start_s[stage][position]),
                    end_s=float(timeline.end_s[stage][position]),
                    recompute_s=float(recompute_s[stage, op.chunk]) if op.kind == OpKind.BACKWARD else 0.0,
                    during_bytes=during,
                    after_bytes=after,
                )
            )
    return spans


def _op_seconds(costs: Costs, recompute_s: SequenceOf[float], stage: int, op: Op) -> float:
    match op.kind:
        case OpKind.FORWARD:
            return float(costs.forward_s[stage, op.chunk])
        case OpKind.BACKWARD:
            return float(costs.backward_s[stage, op.chunk] + recompute_s[op.chunk])
        case OpKind.BACKWARD_INPUT | OpKind.BACKWARD_WEIGHT:
            raise PlanFileError("the plan splits B into I and W, which its profile does not price; compile it again")


def _memory(
    header: Header, profile: Profile, step: Step, replica: Replica, loads: Loads, costs: Costs, stage: int
) -> list[tuple[int, int]]:
    """Return the bytes during and after each op of a stage."""
    program, recompute = replica.programs[stage], replica.recompute[stage]
    trace = replay_memory(profile, header.stages, stage, step.sequences, loads, costs, program, recompute)
    return [(round(during), round(after)) for during, after in zip(trace.during, trace.after, strict=True)]
