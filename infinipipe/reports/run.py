"""How a run went against its predictions, and what to do about the difference."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from pathlib import Path
from statistics import median
from typing import NamedTuple

from infinipipe.run_record import Run
from infinipipe.units import MIB

_WARN_BEYOND = 0.15
"""Relative error of a prediction that a person is warned of: with less, the noise of a machine that
others use would warn; with more, plans made from wrong costs would pass unnoticed."""


class _Peak(NamedTuple):
    """A stage's bytes in the step in which it held the most."""

    predicted: int
    measured: int

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured


def compare_run(run: Run, folder: Path) -> list[str]:
    """Return lines for a person: predicted, measured, and what to do about the difference."""
    peaks = [_peak(run, stage) for stage in range(len(run.steps[0].peak_bytes))]
    stage_lines = [_line(f"stage {stage}", _show_peak(peak)) for stage, peak in enumerate(peaks)]
    warnings = [f"warning: {text}" for text in _warnings(run, folder, peaks)]
    return [
        f"{folder}: {len(run.steps)} steps, predicted -> measured",
        _line("time", _show_time(run)),
        *stage_lines,
        *warnings,
    ]


def _peak(run: Run, stage: int) -> _Peak:
    step = max(run.steps, key=lambda step: step.peak_bytes[stage])
    return _Peak(step.predicted_peak_bytes[stage], step.peak_bytes[stage])


def _line(name: str, text: str) -> str:
    return f"  {name:<11} {text}"


def _show_time(run: Run) -> str:
    predicted_s = median(step.predicted_seconds for step in run.settled)
    measured_s = median(step.seconds for step in run.settled)
    return f"{predicted_s:.4g} -> {measured_s:.4g} s a step{_show_error(1 / run.time_ratio)}"


def _show_peak(peak: _Peak) -> str:
    predicted = f"{peak.predicted / MIB:,.1f}"
    measured = f"{peak.measured / MIB:,.1f} MiB"
    return f"peak {predicted} -> {measured}{_show_error(peak.ratio)}"


def _show_error(ratio: float) -> str:
    """Return by how much a prediction is over or under, from predicted over measured."""
    return f" ({abs(ratio - 1):.1%} {'over' if ratio > 1 else 'under'})"


def _warnings(run: Run, folder: Path, peaks: SequenceOf[_Peak]) -> list[str]:
    device = run.record.analytic_device
    if device:
        return [
            f"the plan's profile is analytic, for {device}; measure this machine with "
            "`infinipipe profile` and compile again"
        ]
    warnings = []
    if _is_off(1 / run.time_ratio):
        warnings.append(
            f"the predicted time is off by more than {_WARN_BEYOND:.0%}; if nothing else ran on "
            f"this machine, correct the profile with `infinipipe profile --refine {folder}` and "
            "compile again"
        )
    stages = [str(stage) for stage, peak in enumerate(peaks) if _is_off(peak.ratio)]
    if stages:
        warnings.append(
            f"the predicted peak of stage {', '.join(stages)} is off by more than "
            f"{_WARN_BEYOND:.0%}; profile this machine again with `infinipipe profile`"
        )
    return warnings


def _is_off(ratio: float) -> bool:
    return abs(ratio - 1) > _WARN_BEYOND
