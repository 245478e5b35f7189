"""Fits find what measurements were made from, and say so without noise getting in the way."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from infinipipe.measure.fit import (
    Point,
    Slices,
    fit_layer_time,
    fit_line,
    fit_recompute,
    fitted_seconds,
    scale_layer_time,
)
from tests.measure.truth import TRUTH

CHUNKS: list[Slices] = [
    *(((0, n),) for n in TRUTH.curve.tokens),
    *(((start, length),) for start in (512, 4096, 16384) for length in (16, 256, 1024)),
    *(((0, length),) * count for length in (16, 64, 256) for count in (2, 8, 40)),
    ((2048, 256), (0, 64), (0, 64)),
]


def points(noise: float = 0.0) -> list[Point]:
    draw = random.Random(3)
    exact = fitted_seconds(TRUTH, [Point(slices, 0.0) for slices in CHUNKS])
    return [
        Point(slices, float(s) * (1 + draw.gauss(0, noise)))
        for slices, s in zip(CHUNKS, exact, strict=True)
    ]


def test_exact_measurements_give_the_truth_back() -> None:
    fit = fit_layer_time(points())
    assert fit.curve.tokens == TRUTH.curve.tokens
    assert fit.curve.seconds == pytest.approx(TRUTH.curve.seconds, rel=1e-4)
    for name in (
        "s_per_pair",
        "s_per_slice",
        "s_per_context",
        "s_per_context_token",
        "s_per_continued_token",
    ):
        assert getattr(fit, name) == pytest.approx(getattr(TRUTH, name), rel=1e-3), name


def test_noise_of_3_percent_leaves_errors_below_it() -> None:
    fit = fit_layer_time(points(noise=0.03))
    chunks = [
        Point(s, 0.0)
        for s in (((0, 700),), ((3000, 400),), ((0, 100),) * 9, ((1000, 300), (0, 50)))
    ]
    assert fitted_seconds(fit, chunks) == pytest.approx(fitted_seconds(TRUTH, chunks), rel=0.06)


def test_one_wild_measurement_is_let_go() -> None:
    measured = points()
    measured[7] = Point(measured[7].slices, 5 * measured[7].seconds)
    chunks = [point for index, point in enumerate(measured) if index != 7]
    assert fitted_seconds(fit_layer_time(measured), chunks) == pytest.approx(
        [p.seconds for p in chunks], rel=1e-3
    )


def test_noise_cannot_make_a_longer_chunk_cheaper() -> None:
    fit = fit_layer_time(points(noise=0.4))
    assert list(fit.curve.seconds) == sorted(fit.curve.seconds)
    rates = (
        fit.s_per_pair,
        fit.s_per_slice,
        fit.s_per_context,
        fit.s_per_context_token,
        fit.s_per_continued_token,
    )
    assert min(fit.curve.seconds + rates) >= 0


def test_cheap_packs_make_no_dip_at_their_size() -> None:
    """The rates say a quarter more than they take.

    The curve must not give way at 1,024 tokens alone.
    """
    measured = points()
    packs: list[Slices] = [((0, 1024 // n),) * n for n in (2, 4, 8, 16)]
    full = fitted_seconds(TRUTH, [Point(slices, 0.0) for slices in packs])
    measured += [Point(slices, 0.8 * float(s)) for slices, s in zip(packs, full, strict=True)]
    fit = fit_layer_time(measured)
    per_token = [s / n for n, s in zip(fit.curve.tokens, fit.curve.seconds, strict=True)]
    assert all(a >= b * (1 - 1e-9) for a, b in pairwise(per_token))
    chunks = [Point(((0, n),), 0.0) for n in (1024, 4096)]
    assert fitted_seconds(fit, chunks) == pytest.approx(fitted_seconds(TRUTH, chunks), rel=0.02)


def test_recompute_is_a_share_of_forward_and_a_constant() -> None:
    backward = scale_layer_time(TRUTH, 2.0)
    both = [Point(point.slices, 3.8 * point.seconds + 2e-3) for point in points()]
    added = fit_recompute(both, TRUTH, backward)
    assert fitted_seconds(added, both) == pytest.approx(
        [0.8 * p.seconds + 2e-3 for p in points()], rel=1e-3
    )


def test_recompute_never_pays() -> None:
    both = [Point(point.slices, 2.5 * point.seconds) for point in points()]
    added = fit_recompute(both, TRUTH, scale_layer_time(TRUTH, 2.0))
    assert fitted_seconds(added, both).tolist() == [0.0] * len(both)


def test_a_line_through_transfers() -> None:
    line = fit_line([1e3, 1e4, 1e5, 1e6], [1e-4 + 2e-9 * size for size in (1e3, 1e4, 1e5, 1e6)])
    assert (line.constant, line.rate) == pytest.approx((1e-4, 2e-9), rel=1e-6)
    assert fit_line([1.0, 2.0], [4.0, 2.0]).rate == 0
