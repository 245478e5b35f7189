"""Datasets: JSON Lines, plain or gzip, checked line by line in one pass and then read at random.

A line is one sequence: `input_ids` (and optional `labels`, -100 for no target), else `text`, else
only `length`, which can be planned but not run. Other fields are ignored.
"""

from infinipipe.dataset.reader import RowReader
from infinipipe.dataset.rows import IGNORED, Dataset, Example, Rows
from infinipipe.dataset.same import check_same_dataset
from infinipipe.dataset.scan import open_dataset
from infinipipe.dataset.tokenizer import BYTES, IDS, LENGTHS, tokenizer_sha256

__all__ = [
    "BYTES",
    "IDS",
    "IGNORED",
    "LENGTHS",
    "Dataset",
    "Example",
    "RowReader",
    "Rows",
    "check_same_dataset",
    "open_dataset",
    "tokenizer_sha256",
]
