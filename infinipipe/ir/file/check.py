"""Proof of a whole plan file.

Its bytes, every step by the rules, and what only all steps together can break.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from infinipipe.errors import VerifyError
from infinipipe.ir.file.encoding import named_faults
from infinipipe.ir.file.store import PlanReader
from infinipipe.ir.plan import Step, Totals
from infinipipe.ir.rules.deadlock import find_deadlock
from infinipipe.ir.verify import RULES

_FILE_RULES = (
    "The file's bytes are those that were written.",
    "The totals are the sums over the steps.",
    "No row of the dataset comes again before all have come.",
)

# Rows whose bits share a number. More would waste memory where few rows of a range come, fewer
# would need more numbers where all do.
_ROWS_A_BLOCK = 64


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
    """Check every byte and every step of a plan file.

    `on_step` gets each step and may refuse it with `VerifyError`.

    Raises:
        PlanFileError: the file is damaged.
        VerifyError: a rule is broken.
    """
    reader.check_all()
    actual = Totals()
    num_slices = 0
    num_rendezvous_steps = 0
    epoch = _Epoch(reader.header.dataset.num_sequences)
    # The reader verifies the header and each step.
    for step in reader:
        actual = actual.plus(step)
        num_slices += _num_slices(step)
        if _ends_without_posting_ahead(step):
            num_rendezvous_steps += 1
        with named_faults(reader.path):
            epoch.add(step)
            on_step(step)
    if actual != reader.totals:
        with named_faults(reader.path):
            raise VerifyError("the totals are not the sums over the steps")
    # An activation and a gradient of every chunk between each stage and the next.
    num_transfers = 2 * (len(reader.header.stages) - 1) * actual.num_chunks
    return Report(
        num_steps=actual.num_steps,
        num_sequences=actual.num_sequences,
        num_tokens=actual.num_tokens,
        num_chunks=actual.num_chunks,
        num_slices=num_slices,
        num_ops=actual.num_ops,
        num_transfers=num_transfers,
        num_rendezvous_steps=num_rendezvous_steps,
        rules=_shown_rules(),
    )


def _num_slices(step: Step) -> int:
    num_slices = 0
    for replica in step.replicas:
        num_slices += sum(len(chunk.slices) for chunk in replica.chunks)
    return num_slices


def _ends_without_posting_ahead(step: Step) -> bool:
    return not any(find_deadlock(replica.programs, posted_ahead=0) for replica in step.replicas)


class _Epoch:
    """The rows that have come since the dataset began anew."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._num_seen = 0
        # Bits by block: the size follows the rows that come, whatever the header says there are.
        self._seen: dict[int, int] = {}

    def add(self, step: Step) -> None:
        for number, sequence in enumerate(step.sequences):
            if self._num_seen == self._num_rows:
                self._seen = {}
                self._num_seen = 0
            block, offset = divmod(sequence.row, _ROWS_A_BLOCK)
            bit = 1 << offset
            seen = self._seen.get(block, 0)
            if seen & bit:
                raise VerifyError(
                    f"step {step.index}: sequence {number} is row {sequence.row} again, "
                    f"with {self._num_seen} of {self._num_rows} rows seen"
                )
            self._seen[block] = seen | bit
            self._num_seen += 1


def _shown_rules() -> tuple[str, ...]:
    """Return the rules as sentences: the first paragraphs of their docstrings, each on one line."""
    shown = list(_FILE_RULES)
    for rule in RULES:
        paragraph, *_ = (rule.__doc__ or "").split("\n\n")
        shown.append(" ".join(paragraph.split()))
    return tuple(shown)
