"""Predicted against measured at the end of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from infinipipe.reports.run import compare_run
from infinipipe.run_record import read_run
from tests.runs import write_run


def test_the_comparison_leaves_out_the_first_step(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    run = read_run(folder)
    assert run.time_ratio == pytest.approx(1.1)
    assert compare_run(run, folder) == [
        f"{folder}: 4 steps, predicted -> measured",
        "  time        2 -> 2.2 s a step (9.1% under)",
        "  stage 0     peak 10.0 -> 10.0 MiB (0.0% under)",
        "  stage 1     peak 15.0 -> 15.0 MiB (0.0% under)",
    ]


@pytest.mark.parametrize(
    ("steps", "peak", "analytic", "warnings"),
    [
        ([(1.0, 1.0), (1.1, 1.0)], 1.0, "", []),
        ([(1.0, 1.0), (1.3, 1.0)], 1.0, "", ["--refine"]),
        ([(1.0, 1.0), (0.8, 1.0)], 1.0, "", ["--refine"]),
        ([(1.0, 1.0), (1.1, 1.0)], 1.3, "", ["peak of stage 0"]),
        ([(1.0, 1.0), (9.9, 1.0)], 1.3, "h100-80g", ["analytic, for h100-80g"]),
    ],
)
def test_warnings_beyond_15_percent(
    tmp_path: Path,
    steps: list[tuple[float, float]],
    peak: float,
    analytic: str,
    warnings: list[str],
) -> None:
    folder = write_run(tmp_path / "run", steps, peak, analytic)
    lines = compare_run(read_run(folder), folder)
    shown = [line for line in lines if line.startswith("warning: ")]
    assert len(shown) == len(warnings)
    for line, word in zip(shown, warnings, strict=True):
        assert word in line
        assert "infinipipe profile" in line
