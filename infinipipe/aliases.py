"""Types that many modules name."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

Progress = Callable[[int, int], None]
"""Called with how much is done and how much there is."""
