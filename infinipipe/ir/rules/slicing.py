"""Rules of a slicing: how a step's sequences are cut into slices and laid into chunks.

A broken one raises `VerifyError` and names the chunk, with its slices around a marker. They run in
the order of `SLICING_RULES`: ranges first, so that the later ones may index freely.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from infinipipe.errors import VerifyError
from infinipipe.ir.plan import Header, Slice, Step
from infinipipe.ir.rules.step import MAX_ELEMENTS
from infinipipe.ir.text import marked

# Slices on either side of the one that an error is about: those that it can be at odds with.
_SHOWN_AROUND = 2

_Place = tuple[int, int, int, int, int]
"""Start and length of a slice; its replica; its chunk, as an index of `SlicingCase.chunks`; and its
position in the chunk.
"""


@dataclass(frozen=True)
class SlicingCase:
    """The slices of a step, to be checked."""

    header: Header
    step: Step

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of every sequence."""
        return [sequence.length for sequence in self.step.sequences]

    @cached_property
    def chunks(self) -> list[ChunkCase]:
        """The chunks of all replicas."""
        step = self.step
        chunks = []
        for number, replica in enumerate(step.replicas):
            for index, chunk in enumerate(replica.chunks):
                case = ChunkCase(step.index, number, index, chunk.slices)
                chunks.append(case)
        return chunks


@dataclass(slots=True)
class ChunkCase:
    """One chunk of a step, to be checked."""

    step: int
    replica: int
    index: int
    slices: tuple[Slice, ...]

    def fault(self, why: str) -> VerifyError:
        """Return the error of the chunk."""
        return VerifyError(f"step {self.step}, replica {self.replica}, chunk {self.index}: {why}")

    def fault_at(self, position: int, why: str) -> VerifyError:
        """Return the error of a slice, with a marker on it among its neighbours."""
        words = [f"{slice_.sequence}[{slice_.start},{slice_.stop})" for slice_ in self.slices]
        return self.fault(f"{why}: {marked(words, position, _SHOWN_AROUND)}")


def check_slice_ranges(case: SlicingCase) -> None:
    """No chunk and no slice is empty, and slices lie within their sequence."""
    lengths = case.lengths
    for chunk in case.chunks:
        if not chunk.slices:
            raise chunk.fault("it has no slice")
        for position, slice_ in enumerate(chunk.slices):
            sequence = slice_.sequence
            if not 0 <= sequence < len(lengths):
                raise chunk.fault_at(position, f"there is no sequence {sequence}")
            length = lengths[sequence]
            empty = slice_.length < 1
            if empty or slice_.start < 0 or slice_.stop > length:
                why = f"{_show(slice_)} is empty or outside its {length} tokens"
                raise chunk.fault_at(position, why)


def check_coverage(case: SlicingCase) -> None:
    """Every token of every sequence is in exactly one slice, and all its slices in one replica."""
    places_of: list[list[_Place]] = [[] for _ in case.lengths]
    for number, chunk in enumerate(case.chunks):
        for position, slice_ in enumerate(chunk.slices):
            place = (slice_.start, slice_.length, chunk.replica, number, position)
            places_of[slice_.sequence].append(place)
    for sequence, places in enumerate(places_of):
        _check_cover(case, sequence, places)


def _check_cover(case: SlicingCase, sequence: int, places: list[_Place]) -> None:
    """Check that the slices of a sequence cover it, given in the order of the chunks."""
    covered = 0
    for start, length, replica, chunk, position in sorted(places):
        stop = start + length
        if start < covered:
            why = f"sequence {sequence} [{start}, {stop}) overlaps the slice before"
            raise case.chunks[chunk].fault_at(position, why)
        if start > covered:
            why = f"sequence {sequence} [{start}, {stop}) leaves tokens from {covered} out"
            raise case.chunks[chunk].fault_at(position, why)
        first_replica = places[0][2]
        if replica != first_replica:
            why = f"sequence {sequence} is also in replica {first_replica}"
            raise case.chunks[chunk].fault_at(position, why)
        covered = stop
    num_tokens = case.lengths[sequence]
    if covered != num_tokens:
        why = f"sequence {sequence}: tokens [{covered}, {num_tokens}) are in no slice"
        raise VerifyError(f"step {case.step.index}: {why}")


def check_split_slices(case: SlicingCase) -> None:
    """At most one slice of a chunk is a part of its sequence."""
    lengths = case.lengths
    for chunk in case.chunks:
        part = None
        for position, slice_ in enumerate(chunk.slices):
            if slice_.length == lengths[slice_.sequence]:
                continue
            if part is not None:
                why = f"{_show(part)} and {_show(slice_)} are both parts of a sequence"
                raise chunk.fault_at(position, why)
            part = slice_


def check_kernel_sizes(case: SlicingCase) -> None:
    """Queries, keys and activations of a chunk have fewer than 2**31 elements."""
    model = case.header.model
    query_width = model.num_heads * model.head_dim
    width = max(query_width, model.hidden_size, model.intermediate_size)
    kv_width = model.kv_size
    for chunk in case.chunks:
        num_tokens = sum(slice_.length for slice_ in chunk.slices)
        context = max(slice_.stop for slice_ in chunk.slices)
        if num_tokens * width > MAX_ELEMENTS or context * kv_width > MAX_ELEMENTS:
            why = f"{num_tokens} tokens, context {context}: too large for 32-bit kernels"
            raise chunk.fault(why)


def _show(slice_: Slice) -> str:
    return f"sequence {slice_.sequence} [{slice_.start}, {slice_.stop})"


SLICING_RULES = (check_slice_ranges, check_coverage, check_split_slices, check_kernel_sizes)
