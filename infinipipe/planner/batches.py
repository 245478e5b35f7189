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

    Every epoch is a fresh permutation. It depends on nothing but the arguments: neither costs, nor
    stages, nor replicas move a row to another step.
    """
    # Named, as numpy may change which generator is its default, and with it every plan.
    bits = np.random.PCG64(seed)
    generator = np.random.Generator(bits)
    steps_left = num_steps
    while steps_left > 0:
        epoch = generator.permutation(num_rows)
        starts = range(0, num_rows, batch_size)
        for start in starts[:steps_left]:
            yield epoch[start : start + batch_size]
        steps_left -= len(starts)
