"""Records a run's steps: a line of metrics each, and a progress bar, on the rank that writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from infinipipe.errors import InputError
from infinipipe.run_record import METRICS, StepRecord


class _Recorder:
    """A file of metrics and a progress bar."""

    def __init__(self, file: BinaryIO, bar: Progress, num_steps: int) -> None:
        self._file = file
        self._bar = bar
        self._task: TaskID = bar.add_task("", total=num_steps, loss="")

    def record(self, step: StepRecord) -> None:
        """Write a step's line and show that it is done."""
        self._file.write(msgspec.json.encode(step) + b"\n")
        # Whoever follows the file sees every step at once.
        self._file.flush()
        if not step.num_targets:
            self._bar.console.print(
                f"warning: step {step.step} has no target at all; its update is skipped"
            )
        self._bar.update(self._task, advance=1, loss=f"loss {step.loss:.4f}")


@contextmanager
def record_steps(
    folder: Path, num_steps: int, *, is_writer: bool
) -> Iterator[Callable[[StepRecord], None]]:
    """Yield what records a step; on ranks that do not write, it does nothing.

    Raises:
        InputError: the folder cannot be made or written to.
    """
    if not is_writer:
        yield lambda step: None
        return
    with _open_metrics(folder) as file, _make_bar() as bar:
        yield _Recorder(file, bar, num_steps).record


def _open_metrics(folder: Path) -> BinaryIO:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / METRICS).open("wb")
    except OSError as error:
        raise InputError(f"{folder}: {error.strerror}; choose another with --output") from None


def _make_bar() -> Progress:
    return Progress(
        TextColumn("train"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[loss]}"),
        console=Console(stderr=True),
    )
