"""Scanning a dataset: one pass over the whole file that checks and counts every line."""

from __future__ import annotations

import gzip
import zlib
from array import array
from pathlib import Path

import numpy as np

from infinipipe.aliases import Progress
from infinipipe.dataset.lines import MAX_LENGTH, LineParser
from infinipipe.dataset.rows import IGNORED, Dataset, Rows
from infinipipe.dataset.source import HashedFile, read_lines
from infinipipe.dataset.tokenizer import IDS, LENGTHS, tokenizer_sha256
from infinipipe.errors import InputError
from infinipipe.ir import DatasetInfo

_BATCH_CHARACTERS = 2**20
"""Texts wait for so many before they are tokenized: the library spreads a batch over all cores, so
batches are large; they are held in memory with their tokens, so not larger."""
_PROGRESS_LINES = 2**12
"""Lines between two calls of `progress`: to draw a bar takes longer than to read a short line."""


def open_dataset(
    path: Path,
    tokenizer: str,
    vocabulary_size: int,
    max_length: int | None = None,
    progress: Progress | None = None,
) -> Dataset:
    """Check every line of a dataset and return what planning needs of it.

    `tokenizer` is `BYTES` or a directory with a `tokenizer.json`; only `text` needs it. Sequences
    are cut to `max_length` tokens. `progress` is called with bytes of the file.

    Raises:
        InputError: the file cannot be read or a line of it cannot be used; names the line.
    """
    scan = _Scan(LineParser(path, tokenizer, vocabulary_size), max_length)
    try:
        size = path.stat().st_size
        sha256 = _scan_file(path, size, scan, progress)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        # BadGzipFile is an OSError, so this comes first.
        raise InputError(f"{path}:{len(scan) + 1}: damaged gzip data: {error}") from None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    rows = scan.finish()
    if progress is not None:
        progress(size, size)
    info = DatasetInfo(
        path=str(path),
        sha256=sha256,
        tokenizer=scan.tokenizer,
        tokenizer_sha256=tokenizer_sha256(scan.tokenizer),
        num_sequences=len(rows.lengths),
        num_tokens=int(rows.lengths.sum()),
        num_truncated=scan.num_truncated,
    )
    return Dataset(path, info, rows, scan.num_cut_tokens, max_length)


def _scan_file(path: Path, size: int, scan: _Scan, progress: Progress | None) -> str:
    """Scan all lines of a file; return the file's SHA-256."""
    with path.open("rb") as raw:
        file = HashedFile(raw)
        for number, line in enumerate(read_lines(file), start=1):
            scan.add(line, number)
            if progress is not None and number % _PROGRESS_LINES == 0:
                progress(file.num_bytes, size)
        return file.finish()


class _Scan:
    """Counts a dataset line by line; texts are tokenized in batches."""

    def __init__(self, parser: LineParser, max_length: int | None) -> None:
        self.num_truncated = 0
        self.num_cut_tokens = 0
        self._parser = parser
        self._max_length = MAX_LENGTH if max_length is None else max_length
        self._lengths = array("q")
        self._targets = array("q")
        # The texts that wait to be tokenized, and the lines that they stand in.
        self._texts: list[str] = []
        self._numbers: list[int] = []
        self._num_characters = 0
        self._num_texts = 0
        self._num_bare_lengths = 0

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def tokenizer(self) -> str:
        """As `DatasetInfo.tokenizer` says it: the one given only if a text needed it."""
        if self._num_bare_lengths:
            return LENGTHS
        return self._parser.tokenizer if self._num_texts else IDS

    def add(self, data: bytes, number: int) -> None:
        line = self._parser.parse(data, number)
        if line.input_ids is not None:
            self._add_tokens(len(line.input_ids), line.labels)
        elif line.text is not None:
            self._add_text(line.text, number)
        else:
            assert line.length is not None
            self._num_bare_lengths += 1
            self._add_tokens(line.length, None)
        # None of the lines so far, or all of them.
        if self._num_bare_lengths not in (0, number):
            raise self._parser.error(number, "lines with only a length cannot stand next to others")

    def finish(self) -> Rows:
        self._tokenize_waiting()
        if not self._lengths:
            raise InputError(f"{self._parser.path}: holds no sequence: the file is empty")
        return Rows(
            lengths=np.array(self._lengths, dtype=np.int64),
            targets=np.array(self._targets, dtype=np.int64),
        )

    def _add_tokens(self, length: int, labels: list[int] | None) -> None:
        kept = self._cut(length)
        num_ignored = 0 if labels is None else labels[1:kept].count(IGNORED)
        self._lengths.append(kept)
        # The first token follows none that could predict it.
        self._targets.append(kept - 1 - num_ignored)

    def _add_text(self, text: str, number: int) -> None:
        if self._num_characters >= _BATCH_CHARACTERS:
            self._tokenize_waiting()
        self._texts.append(text)
        self._numbers.append(number)
        self._num_characters += len(text)
        self._num_texts += 1
        # A place is kept in order; tokenizing fills it in.
        self._lengths.append(0)
        self._targets.append(0)

    def _tokenize_waiting(self) -> None:
        if not self._texts:
            return
        tokenized = self._parser.tokenize(self._texts, self._numbers)
        for ids, number in zip(tokenized, self._numbers, strict=True):
            kept = self._cut(len(ids))
            self._lengths[number - 1] = kept
            self._targets[number - 1] = kept - 1
        self._texts = []
        self._numbers = []
        self._num_characters = 0

    def _cut(self, length: int) -> int:
        """Count what truncation leaves out of a sequence; return the length that it keeps."""
        if length <= self._max_length:
            return length
        self.num_truncated += 1
        self.num_cut_tokens += length - self._max_length
        return self._max_length
