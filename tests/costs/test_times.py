"""Seconds from curves, lines and rates."""

import numpy as np
import pytest
from numpy.typing import NDArray

from infinipipe.costs import curve_seconds, layer_seconds
from infinipipe.costs.times import line_values, mean_slope
from infinipipe.ir import Chunk, Slice
from infinipipe.profiles import Curve, LayerTime, Line

ATTENTION_ONLY = LayerTime(
    curve=Curve(tokens=(1, 2), seconds=(0.0, 0.0)),
    s_per_pair=1.0,
    s_per_slice=0.0,
    s_per_context=0.0,
    s_per_context_token=0.0,
    s_per_continued_token=0.0,
)


def attention(*slices: tuple[int, int]) -> float:
    chunk = Chunk((*(Slice(i, start, length) for i, (start, length) in enumerate(slices)),))
    values: list[NDArray[np.int64]] = [
        np.array([chunk.num_tokens]),
        np.array([chunk.num_pairs]),
        np.array([len(slices)]),
    ]
    return float(layer_seconds(ATTENTION_ONLY, *values)[0])


def test_one_long_sequence_has_twice_the_attention_of_two_halves() -> None:
    assert attention((0, 1024)) == 524_800
    halves = attention((0, 512)) + attention((0, 512))
    assert attention((0, 1024)) == pytest.approx(2 * halves, rel=1e-3)


def test_four_equal_slices_cost_1_3_5_7() -> None:
    costs = [attention((start, 1024)) for start in range(0, 4096, 1024)]
    assert [cost / costs[0] for cost in costs] == pytest.approx([1, 3, 5, 7], rel=4e-3)
    assert sum(costs) == attention((0, 4096))


def test_a_pack_costs_the_sum_of_its_parts() -> None:
    assert attention((0, 512), (0, 512)) == 2 * attention((0, 512)) < attention((0, 1024))
    alone = attention((5, 3)) + attention((0, 7)) + attention((0, 2))
    assert attention((5, 3), (0, 7), (0, 2)) == alone


def test_curve_is_flat_below_its_first_size_and_straight_beyond_its_last() -> None:
    curve = Curve(tokens=(10, 20, 40), seconds=(1.0, 2.0, 5.0))
    found = curve_seconds(curve, np.array([1, 10, 15, 30, 40, 60]))
    assert found.tolist() == [1.0, 1.0, 1.5, 3.5, 5.0, 8.0]
    falling = Curve(tokens=(10, 20), seconds=(2.0, 1.0))
    assert curve_seconds(falling, np.array([30])).tolist() == [1.0]


def test_lines_and_slopes() -> None:
    line = Line(constant=3.0, rate=0.5)
    assert line_values(line, np.array([0, 4])).tolist() == [3.0, 5.0]
    assert mean_slope(Curve(tokens=(10, 20, 40), seconds=(1.0, 2.0, 7.0))) == 0.2
