"""Rules of a step as a whole: its sequences, its times, and how its schedules were found.

A broken one raises `VerifyError` and names the step. They run in the order of `STEP_RULES`.
"""

from __future__ import annotations

from infinipipe.errors import VerifyError
from infinipipe.ir.plan import Header, Search, Step, loss_denominator

ROUNDING = 1 + 1e-9
"""Sums of the same floats may differ in their last digits by the order of the terms.

A float is off by up to 1.1e-16 of itself with every addition, so that this allows millions of them.
"""

MAX_ELEMENTS = 2**31 - 1
"""Kernels index elements with 32 bits."""

# Thirty thousand years: sums of these are finite however many there are.
_MAX_SECONDS = 1e12

# What is said of a search is shown on one line; names and settings of policies and the words of
# solvers are a few dozen letters.
_MAX_LETTERS = 200

# A gap is relative to a bound that may be close to nothing. Beyond this it says no more than that
# there is none, which solvers say by numbers such as 1e20.
_MAX_GAP = 1e6


def check_step_index(header: Header, step: Step) -> None:
    """Steps are numbered from 0."""
    last = header.num_steps - 1
    if not 0 <= step.index <= last:
        raise _at_step(step, f"the plan has steps 0 to {last}")


def check_sequences(header: Header, step: Step) -> None:
    """Sequences have tokens, at most max_length, and at most one target fewer; rows are in the
    dataset.
    """
    num_sequences = len(step.sequences)
    if not 1 <= num_sequences <= header.batch_size:
        raise _at_step(step, f"{num_sequences} sequences in a batch of {header.batch_size}")
    longest = header.max_length or MAX_ELEMENTS
    num_rows = header.dataset.num_sequences
    for number, sequence in enumerate(step.sequences):
        length = sequence.length
        if not 1 <= length <= longest:
            why = f"sequence {number} has {length} tokens; expected 1 to {longest}"
            raise _at_step(step, why)
        num_targets = sequence.num_targets
        if not 0 <= num_targets < length:
            why = f"sequence {number} has {num_targets} targets in {length} tokens"
            raise _at_step(step, why)
        row = sequence.row
        if not 0 <= row < num_rows:
            why = f"sequence {number} is row {row} of a dataset of {num_rows}"
            raise _at_step(step, why)


def check_rows(header: Header, step: Step) -> None:
    """No row comes twice in a step."""
    seen: set[int] = set()
    for number, sequence in enumerate(step.sequences):
        row = sequence.row
        if row in seen:
            raise _at_step(step, f"sequence {number} repeats row {row}")
        seen.add(row)


def check_denominator(header: Header, step: Step) -> None:
    """The loss is divided by the targets, or the sequences with a target, of the whole batch."""
    actual = loss_denominator(step.sequences, header.loss_norm)
    if step.denominator != actual:
        why = f"the denominator is {step.denominator}; its sequences give {actual}"
        raise _at_step(step, why)


def check_step_times(header: Header, step: Step) -> None:
    """Predicted times are possible, and bound <= makespan <= step."""
    bound_s = step.bound_s
    makespan_s = step.makespan_s
    step_s = step.step_s
    times = (bound_s, makespan_s, step_s)
    if not all(0 <= t <= _MAX_SECONDS for t in times):
        why = f"bound, makespan and step of {times} seconds; expected 0 to {_MAX_SECONDS:g}"
        raise _at_step(step, why)
    bound_fits = bound_s <= makespan_s * ROUNDING
    makespan_fits = makespan_s <= step_s * ROUNDING
    if not (bound_fits and makespan_fits):
        raise _at_step(step, f"bound, makespan and step of {times} seconds must not fall")


def check_replica_count(header: Header, step: Step) -> None:
    """Every replica has its part, even an empty one."""
    num_replicas = len(step.replicas)
    if num_replicas != header.num_replicas:
        raise _at_step(step, f"{num_replicas} replicas; the header has {header.num_replicas}")


def check_search(header: Header, step: Step) -> None:
    """What is told of the search is printable, and a gap is a finite share."""
    for number, replica in enumerate(step.replicas):
        if replica.search is not None:
            _check_search_of(step, number, replica.search)


def _check_search_of(step: Step, replica: int, search: Search) -> None:
    where = f"replica {replica}: the search"
    solver = search.solver or ""
    status = search.status or ""
    for text in (search.winner, solver, status):
        if len(text) > _MAX_LETTERS or not text.isprintable():
            why = f"has a text that is longer than {_MAX_LETTERS} or cannot be printed"
            raise _at_step(step, f"{where} {why}")
    gap = search.gap
    if gap is not None and not 0 <= gap <= _MAX_GAP:
        why = f"has a gap of {gap}; expected 0 to {_MAX_GAP:g}"
        raise _at_step(step, f"{where} {why}")


def _at_step(step: Step, why: str) -> VerifyError:
    return VerifyError(f"step {step.index}: {why}")


STEP_RULES = (
    check_step_index,
    check_sequences,
    check_rows,
    check_denominator,
    check_step_times,
    check_replica_count,
    check_search,
)
