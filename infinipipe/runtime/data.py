"""A step's tokens, targets and loss weights, chunk by chunk, or by what a rank has of a chunk."""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from infinipipe.aliases import Ints
from infinipipe.dataset import IGNORED, Example
from infinipipe.errors import PlanFileError
from infinipipe.ir import Chunk, LossNorm, Sequence, Slice, Step
from infinipipe.runtime.attention import NO_EXCHANGE, Exchange, Kernel, KVStore, Segment, Segments

Number = TypeVar("Number", bound=np.generic)


def chunk_segments(
    chunk: Chunk, step: Step, store: KVStore, kernel: Kernel, exchange: Exchange = NO_EXCHANGE
) -> Segments:
    """Turn a chunk's slices into the segment table that attention follows.

    Where ranks share the chunk, each follows that of the whole chunk.
    """
    table: list[Segment] = []
    first = 0
    for part in chunk.slices:
        segment = Segment(
            first=first,
            length=part.length,
            sequence=part.sequence,
            start=part.start,
            total=step.sequences[part.sequence].length,
        )
        table.append(segment)
        first = segment.last
    return Segments(table=tuple(table), store=store, kernel=kernel, exchange=exchange)


def chunk_positions(chunk: Chunk) -> Tensor:
    """Return (1, tokens) int64: every token's place in its own sequence."""
    positions = [np.arange(part.start, part.stop) for part in chunk.slices]
    return torch.from_numpy(_joined(positions, np.int64))[None]


def _joined(parts: list[NDArray[Number]], dtype: type[Number]) -> NDArray[Number]:
    """Return arrays one behind the other; a shard may have none at all."""
    nothing = np.empty(0, dtype)
    return np.concatenate([nothing, *parts])


class Examples(Protocol):
    """Where rows are read, such as `infinipipe.dataset.RowReader`."""

    def read(self, row: int) -> Example:
        """Return a row's ids and unshifted labels, cut to the plan's `max_length`."""


class _Whole(NamedTuple):
    """A whole sequence."""

    tokens: Ints
    targets: Ints
    """Of each token the next one, or `IGNORED`."""


class StepData:
    """The sequences of one step, read once."""

    def __init__(self, examples: Examples, step: Step, loss_norm: LossNorm) -> None:
        self._step = step
        self._loss_norm = loss_norm
        self._examples = examples
        self._read: dict[int, _Whole] = {}

    def tokens(self, chunk: Chunk) -> Tensor:
        """Return (1, tokens) int64."""
        parts: list[Ints] = []
        for part in chunk.slices:
            sequence = self._whole(part.sequence)
            parts.append(sequence.tokens[part.start : part.stop])
        tokens = _joined(parts, np.int64)
        return torch.from_numpy(tokens)[None]

    def targets(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Return each token's target, (tokens,) int64, and its loss weight, (tokens,) float32.

        Labels are shifted on the whole sequence before it is sliced, so no target is lost at a
        slice's end and none crosses into the next sequence.
        """
        parts: list[Ints] = []
        part_weights: list[NDArray[np.float32]] = []
        for part in chunk.slices:
            sequence = self._whole(part.sequence)
            parts.append(sequence.targets[part.start : part.stop])
            part_weights.append(self._slice_weights(part))
        targets = _joined(parts, np.int64)
        weights = _joined(part_weights, np.float32)
        # A token without a target has a loss too, which does not count.
        weights[targets == IGNORED] = 0
        return torch.from_numpy(targets), torch.from_numpy(weights)

    def _slice_weights(self, part: Slice) -> NDArray[np.float32]:
        sequence = self._step.sequences[part.sequence]
        denominator = self._step.denominator
        weight = 0.0
        # Where nothing has a target, both that divide are 0.
        if denominator > 0 and sequence.num_targets > 0:
            weight = token_weight(sequence, denominator, self._loss_norm)
        return np.full(part.length, weight, dtype=np.float32)

    def _whole(self, index: int) -> _Whole:
        """Return one of the step's sequences, from the dataset at its first use."""
        if index not in self._read:
            self._read[index] = self._read_sequence(self._step.sequences[index])
        return self._read[index]

    def _read_sequence(self, sequence: Sequence) -> _Whole:
        example = self._examples.read(sequence.row)
        # A token's target is the label of the next one; the last one has none.
        targets = np.append(example.labels[1:], IGNORED)
        num_tokens = len(example.input_ids)
        num_targets = int((targets != IGNORED).sum())
        if (num_tokens, num_targets) != (sequence.length, sequence.num_targets):
            raise PlanFileError(
                f"step {self._step.index}: row {sequence.row} of the dataset has "
                f"{num_tokens} tokens and {num_targets} targets, the plan says "
                f"{sequence.length} and {sequence.num_targets}; compile it again"
            )
        return _Whole(example.input_ids, targets)


def token_weight(sequence: Sequence, denominator: int, loss_norm: LossNorm) -> float:
    """Return what one token's loss counts for in the step's loss."""
    if loss_norm == "token":
        return 1.0 / denominator
    return 1.0 / (denominator * sequence.num_targets)
