"""What `verify` proves beside a plan's own rules: that it fits its dataset and its profile."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from infinipipe.aliases import Ints, Progress
from infinipipe.costs import check_predictions, is_priced
from infinipipe.dataset import Dataset, check_same_dataset, open_dataset
from infinipipe.errors import PlanFileError, VerifyError
from infinipipe.ir import Header, PlanReader, Report, Step
from infinipipe.reports.plan_view import profile_device


class Verification:
    """Checks steps, one after the other, and keeps count."""

    def __init__(self, header: Header, dataset: Dataset | None) -> None:
        self._header = header
        self._dataset = dataset
        self._num_unpriced = 0

    def add(self, step: Step) -> None:
        """Check one step.

        Raises:
            VerifyError: it does not fit the dataset, or its predictions are not what the plan's
                profile gives.
        """
        if self._dataset is not None:
            _check_rows(self._dataset, step)
        if is_priced(self._header, step):
            check_predictions(self._header, step)
        else:
            self._num_unpriced += 1

    def lines(self, report: Report) -> list[str]:
        """Return lines for a person: how much was checked, and each rule."""
        return [
            f"checked: {_show_counts(report)}",
            *(f"  {rule}" for rule in report.rules),
            f"  {self._predictions_line()}",
            f"  {self._dataset_line()}",
            f"{report.num_rendezvous_steps:,} of {report.num_steps:,} steps would end without "
            "receives posted ahead",
        ]

    def _predictions_line(self) -> str:
        if self._num_unpriced:
            return (
                f"Not checked: predicted times and peaks of {self._num_unpriced} steps with I and "
                "W, which the plan's profile does not price."
            )
        device = profile_device(self._header)
        return f"Predicted times and peaks are those that the plan's profile gives, of {device}."

    def _dataset_line(self) -> str:
        if self._dataset is None:
            return "Not checked: the dataset; name it with --data."
        path = self._dataset.path
        return f"Rows have the dataset's lengths and targets, which are those of {path}."


def _show_counts(report: Report) -> str:
    counts = {
        "steps": report.num_steps,
        "sequences": report.num_sequences,
        "tokens": report.num_tokens,
        "chunks": report.num_chunks,
        "slices": report.num_slices,
        "ops": report.num_ops,
        "transfers": report.num_transfers,
    }
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())


def open_planned_dataset(reader: PlanReader, path: Path, progress: Progress) -> Dataset:
    """Open the dataset that a plan was compiled from.

    Raises:
        InputError: the dataset cannot be used.
        PlanFileError: it is another dataset, or the plan says what is not true of it.
    """
    header = reader.header
    model = header.model
    check_same_dataset(path, header.dataset)
    dataset = open_dataset(
        path, model.tokenizer, model.vocabulary_size, header.max_length, progress
    )
    for name in header.dataset.__struct_fields__:
        stated = getattr(header.dataset, name)
        actual = getattr(dataset.info, name)
        # The same file may lie elsewhere now.
        if name != "path" and stated != actual:
            raise PlanFileError(
                f"{reader.path}: says dataset.{name} {stated!r}, but {path} has {actual!r}; "
                "compile it again"
            )
    return dataset


def _check_rows(dataset: Dataset, step: Step) -> None:
    sequences = step.sequences
    rows = np.array([sequence.row for sequence in sequences])
    lengths = np.array([sequence.length for sequence in sequences])
    targets = np.array([sequence.num_targets for sequence in sequences])
    _check_column(step, rows, "length", lengths, dataset.rows.lengths[rows])
    _check_column(step, rows, "num_targets", targets, dataset.rows.targets[rows])


def _check_column(step: Step, rows: Ints, name: str, stated: Ints, actual: Ints) -> None:
    wrong = np.flatnonzero(stated != actual)
    if len(wrong):
        first = int(wrong[0])
        raise VerifyError(
            f"step {step.index}: sequence {first}, row {rows[first]}, has {name} {stated[first]}; "
            f"the dataset's has {actual[first]}"
        )
