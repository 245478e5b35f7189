"""Reading single sequences of a dataset, in any order, as training does."""

from __future__ import annotations

import weakref
from array import array
from pathlib import Path

import numpy as np

from infinipipe.dataset.lines import LineParser
from infinipipe.dataset.rows import Example
from infinipipe.dataset.source import open_seekable
from infinipipe.errors import InputError


class RowReader:
    """Reads any sequence of a dataset that `open_dataset` has checked before."""

    def __init__(
        self, path: Path, tokenizer: str, vocabulary_size: int, max_length: int | None = None
    ) -> None:
        self.path = path
        self._max_length = max_length
        self._parser = LineParser(path, tokenizer, vocabulary_size)
        self._file = open_seekable(path)
        weakref.finalize(self, self._file.close)
        # Where each line begins, and where the last one ends.
        self._offsets = array("q", [0])
        for line in self._file:
            self._offsets.append(self._offsets[-1] + len(line))

    def read(self, row: int) -> Example:
        """Return one sequence, cut to `max_length`; rows count from 0.

        Raises:
            InputError: there is no such row, or its line is not a sequence with tokens.
        """
        number = row + 1
        line = self._parser.parse(self._line(row), number)
        if line.input_ids is None and line.text is None:
            raise self._parser.error(number, "holds only a length: it can be planned but not run")
        ids = self._parser.token_ids(line, number)
        labels = ids if line.labels is None else np.array(line.labels, dtype=np.int64)
        return Example(input_ids=ids[: self._max_length], labels=labels[: self._max_length])

    def _line(self, row: int) -> bytes:
        num_lines = len(self._offsets) - 1
        if row >= num_lines:
            raise InputError(f"{self.path}: has {num_lines} lines, none for row {row} of the plan")
        self._file.seek(self._offsets[row])
        return self._file.readline()
