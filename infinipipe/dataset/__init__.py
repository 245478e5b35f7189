"""Datasets: JSON Lines, plain or gzip, checked line by line in one pass and then read at random.

A line is one sequence: `input_ids` (and optional `labels`, -100 for no target), else `text`, else only
`length`, which can be planned but not run. Other fields are ignored.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import shutil
import tempfile
import weakref
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

import msgspec
import numpy as np

from infinipipe.aliases import Ints, Progress
from infinipipe.errors import InputError, PlanFileError
from infinipipe.ir import DatasetInfo

__all__ = [
    "BYTES",
    "IDS",
    "IGNORED",
    "LENGTHS",
    "Dataset",
    "Example",
    "Progress",
    "RowReader",
    "Rows",
    "check_same_dataset",
    "open_dataset",
    "tokenizer_sha256",
]


IDS = "ids"
LENGTHS = "lengths"
BYTES = "bytes"
"""Names the tokenizer whose tokens are the bytes of UTF-8, without any special ones."""
IGNORED = -100
"""The label of a token that is no target."""

_TOKENIZER_FILE = "tokenizer.json"
_MAX_LENGTH = 2**31 - 1
_GZIP_MAGIC = b"\x1f\x8b"
_BATCH_CHARACTERS = 2**20
_PROGRESS_LINES = 2**12


@dataclass(frozen=True)
class Rows:
    """What planning needs of every sequence; arrays of shape (sequences,)."""

    lengths: Ints
    """After truncation."""
    targets: Ints
    """Tokens with a label to predict, after truncation and shift."""


@dataclass(frozen=True)
class Example:
    """One sequence; both arrays are int64 of the same length."""

    input_ids: Ints
    labels: Ints
    """Not shifted: `labels[i]` belongs to `input_ids[i]`; -100 for no target."""


@dataclass(frozen=True)
class Dataset:
    """What planning knows of a dataset, every line of which has been checked."""

    path: Path
    info: DatasetInfo
    rows: Rows
    num_cut_tokens: int
    max_length: int | None

    def __len__(self) -> int:
        return len(self.rows.lengths)


class RowReader:
    """Reads any sequence of a dataset that `open_dataset` has checked before."""

    def __init__(
        self, path: Path, tokenizer: str, vocabulary_size: int, max_length: int | None = None
    ) -> None:
        self.path = path
        self._max_length = max_length
        self._lines = _Lines(path, tokenizer, vocabulary_size)
        self._plain = _seekable(path)
        weakref.finalize(self, self._plain.close)
        self._offsets = array("q", [0])
        for line in self._plain:
            self._offsets.append(self._offsets[-1] + len(line))

    def read(self, row: int) -> Example:
        """Return one sequence, cut to `max_length`.

        Raises:
            InputError: the line is not a sequence with tokens.
        """
        line = self._lines.parse(self._line(row), row + 1)
        if line.input_ids is None and line.text is None:
            raise InputError(
                f"{self.path}:{row + 1}: holds only a length: it can be planned but not run"
            )
        ids = self._lines.ids(line, row + 1)
        labels = ids if line.labels is None else np.array(line.labels, dtype=np.int64)
        return Example(input_ids=ids[: self._max_length], labels=labels[: self._max_length])

    def _line(self, row: int) -> bytes:
        if row >= len(self._offsets) - 1:
            raise InputError(
                f"{self.path}: has {len(self._offsets) - 1} lines, none for row {row} of the plan"
            )
        self._plain.seek(self._offsets[row])
        return self._plain.readline()


def open_dataset(
    path: Path,
    tokenizer: str,
    vocabulary_size: int,
    max_length: int | None = None,
    progress: Progress | None = None,
) -> Dataset:
    """Check every line of a dataset and return it.

    `tokenizer` is `BYTES` or a directory with a `tokenizer.json`; only `text` needs it. `progress` is told bytes.

    Raises:
        InputError: the file cannot be read or a line of it cannot be used; names the line.
    """
    lines = _Lines(path, tokenizer, vocabulary_size)
    scan = _Scan(lines, max_length)
    try:
        size = path.stat().st_size
        with path.open("rb") as raw:
            source = _Hashing(raw)
            for number, line in enumerate(_plain_lines(source), start=1):
                scan.add(line, number)
                if progress is not None and number % _PROGRESS_LINES == 0:
                    progress(source.num_bytes, size)
            digest = source.finish()
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise InputError(f"{path}:{len(scan) + 1}: damaged gzip data: {error}") from None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    rows = scan.finish()
    if progress is not None:
        progress(size, size)
    info = DatasetInfo(
        path=str(path),
        sha256=digest,
        tokenizer=scan.kind,
        tokenizer_sha256=tokenizer_sha256(scan.kind),
        num_sequences=len(rows.lengths),
        num_tokens=int(rows.lengths.sum()),
        num_truncated=scan.num_truncated,
    )
    return Dataset(path, info, rows, scan.num_cut_tokens, max_length)


def tokenizer_sha256(tokenizer: str) -> str:
    """Return the digest of a tokenizer's file, by which a run recognises it; empty where there is none.

    Raises:
        InputError: the directory holds no such file.
    """
    if tokenizer in (IDS, BYTES, LENGTHS):
        return ""
    path = Path(tokenizer) / _TOKENIZER_FILE
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise InputError(
            f"{path}: {error.strerror or error}; text needs the tokenizer of the profile's model"
        ) from None


def check_same_dataset(path: Path, info: DatasetInfo) -> None:
    """Check by its digest that a file is the dataset a plan was compiled from.

    Raises:
        InputError: the file cannot be read.
        PlanFileError: it is another dataset.
    """
    try:
        if path.exists() and not path.is_file():
            raise InputError(f"{path}: is not a file; name the plan's dataset with --data")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{str(path)!r}: {reason}; name the plan's dataset with --data") from None
    if digest != info.sha256:
        raise PlanFileError(
            f"{path}: is not the dataset that the plan was compiled from (sha256 {digest[:12]}, the plan says "
            f"{info.sha256[:12]}); compile it again or choose another with --data"
        )


class _Line(msgspec.Struct):
    """The fields of a line that mean something here."""

    input_ids: list[int] | None = None
    labels: list[int] | None = None
    text: str | None = None
    length: int | None = None


class _Encoder(Protocol):
    def encode(self, texts: list[str]) -> list[Ints]:
        """Return the token ids of each text."""


class _Bytes:
    def encode(self, texts: list[str]) -> list[Ints]:
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64) for text in texts]


class _TokenizerFile:
    """A Hugging Face `tokenizer.json`."""

    def __init__(self, directory: Path) -> None:
        from tokenizers import Tokenizer  # a heavy import that only text needs

        path = directory / _TOKENIZER_FILE
        if not path.is_file():
            raise InputError(
                f"{directory}: has no {_TOKENIZER_FILE}, which a dataset with text needs"
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more precise
            raise InputError(f"{path}: not a tokenizer: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, texts: list[str]) -> list[Ints]:
        encodings = self._tokenizer.encode_batch_fast(texts)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]


class _Lines:
    """Turns lines into checked fields and token ids."""

    def __init__(self, path: Path, tokenizer: str, vocabulary_size: int) -> None:
        self.path = path
        self.tokenizer = tokenizer
        self.vocabulary_size = vocabulary_size
        self._decoder = msgspec.json.Decoder(_Line)
        self._encoder: _Encoder | None = None

    def error(self, number: int, what: str) -> InputError:
        return InputError(f"{self.path}:{number}: {what}")

    def parse(self, data: bytes, number: int) -> _Line:
        """Decode one line and check what can be checked without tokens."""
        try:
            line = self._decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise self.error(number, _reason(data, number, error)) from None
        if line.input_ids is not None:
            self._check_ids(line.input_ids, line.labels, number)
        elif line.labels is not None:
            raise self.error(number, "labels without input_ids")
        elif line.text is not None:
            if not line.text:
                raise self.error(number, "text is empty")
        elif line.length is None:
            raise self.error(number, "has none of input_ids, text and length")
        elif not 1 <= line.length <= _MAX_LENGTH:
            raise self.error(number, f"length {line.length} is not between 1 and {_MAX_LENGTH}")
        return line

    def ids(self, line: _Line, number: int) -> Ints:
        """Return the token ids of one line with `input_ids` or `text`."""
        if line.input_ids is not None:
            return np.array(line.input_ids, dtype=np.int64)
        assert line.text is not None
        return self.encode([line.text], [number])[0]

    def encode(self, texts: list[str], numbers: list[int]) -> list[Ints]:
        """Return the token ids of texts, checked against the vocabulary."""
        if self._encoder is None:
            self._encoder = (
                _Bytes() if self.tokenizer == BYTES else _TokenizerFile(Path(self.tokenizer))
            )
        encoded = self._encoder.encode(texts)
        for ids, number in zip(encoded, numbers, strict=True):
            if not len(ids):
                raise self.error(number, "text has no token")
            if int(ids.max()) >= self.vocabulary_size:
                what = f"text has token {ids.max()}, but the model's vocabulary has only {self.vocabulary_size}"
                raise self.error(
                    number,
                    f"{what}; profile the model that the tokenizer {self.tokenizer} belongs to",
                )
        return encoded

    def _check_ids(self, ids: list[int], labels: list[int] | None, number: int) -> None:
        if not ids:
            raise self.error(number, "input_ids is empty")
        if min(ids) < 0 or max(ids) >= self.vocabulary_size:
            self._name_outside("input_ids", ids, number)
        if labels is None:
            return
        if len(labels) != len(ids):
            raise self.error(number, f"{len(labels)} labels for {len(ids)} input_ids")
        if min(labels) < 0 or max(labels) >= self.vocabulary_size:
            self._name_outside("labels", labels, number, IGNORED)

    def _name_outside(
        self, field: str, values: list[int], number: int, allowed: int | None = None
    ) -> None:
        for position, value in enumerate(values):
            if not 0 <= value < self.vocabulary_size and value != allowed:
                limit = f"not between 0 and {self.vocabulary_size - 1} (the model's vocabulary)"
                limit += "" if allowed is None else f" nor {allowed}"
                raise self.error(number, f"{field}[{position}] is {value}, {limit}")


class _Scan:
    """Counts a dataset line by line; texts are tokenised in batches."""

    def __init__(self, lines: _Lines, max_length: int | None) -> None:
        self.num_truncated = 0
        self.num_cut_tokens = 0
        self._lines = lines
        self._max_length = _MAX_LENGTH if max_length is None else max_length
        self._lengths, self._targets = array("q"), array("q")
        self._texts: list[str] = []
        self._numbers: list[int] = []
        self._num_characters = 0
        self._num_bare = 0
        self._num_texts = 0

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def kind(self) -> str:
        """As `DatasetInfo.tokenizer` says it."""
        if self._num_bare:
            return LENGTHS
        return self._lines.tokenizer if self._num_texts else IDS

    def add(self, data: bytes, number: int) -> None:
        line = self._lines.parse(data, number)
        if line.input_ids is not None:
            self._count(len(line.input_ids), line.labels)
        elif line.text is not None:
            self._add_text(line.text, number)
        else:
            assert line.length is not None
            self._num_bare += 1
            self._count(line.length, None)
        if self._num_bare and self._num_bare != number:
            raise self._lines.error(number, "lines with only a length cannot stand next to others")

    def finish(self) -> Rows:
        self._flush()
        if not self._lengths:
            raise InputError(f"{self._lines.path}: holds no sequence: the file is empty")
        return Rows(
            *(np.array(column, dtype=np.int64) for column in (self._lengths, self._targets))
        )

    def _add_text(self, text: str, number: int) -> None:
        if self._num_characters >= _BATCH_CHARACTERS:
            self._flush()
        self._texts.append(text)
        self._numbers.append(number)
        self._num_characters += len(text)
        self._num_texts += 1
        # A place is kept in order; the batch fills it in.
        self._lengths.append(0)
        self._targets.append(0)

    def _flush(self) -> None:
        if not self._texts:
            return
        for ids, number in zip(
            self._lines.encode(self._texts, self._numbers), self._numbers, strict=True
        ):
            length = self._cut(len(ids))
            self._lengths[number - 1], self._targets[number - 1] = length, length - 1
        self._texts, self._numbers, self._num_characters = [], [], 0

    def _count(self, length: int, labels: list[int] | None) -> None:
        kept = self._cut(length)
        self._lengths.append(kept)
        self._targets.append(
            kept - 1 if labels is None else kept - 1 - labels[1:kept].count(IGNORED)
        )

    def _cut(self, length: int) -> int:
        self.num_truncated += length > self._max_length
        self.num_cut_tokens += max(0, length - self._max_length)
        return min(length, self._max_length)


class _Hashing(io.RawIOBase):
    """Reads a file and digests what it read."""

    def __init__(self, raw: IO[bytes]) -> None:
        self.num_bytes = 0
        self._raw = raw
        self._digest = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        data = self._raw.read(len(buffer))
        buffer[: len(data)] = data
        self._digest.update(data)
        self.num_bytes += len(data)
        return len(data)

    def finish(self) -> str:
        while self.read(2**20):
            pass
        return self._digest.hexdigest()


def _plain_lines(source: _Hashing) -> Iterator[bytes]:
    buffered = io.BufferedReader(source, 2**20)
    if buffered.peek(2)[:2] == _GZIP_MAGIC:
        with gzip.GzipFile(fileobj=buffered) as plain:
            yield from io.BufferedReader(plain, 2**20)
    else:
        yield from buffered


def _seekable(path: Path) -> IO[bytes]:
    """Open the decompressed bytes of a dataset for seeking."""
    file = path.open("rb")
    if file.peek(2)[:2] != _GZIP_MAGIC:
        return file
    with file, gzip.GzipFile(fileobj=file) as packed:
        plain = tempfile.TemporaryFile()  # noqa: SIM115  (handed to the caller)
        shutil.copyfileobj(packed, plain, 2**20)
    plain.seek(0)
    return plain


def _reason(data: bytes, number: int, error: Exception) -> str:
    """Say what is wrong with a line that does not decode."""
    if number == 1 and data.startswith(b"\xef\xbb\xbf"):
        return "starts with a byte order mark; save the file as UTF-8 without one"
    if not data.strip():
        return "is empty; every line must be a JSON object"
    try:
        data.decode()
    except UnicodeDecodeError as bad:
        return f"is not UTF-8 (byte {bad.start} of the line)"
    return f"is not a usable JSON object: {error}"
