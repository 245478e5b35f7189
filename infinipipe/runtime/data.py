"""A step's tokens, targets and loss weights, chunk by chunk."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from infinipipe.dataset import IGNORED, Example
from infinipipe.errors import PlanFileError
from infinipipe.ir import Chunk, LossNorm, Sequence, Slice, Step
from infinipipe.runtime.attention.chunk_attention import KVStore, Segment, Segments


def chunk_segments(chunk: Chunk, step: Step, store: KVStore) -> Segments:
    """Turn a chunk's slices into the segment table that attention follows."""
    table, first = [], 0
    for piece in chunk.slices:
        total = step.sequences[piece.sequence].length
        table.append(
            Segment(
                first=first,
                length=piece.length,
                sequence=piece.sequence,
                start=piece.start,
                total=total,
            )
        )
        first += piece.length
    return Segments(table=tuple(table), store=store)


def chunk_positions(chunk: Chunk) -> Tensor:
    """Return (1, tokens) int64: every token's place in its own sequence."""
    return torch.cat([torch.arange(piece.start, piece.stop) for piece in chunk.slices])[None]


class Examples(Protocol):
    """Where rows are read, such as `infinipipe.dataset.RowReader`."""

    def read(self, row: int) -> Example:
        """Return a row's ids and unshifted labels, cut to the plan's `max_length`."""


class StepData:
    """The sequences of one step, read once."""

    def __init__(self, examples: Examples, step: Step, loss_norm: LossNorm) -> None:
        self._step = step
        self._loss_norm = loss_norm
        self._examples = examples
        self._read: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}

    def tokens(self, chunk: Chunk) -> Tensor:
        """Return (1, tokens) int64."""
        return torch.from_numpy(
            np.concatenate([self._sequence(s)[0][s.start : s.stop] for s in chunk.slices])
        )[None]

    def targets(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Return each token's target, (tokens,) int64, and its weight in the loss, (tokens,) float32.

        Labels are shifted on the whole sequence before it is sliced, so no target is lost at a slice's end
        and none crosses into the next sequence.
        """
        targets = np.concatenate([self._sequence(s)[1][s.start : s.stop] for s in chunk.slices])
        weights = np.concatenate(
            [np.full(s.length, self._weight(s), dtype=np.float32) for s in chunk.slices]
        )
        weights[targets == IGNORED] = 0
        return torch.from_numpy(targets), torch.from_numpy(weights)

    def _weight(self, piece: Slice) -> float:
        sequence = self._step.sequences[piece.sequence]
        if self._step.denominator == 0 or sequence.num_targets == 0:
            return 0.0
        return token_weight(sequence, self._step.denominator, self._loss_norm)

    def _sequence(self, piece: Slice) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if piece.sequence not in self._read:
            sequence = self._step.sequences[piece.sequence]
            example = self._examples.read(sequence.row)
            targets = np.append(example.labels[1:], IGNORED)
            found = len(example.input_ids), int((targets != IGNORED).sum())
            if found != (sequence.length, sequence.num_targets):
                raise PlanFileError(
                    f"step {self._step.index}: row {sequence.row} of the dataset has {found[0]} tokens and {found[1]} "
                    f"targets, the plan says {sequence.length} and {sequence.num_targets}; compile it again"
                )
            self._read[piece.sequence] = example.input_ids, targets
        return self._read[piece.sequence]


def token_weight(sequence: Sequence, denominator: int, loss_norm: LossNorm) -> float:
    """Return what one token's loss counts for in the step's loss."""
    return 1.0 / denominator if loss_norm == "token" else 1.0 / (denominator * sequence.num_targets)
