"""Global batches: which rows of the dataset make up each step."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from infinipipe.aliases import Ints
from infinipipe.dataset import Rows
from infinipipe.ir import Sequence


@dataclass(frozen=True)
class Batch:
    """One step's sequences."""

    index: int
    """Of the step."""
    sequences: tuple[Sequence, ...]


def steps_per_epoch(num_rows: int, batch_size: int) -> int:
    """Return in how many steps every row comes once; the last step may be smaller."""
    return -(-num_rows // batch_size)


class Batches:
    """The global batches of a plan.

    Every epoch is a fresh permutation of the rows. It depends on nothing but the arguments: neither
    costs, nor stages, nor replicas move a row to another step.

    Args:
        rows: lengths and targets of the dataset.
        batch_size: sequences in a step.
        num_steps: of the plan.
        seed: draws the permutations.
    """

    def __init__(self, rows: Rows, batch_size: int, num_steps: int, seed: int) -> None:
        self._rows = rows
        self._batch_size = batch_size
        self._num_steps = num_steps
        # Named, as numpy may change which generator is its default, and with it every plan.
        bits = np.random.PCG64(seed)
        self._generator = np.random.Generator(bits)
        num_rows = len(rows.lengths)
        self._first_epoch = self._generator.permutation(num_rows)

    def steps(self, first: int = 0) -> Iterator[Batch]:
        """Yield the steps from `first` on."""
        later = islice(self.rows_of_steps(), first, None)
        for index, rows in enumerate(later, start=first):
            yield Batch(index, self._sequences(rows))

    def sample(self, most: int) -> list[Batch]:
        """Return at most so many steps, spread evenly over the plan."""
        count = min(most, self._num_steps)
        # The middle of each part.
        middles = [(2 * part + 1) * self._num_steps // (2 * count) for part in range(count)]
        wanted = set(middles)
        batches = []
        for index, rows in enumerate(self.rows_of_steps()):
            if index in wanted:
                batches.append(Batch(index, self._sequences(rows)))
        return batches

    def longest(self) -> Batch:
        """Return the longest sequence of the plan alone, with the index of the first step that has
        it."""
        # All rows of later epochs are in the first one.
        num_drawn = self._num_steps * self._batch_size
        drawn = self._first_epoch[:num_drawn]
        lengths = self._rows.lengths[drawn]
        place = int(lengths.argmax())
        index = place // self._batch_size
        one_row = drawn[place : place + 1]
        return Batch(index, self._sequences(one_row))

    def rows_of_steps(self) -> Iterator[Ints]:
        """Yield the rows of each step."""
        num_rows = len(self._rows.lengths)
        batch_size = self._batch_size
        # What comes after the first epoch is the same, however often it is asked for.
        generator = copy.deepcopy(self._generator)
        epoch = self._first_epoch
        remaining = self._num_steps
        while remaining > 0:
            firsts = range(0, num_rows, batch_size)
            for first in firsts[:remaining]:
                yield epoch[first : first + batch_size]
            remaining -= len(firsts)
            epoch = generator.permutation(num_rows)

    def _sequences(self, rows: Ints) -> tuple[Sequence, ...]:
        numbers = rows.tolist()
        lengths = self._rows.lengths[rows].tolist()
        targets = self._rows.targets[rows].tolist()
        return tuple(map(Sequence, numbers, lengths, targets))
