"""Prove a plan: many small rules, always on after compile and at load.

`header_rules`, `step_rules` and `program_rules` hold the rules and run first those that check ranges, so
that no plan, however broken, makes a later one fail in another way than with `VerifyError`.
A row may come again in another step: that is the next epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from infinipipe.errors import VerifyError
from infinipipe.ir.header_rules import HEADER_RULES
from infinipipe.ir.layout import AGAIN, Totals, shown
from infinipipe.ir.plan import Header, Step
from infinipipe.ir.program_rules import (
    PIPELINE_RULES,
    PROGRAM_RULES,
    SHAPE_RULES,
    ProgramCase,
    ReplicaCase,
)
from infinipipe.ir.step_rules import STEP_RULES

if TYPE_CHECKING:
    from infinipipe.ir.store import PlanReader

_FILE_RULES = ("The file's bytes are those that were written.", "The totals are the sums over the steps.")


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `verify_plan` has checked, and how much of it."""

    num_steps: int
    num_sequences: int
    num_tokens: int
    num_chunks: int
    num_slices: int
    num_ops: int
    num_transfers: int
    """Activations and gradients between stages, each matched at both ends."""
    rules: tuple[str, ...]
    """Each as a sentence."""


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
    for number, replica in enumerate(step.replicas):
        _verify_replica(ReplicaCase(header, step, number, replica))


def verify_plan(reader: PlanReader, on_step: Callable[[], object] = lambda: None) -> Report:
    """Check every byte and every step of a plan file; `on_step` is called after each step.

    Raises:
        PlanFileError: the file is damaged.
        VerifyError: a rule is broken.
    """
    reader.check_all()
    totals, num_slices, num_transfers = Totals(), 0, 0
    # The reader verifies the header and each step.
    for step in reader:
        totals = totals.plus(step)
        num_slices += sum(len(chunk.slices) for replica in step.replicas for chunk in replica.chunks)
        num_transfers += 2 * (len(reader.header.stages) - 1) * sum(len(replica.chunks) for replica in step.replicas)
        on_step()
    if totals != reader.totals:
        raise VerifyError(f"{shown(reader.path)}: the totals are not the sums over the steps; {AGAIN}")
    return _report(totals, num_slices, num_transfers)


def _verify_replica(case: ReplicaCase) -> None:
    for shape_rule in SHAPE_RULES:
        shape_rule(case)
    for stage, program in enumerate(case.replica.programs):
        program_case = ProgramCase(case, stage, program)
        for program_rule in PROGRAM_RULES:
            program_rule(program_case)
    for pipeline_rule in PIPELINE_RULES:
        pipeline_rule(case)


def _report(totals: Totals, num_slices: int, num_transfers: int) -> Report:
    rules = (*HEADER_RULES, *STEP_RULES, *SHAPE_RULES, *PROGRAM_RULES, *PIPELINE_RULES)
    return Report(
        num_steps=totals.num_steps,
        num_sequences=totals.num_sequences,
        num_tokens=totals.num_tokens,
        num_chunks=totals.num_chunks,
        num_slices=num_slices,
        num_ops=totals.num_ops,
        num_transfers=num_transfers,
        rules=(*_FILE_RULES, *((rule.__doc__ or "").splitlines()[0] for rule in rules)),
    )
