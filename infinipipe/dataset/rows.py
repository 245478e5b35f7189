"""Sequences of a dataset: what planning knows of all of them, and what training reads of each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from infinipipe.aliases import Ints
from infinipipe.ir import DatasetInfo

IGNORED = -100
"""The label of a token that is no target, as in torch's cross entropy."""


@dataclass(frozen=True)
class Rows:
    """What planning needs of every sequence; arrays of shape (sequences,)."""

    lengths: Ints
    """After truncation."""
    targets: Ints
    """Tokens with a label to predict, after truncation and shift."""


@dataclass(frozen=True)
class Dataset:
    """What planning knows of a dataset, every line of which has been checked."""

    path: Path
    info: DatasetInfo
    rows: Rows
    num_cut_tokens: int
    """Tokens that truncation to `max_length` left out."""
    max_length: int | None

    def __len__(self) -> int:
        return len(self.rows.lengths)


@dataclass(frozen=True)
class Example:
    """One sequence; both arrays are int64 of the same length."""

    input_ids: Ints
    labels: Ints
    """Not shifted: `labels[i]` belongs to `input_ids[i]`; -100 for no target."""
