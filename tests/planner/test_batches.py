"""Global batches depend on the seed alone."""

from itertools import chain

import numpy as np
import pytest

from infinipipe.planner.batches import global_batches, steps_per_epoch


def rows(*args: int) -> list[list[int]]:
    return [batch.tolist() for batch in global_batches(*args)]


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
