"""Global batches: which rows of the dataset make up each step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from infinipipe.aliases import Ints


def steps_per_epoch(num_rows: int, batch_size: int) -> int:
    """Return in how many steps every row comes once; the last step may be smaller."""
    return -(-num_rows // batch_size)


def global_batches(num_rows: int, batch_size: int, num_steps: int, seed: int) -> Iterator[Ints]:
    """Yield the rows of each step.

    Every epoch is a fresh permutation. It depends on nothing but the arguments: neither costs, nor stages,
    nor replicas move a row to another step.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    remaining = num_steps
    while remaining > 0:
        order = generator.permutation(num_rows)
        for first in range(0, num_rows, batch_size)[:remaining]:
            yield order[first : first + batch_size]
        remaining -= steps_per_epoch(num_rows, batch_size)
