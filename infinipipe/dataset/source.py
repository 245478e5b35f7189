"""The file of a dataset, plain or gzip: read once with its digest, or opened for seeking."""

from __future__ import annotations

import gzip
import hashlib
import io
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_GZIP_MAGIC = b"\x1f\x8b"
"""How every gzip file begins (RFC 1952), whatever its name, and no JSON text does."""
_BUFFER_BYTES = 2**20
"""Read at a time: few system calls, and little memory."""


class HashedFile(io.RawIOBase):
    """Reads a file and digests what it reads."""

    def __init__(self, raw: IO[bytes]) -> None:
        self.num_bytes = 0
        """Read so far, of the file as it is stored."""
        self._raw = raw
        self._digest = hashlib.sha256()

    def readable(self) -> bool:
        """Say that it can be read, which `io.BufferedReader` asks."""
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """Fill a buffer with what comes next; return how many bytes that was."""
        data = self._raw.read(len(buffer))
        buffer[: len(data)] = data
        self._digest.update(data)
        self.num_bytes += len(data)
        return len(data)

    def finish(self) -> str:
        """Read what is left, as zeros may follow gzip data, and return the whole file's SHA-256."""
        while self.read(_BUFFER_BYTES):
            pass
        return self._digest.hexdigest()


def read_lines(file: HashedFile) -> Iterator[bytes]:
    """Yield the decompressed lines of a dataset, with their line ends."""
    buffered = io.BufferedReader(file, _BUFFER_BYTES)
    if buffered.peek(2).startswith(_GZIP_MAGIC):
        with gzip.GzipFile(fileobj=buffered) as unpacked:
            yield from io.BufferedReader(unpacked, _BUFFER_BYTES)
    else:
        yield from buffered


def open_seekable(path: Path) -> IO[bytes]:
    """Open the decompressed bytes of a dataset for seeking.

    They are the file itself or, as to seek in gzip is to decompress from its start again, a copy
    that vanishes when it is closed.
    """
    file = path.open("rb")
    if not file.peek(2).startswith(_GZIP_MAGIC):
        return file
    with file, gzip.GzipFile(fileobj=file) as unpacked:
        copy = tempfile.TemporaryFile()  # noqa: SIM115  (handed to the caller)
        shutil.copyfileobj(unpacked, copy, _BUFFER_BYTES)
    copy.seek(0)
    return copy
