"""The rules applied to a header and to a step: always on, after compile and at load.

`infinipipe.ir.rules` holds the rules, many and small. Those that check ranges run first, so that no
plan, however broken, makes a later one fail in another way than with `VerifyError`.
"""

from __future__ import annotations

from infinipipe.ir.plan import Header, Step
from infinipipe.ir.rules.header import HEADER_RULES
from infinipipe.ir.rules.program import PROGRAM_RULES, ProgramCase
from infinipipe.ir.rules.replica import PIPELINE_RULES, SHAPE_RULES, ReplicaCase
from infinipipe.ir.rules.slicing import SLICING_RULES, SlicingCase
from infinipipe.ir.rules.step import STEP_RULES

RULES = (
    *HEADER_RULES,
    *STEP_RULES,
    *SLICING_RULES,
    *SHAPE_RULES,
    *PROGRAM_RULES,
    *PIPELINE_RULES,
)
"""All of them; the first paragraph of each one's docstring is what `infinipipe verify` says it has
checked.
"""


def verify_header(header: Header) -> None:
    """Check what holds for the whole plan.

    Raises:
        VerifyError: a rule is broken.
    """
    for rule in HEADER_RULES:
        rule(header)


def verify_step(header: Header, step: Step) -> None:
    """Check one step against a header that `verify_header` has accepted.

    Raises:
        VerifyError: a rule is broken; the message names step, replica, stage and op, or the chunk.
    """
    for step_rule in STEP_RULES:
        step_rule(header, step)
    slicing = SlicingCase(header, step)
    for slicing_rule in SLICING_RULES:
        slicing_rule(slicing)
    for number, replica in enumerate(step.replicas):
        _verify_replica(ReplicaCase(header, step, number, replica))


def _verify_replica(case: ReplicaCase) -> None:
    for shape_rule in SHAPE_RULES:
        shape_rule(case)
    for stage, program in enumerate(case.replica.programs):
        program_case = ProgramCase(case, stage, program)
        for program_rule in PROGRAM_RULES:
            program_rule(program_case)
    for pipeline_rule in PIPELINE_RULES:
        pipeline_rule(case)
