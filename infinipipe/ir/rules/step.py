"""Rules of a step's data: its sequences, chunks and slices. A broken one raises `VerifyError` and names the place.

They run in the order of `STEP_RULES`: ranges first, so that the later ones may index freely.
"""

from __future__ import annotations

from collections.abc import Iterator

from infinipipe.errors import VerifyError
from infinipipe.ir.plan import Header, Slice, Step, loss_denominator

# Sums of many floats may differ in their last digits.
ROUNDING = 1 + 1e-9
# Kernels index elements with 32 bits.
_MAX_ELEMENTS = 2**31 - 1
# Thirty thousand years: sums of these are finite however many there are.
_MAX_SECONDS = 1e12
_MOST_LETTERS = 200
_MOST_GAP = 1e6


def check_step_index(header: Header, step: Step) -> None:
    """Steps are numbered from 0."""
    if not 0 <= step.index < header.num_steps:
        raise _at_step(step, f"the plan has steps 0 to {header.num_steps - 1}")


def check_sequences(header: Header, step: Step) -> None:
    """Sequences have tokens, at most max_length, and at most one target fewer; rows are in the dataset."""
    if not 1 <= len(step.sequences) <= header.batch_size:
        raise _at_step(step, f"{len(step.sequences)} sequences in a batch of {header.batch_size}")
    longest = header.max_length or _MAX_ELEMENTS
    for number, (row, length, num_targets) in enumerate(
        (s.row, s.length, s.num_targets) for s in step.sequences
    ):
        if not 1 <= length <= longest:
            raise _at_step(step, f"sequence {number} has {length} tokens; expected 1 to {longest}")
        if not 0 <= num_targets < length:
            raise _at_step(step, f"sequence {number} has {num_targets} targets in {length} tokens")
        if not 0 <= row < header.dataset.num_sequences:
            raise _at_step(
                step,
                f"sequence {number} is row {row} of a dataset of {header.dataset.num_sequences}",
            )


def check_rows(header: Header, step: Step) -> None:
    """No row comes twice in a step."""
    seen: set[int] = set()
    for number, sequence in enumerate(step.sequences):
        if sequence.row in seen:
            raise _at_step(step, f"sequence {number} repeats row {sequence.row}")
        seen.add(sequence.row)


def check_denominator(header: Header, step: Step) -> None:
    """The loss is divided by the targets, or the sequences with a target, of the whole batch."""
    expected = loss_denominator(step.sequences, header.loss_norm)
    if step.denominator != expected:
        raise _at_step(
            step, f"the denominator is {step.denominator}; its sequences give {expected}"
        )


def check_step_times(header: Header, step: Step) -> None:
    """Predicted times are possible, and bound <= makespan <= step."""
    times = (step.bound_s, step.makespan_s, step.step_s)
    if not all(0 <= t <= _MAX_SECONDS for t in times):
        raise _at_step(
            step, f"bound, makespan and step of {times} seconds; expected 0 to {_MAX_SECONDS:g}"
        )
    if step.bound_s > step.makespan_s * ROUNDING or step.makespan_s > step.step_s * ROUNDING:
        raise _at_step(step, f"bound, makespan and step of {times} seconds must not fall")


def check_replica_count(header: Header, step: Step) -> None:
    """Every replica has its part, even an empty one."""
    if len(step.replicas) != header.num_replicas:
        raise _at_step(step, f"{len(step.replicas)} replicas; the header has {header.num_replicas}")


def check_search(header: Header, step: Step) -> None:
    """What is told of the search is printable, and a gap is a finite share."""
    for number, replica in enumerate(step.replicas):
        found, where = replica.search, f"replica {number}: the search"
        if found is None:
            continue
        texts = (found.winner, found.solver or "", found.status or "")
        if not all(text.isprintable() and len(text) <= _MOST_LETTERS for text in texts):
            raise _at_step(
                step, f"{where} has a text that is longer than {_MOST_LETTERS} or cannot be printed"
            )
        if found.gap is not None and not 0 <= found.gap <= _MOST_GAP:
            raise _at_step(step, f"{where} has a gap of {found.gap}; expected 0 to {_MOST_GAP:g}")


