"""What `verify` proves beside a plan's own rules: that it fits its dataset, and that its predictions are true."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from infinipipe.aliases import Progress
from infinipipe.costs.predict import check_predictions, is_priced
from infinipipe.dataset import Dataset, check_same_dataset, open_dataset
from infinipipe.errors import PlanFileError, VerifyError
from infinipipe.ir import Header, PlanReader, Report, Step
from infinipipe.reports.plan_view import profile_device

_PREDICTED = "Predicted times and peaks are those that the plan's profile gives, of {}."
_UNPREDICTED = "Not checked: predicted times and peaks of {} steps with I and W, which the plan's profile does not price."
_DATA = "Rows have the dataset's lengths and targets, which are those of {}."
_NO_DATA = "Not checked: the dataset; name it with --data."


class Proof:
    """Checks steps, one after the other, and keeps count."""

    def __init__(self, header: Header, dataset: Dataset | None) -> None:
        self._header = header
        self._dataset = dataset
        self._num_unpriced = 0

    def add(self, step: Step) -> None:
        """Check one step.

        Raises:
            VerifyError: it does not fit the dataset, or its predictions are not what the plan's profile gives.
        """
        if self._dataset is not None:
            _check_rows(self._dataset, step)
        if is_priced(self._header, step):
            check_predictions(self._header, step)
        else:
            self._num_unpriced += 1

    def lines(self, report: Report) -> list[str]:
        """Say how much was checked, and each rule."""
        counts = {
            "steps": report.num_steps,
            "sequences": report.num_sequences,
            "tokens": report.num_tokens,
            "chunks": report.num_chunks,
            "slices": report.num_slices,
            "ops": report.num_ops,
            "transfers": report.num_transfers,
        }
        return [
            "checked: " + ", ".join(f"{count:,} {name}" for name, count in counts.items()),
            *(f"  {rule}" for rule in report.rules),
            f"  {self._predicted()}",
            f"  {_NO_DATA if self._dataset is None else _DATA.format(self._dataset.path)}",
            f"{report.num_rendezvous_steps:,} of {report.num_steps:,} steps would end without receives posted ahead",
        ]

    def _predicted(self) -> str:
        if self._num_unpriced:
            return _UNPREDICTED.format(self._num_unpriced)
        return _PREDICTED.format(profile_device(self._header))


def open_planned_dataset(reader: PlanReader, path: Path, progress: Progress) -> Dataset:
    """Open the dataset that a plan was compiled from.

    Raises:
        InputError: the dataset cannot be used.
        PlanFileError: it is another dataset, or the plan says what is not true of it.
    """
    header = reader.header
    check_same_dataset(path, header.dataset)
    model = header.model
    dataset = open_dataset(
        path, model.tokenizer, model.vocabulary_size, header.max_length, progress
    )
    for name in header.dataset.__struct_fields__:
        told, found = getattr(header.dataset, name), getattr(dataset.info, name)
        if name != "path" and told != found:
            raise PlanFileError(
                f"{reader.path}: says dataset.{name} {told!r}, but {path} has {found!r}; compile it again"
            )
    return dataset


def _check_rows(dataset: Dataset, step: Step) -> None:
    rows = np.array([s.row for s in step.sequences])
    for name, column in (("length", dataset.rows.lengths), ("num_targets", dataset.rows.targets)):
        told = np.array([getattr(s, name) for s in step.sequences])
        wrong = np.flatnonzero(column[rows] != told)
        if len(wrong):
            at = int(wrong[0])
            raise VerifyError(
                f"step {step.index}: sequence {at}, row {rows[at]}, has {name} {told[at]}; "
                f"the dataset's has {column[rows[at]]}"
            )
