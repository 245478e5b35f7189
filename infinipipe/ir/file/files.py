"""Opening, reading and keeping the files of plans."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgpack

from infinipipe.errors import PlanFileError
from infinipipe.ir.file import encoding
from infinipipe.units import shown

BLOCK_BYTES = 1 << 16
"""Read at a time: large enough that calls cost little, small enough that memory does not grow."""

# What `open` gives to a new file, less the user's umask.
_PERMISSIONS = 0o666


def open_alone(path: Path) -> BinaryIO:
    """Open a temporary file to read and write, if no other process does.

    Raises:
        BlockingIOError: another one does.
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, _PERMISSIONS)
    file = os.fdopen(descriptor, "r+b")
    try:
        _lock(file)
        # The other process may have ended, and renamed this file, between our two calls.
        opened = os.fstat(file.fileno())
        if not os.path.samestat(opened, path.stat()):
            raise BlockingIOError
    except (BlockingIOError, FileNotFoundError):
        file.close()
        raise BlockingIOError(errno.EAGAIN, "another compile is writing it") from None
    return file


def _lock(file: BinaryIO) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        # Some network file systems have no locks; there the user must not compile twice at once.
        return


def complete_objects(file: BinaryIO) -> Iterator[bytes]:
    """Yield the bytes of the whole msgpack objects that a file begins with."""
    size = os.fstat(file.fileno()).st_size
    buffer_bytes = max(size, BLOCK_BYTES)
    unpacker = msgpack.Unpacker(file, read_size=BLOCK_BYTES, max_buffer_size=buffer_bytes)
    start = 0
    while True:
        try:
            unpacker.skip()
        except msgpack.UnpackException:
            return
        stop = unpacker.tell()
        yield os.pread(file.fileno(), stop - start, start)
        start = stop


def open_regular(path: Path) -> BinaryIO:
    """Open a plan file to read.

    Raises:
        PlanFileError: it cannot be opened, or is no regular file.
    """
    try:
        # Opening a pipe would wait for a writer.
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise PlanFileError(
                f"{shown(path)}: not a regular file; make a plan with `infinipipe compile`"
            )
        return path.open("rb")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise PlanFileError(
            f"{shown(path)}: {reason}; make a plan with `infinipipe compile`"
        ) from None


def read_at(path: Path, file: BinaryIO, offset: int, size: int) -> bytes:
    """Read bytes from an offset; fewer where the file ends.

    Raises:
        PlanFileError: they cannot be read.
    """
    try:
        # Not seek and read: threads may share a reader.
        return os.pread(file.fileno(), size, offset)
    except (OSError, MemoryError) as error:
        raise encoding.damaged(path, f"cannot read {size} bytes: {error}") from None


def sync_folder(folder: Path) -> None:
    """Make a rename in a folder last; a file system that cannot is not an error."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