def check_slice_ranges(header: Header, step: Step) -> None:
    """No chunk and no slice is empty, and slices lie within their sequence."""
    lengths = [s.length for s in step.sequences]
    for replica, chunk, pieces in _chunks(step):
        if not pieces:
            raise _at_chunk(step, replica, chunk, "it has no slice")
        for position, piece in enumerate(pieces):
            if not 0 <= piece.sequence < len(lengths):
                raise _at_slice(
                    step, replica, chunk, position, f"there is no sequence {piece.sequence}"
                )
            if piece.length < 1 or piece.start < 0 or piece.stop > lengths[piece.sequence]:
                why = f"{_show(piece)} is empty or outside its {lengths[piece.sequence]} tokens"
                raise _at_slice(step, replica, chunk, position, why)


def check_coverage(header: Header, step: Step) -> None:
    """Every token of every sequence is in exactly one slice, and all its slices in one replica."""
    pieces_of: list[list[tuple[int, int, int, int, int]]] = [[] for _ in step.sequences]
    for replica, chunk, pieces in _chunks(step):
        for position, piece in enumerate(pieces):
            pieces_of[piece.sequence].append((piece.start, piece.stop, replica, chunk, position))
    for sequence, found in enumerate(pieces_of):
        covered = 0
        for start, stop, replica, chunk, position in sorted(found):
            if start != covered:
                what = (
                    "overlaps the slice before"
                    if start < covered
                    else f"leaves tokens from {covered} out"
                )
                why = f"sequence {sequence} [{start}, {stop}) {what}"
                raise _at_slice(step, replica, chunk, position, why)
            if replica != found[0][2]:
                why = f"sequence {sequence} is also in replica {found[0][2]}"
                raise _at_slice(step, replica, chunk, position, why)
            covered = stop
        if covered != step.sequences[sequence].length:
            raise _at_step(
                step,
                f"sequence {sequence}: tokens [{covered}, {step.sequences[sequence].length}) are in no slice",
            )


def check_split_slices(header: Header, step: Step) -> None:
    """At most one slice of a chunk is a part of its sequence."""
    lengths = [s.length for s in step.sequences]
    for replica, chunk, pieces in _chunks(step):
        parts = [
            position
            for position, piece in enumerate(pieces)
            if piece.length != lengths[piece.sequence]
        ]
        if len(parts) > 1:
            first, second = (pieces[position] for position in parts[:2])
            why = f"{_show(first)} and {_show(second)} are both parts of a sequence"
            raise _at_slice(step, replica, chunk, parts[1], why)


def check_kernel_sizes(header: Header, step: Step) -> None:
    """Queries, keys and activations of a chunk have fewer than 2**31 elements."""
    model = header.model
    width = max(model.num_heads * model.head_dim, model.hidden_size, model.intermediate_size)
    kv_width = model.kv_size
    for replica, chunk, pieces in _chunks(step):
        tokens, context = sum(piece.length for piece in pieces), max(piece.stop for piece in pieces)
        if max(tokens * width, context * kv_width) > _MAX_ELEMENTS:
            raise _at_chunk(
                step,
                replica,
                chunk,
                f"{tokens} tokens, context {context}: too large for 32-bit kernels",
            )


def _chunks(step: Step) -> Iterator[tuple[int, int, tuple[Slice, ...]]]:
    """Yield replica, chunk and slices of every chunk."""
    for number, replica in enumerate(step.replicas):
        for index, chunk in enumerate(replica.chunks):
            yield number, index, chunk.slices


def _show(piece: Slice) -> str:
    return f"sequence {piece.sequence} [{piece.start}, {piece.stop})"


def _at_step(step: Step, why: str) -> VerifyError:
    return VerifyError(f"step {step.index}: {why}")


def _at_slice(step: Step, replica: int, chunk: int, position: int, why: str) -> VerifyError:
    """Return the error of a slice, with a marker on it among its neighbours."""
    pieces = step.replicas[replica].chunks[chunk].slices
    words = [f"{piece.sequence}[{piece.start},{piece.stop})" for piece in pieces]
    words[position] = f">>{words[position]}<<"
    first, last = max(0, position - 2), position + 3
    shown = ["..."] * (first > 0) + words[first:last] + ["..."] * (last < len(words))
    return _at_chunk(step, replica, chunk, f"{why}: {' '.join(shown)}")


def _at_chunk(step: Step, replica: int, chunk: int, why: str) -> VerifyError:
    return VerifyError(f"step {step.index}, replica {replica}, chunk {chunk}: {why}")


STEP_RULES = (
    check_step_index,
    check_sequences,
    check_rows,
    check_denominator,
    check_step_times,
    check_replica_count,
    check_search,
    check_slice_ranges,
    check_coverage,
    check_split_slices,
    check_kernel_sizes,
)
