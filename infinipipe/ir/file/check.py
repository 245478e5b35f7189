"""Proves a whole plan file: its bytes, every step by the rules, and what only all steps together can break."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from infinipipe.errors import VerifyError
from infinipipe.ir.file.encoding import Totals, named_faults
from infinipipe.ir.file.store import PlanReader
from infinipipe.ir.plan import Step
from infinipipe.ir.rules.deadlock import find_deadlock
from infinipipe.ir.verify import RULES

_FILE_RULES = (
    "The file's bytes are those that were written.",
    "The totals are the sums over the steps.",
    "No row of the dataset comes again before all have come.",
)


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
    num_rendezvous_steps: int
    """Steps that would also end if no receive were posted ahead."""
    rules: tuple[str, ...]
    """Each as a sentence."""


def verify_plan(
    reader: PlanReader, on_step: Callable[[Step], object] = lambda step: None
) -> Report:
    """Check every byte and every step of a plan file; `on_step` gets each step and may refuse it with `VerifyError`.

    Raises:
        PlanFileError: the file is damaged.
        VerifyError: a rule is broken.
    """
    reader.check_all()
    totals, num_slices, num_rendezvous, epoch = (
        Totals(),
        0,
        0,
        _Epoch(reader.header.dataset.num_sequences),
    )
    # The reader verifies the header and each step.
    for step in reader:
        totals = totals.plus(step)
        num_slices += sum(
            len(chunk.slices) for replica in step.replicas for chunk in replica.chunks
        )
        num_rendezvous += not any(
            find_deadlock(replica.programs, posted_ahead=0) for replica in step.replicas
        )
        with named_faults(reader.path):
            epoch.add(step)
            on_step(step)
    if totals != reader.totals:
        with named_faults(reader.path):
            raise VerifyError("the totals are not the sums over the steps")
    return _report(
        totals, num_slices, 2 * (len(reader.header.stages) - 1) * totals.num_chunks, num_rendezvous
    )


class _Epoch:
    """The rows that have come since the dataset began anew."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._num_seen = 0
        # 64 rows in a number, so that its size follows the rows that come, whatever the header says there are.
        self._seen: dict[int, int] = {}

    def add(self, step: Step) -> None:
        for number, sequence in enumerate(step.sequences):
            if self._num_seen == self._num_rows:
                self._seen, self._num_seen = {}, 0
            block, bit = sequence.row >> 6, 1 << (sequence.row & 63)
            before = self._seen.get(block, 0)
            if before & bit:
                raise VerifyError(
                    f"step {step.index}: sequence {number} is row {sequence.row} again, "
                    f"with {self._num_seen} of {self._num_rows} rows seen"
                )
            self._seen[block] = before | bit
            self._num_seen += 1


def _report(
    totals: Totals, num_slices: int, num_transfers: int, num_rendezvous_steps: int
) -> Report:
    return Report(
        num_steps=totals.num_steps,
        num_sequences=totals.num_sequences,
        num_tokens=totals.num_tokens,
        num_chunks=totals.num_chunks,
        num_slices=num_slices,
        num_ops=totals.num_ops,
        num_transfers=num_transfers,
        num_rendezvous_steps=num_rendezvous_steps,
        rules=(*_FILE_RULES, *((rule.__doc__ or "").splitlines()[0] for rule in RULES)),
    )
