"""Global batches depend on the seed alone."""

from itertools import chain

import numpy as np
import pytest

from infinipipe.dataset import Rows
from infinipipe.planner.batches import Batch, Batches, steps_per_epoch


def batches_of(num_rows: int, batch_size: int, num_steps: int, seed: int) -> Batches:
    """Return batches of sequences of 10 tokens and more, the later rows the longer ones."""
    lengths = np.arange(10, 10 + num_rows)
    return Batches(Rows(lengths, lengths - 1), batch_size, num_steps, seed)


def rows(num_rows: int, batch_size: int, num_steps: int, seed: int) -> list[list[int]]:
    batches = batches_of(num_rows, batch_size, num_steps, seed)
    return [drawn.tolist() for drawn in batches.rows_of_steps()]


def test_an_epoch_has_every_row_once_and_keeps_the_partial_batch() -> None:
    batches = rows(10, 4, steps_per_epoch(10, 4), 0)
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert sorted(chain(*batches)) == list(range(10))


def test_the_seed_changes_the_order_and_nothing_else_does() -> None:
    np.random.seed(1)
    first = rows(100, 7, 15, 3)
    np.random.seed(2)
    np.random.random(17)
    assert rows(100, 7, 15, 3) == first
    other = rows(100, 7, 15, 4)
    assert other != first
    assert sorted(chain(*other)) == sorted(chain(*first))


def test_further_epochs_are_shuffled_afresh() -> None:
    batches = rows(6, 3, 5, 0)
    assert [len(batch) for batch in batches] == [3] * 5
    assert sorted(batches[0] + batches[1]) == sorted(batches[2] + batches[3]) == list(range(6))
    assert batches[0] + batches[1] != batches[2] + batches[3]
    assert rows(6, 3, 2, 0) == batches[:2]


@pytest.mark.parametrize(
    ("num_rows", "batch_size", "expected"), [(1, 1, 1), (8, 4, 2), (9, 4, 3), (3, 512, 1)]
)
def test_steps_per_epoch(num_rows: int, batch_size: int, expected: int) -> None:
    assert steps_per_epoch(num_rows, batch_size) == expected
    assert len(rows(num_rows, batch_size, expected, 0)) == expected


@pytest.mark.parametrize("num_steps", [1, 3, 7])
def test_every_step_is_the_same_wherever_one_begins(num_steps: int) -> None:
    batches = batches_of(10, 4, num_steps, 0)
    whole = list(batches.steps())
    assert [batch.index for batch in whole] == list(range(num_steps))
    drawn = [[sequence.row for sequence in batch.sequences] for batch in whole]
    assert drawn == rows(10, 4, num_steps, 0)
    for batch in whole:
        for sequence in batch.sequences:
            assert (sequence.length, sequence.num_targets) == (10 + sequence.row, 9 + sequence.row)
    for first in range(num_steps + 1):
        assert list(batches.steps(first)) == whole[first:]


@pytest.mark.parametrize("num_steps", [1, 2, 7])
def test_the_longest_sequence_comes_with_its_first_step(num_steps: int) -> None:
    for seed in range(5):
        batches = batches_of(10, 4, num_steps, seed)
        steps = list(batches.steps())
        longest = max(sequence.length for batch in steps for sequence in batch.sequences)
        index, sequence = next(
            (batch.index, sequence)
            for batch in steps
            for sequence in batch.sequences
            if sequence.length == longest
        )
        assert batches.longest() == Batch(index, (sequence,))


@pytest.mark.parametrize(
    ("num_steps", "most", "expected"),
    [
        (3, 4, [0, 1, 2]),
        (8, 4, [1, 3, 5, 7]),
        (100, 4, [12, 37, 62, 87]),
    ],
)
def test_a_sample_is_spread_over_the_plan(num_steps: int, most: int, expected: list[int]) -> None:
    batches = batches_of(12, 2, num_steps, 3)
    sample = batches.sample(most)
    assert [batch.index for batch in sample] == expected
    everything = list(batches.steps())
    assert sample == [everything[index] for index in expected]
