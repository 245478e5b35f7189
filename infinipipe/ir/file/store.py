"""The plan file: a stream of msgpack objects that any msgpack reader can walk.

    header map | step map, one per step | index map | trailer (bin)

The index holds the offset and the crc32 of the header and of every step, the sha256 of all
bytes before it, and the plan's totals. The trailer has a fixed size, so that it is found from
the end of the file; it holds the index's offset and crc32, and a crc32 of itself. So every
byte is covered: header, index and trailer are checked on opening, a step when it is read,
and `PlanReader.check_all` checks the digest of the whole. What is read is also verified:
nobody ever holds a header or a step that breaks a rule.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Self

import msgspec

from infinipipe.errors import PlanFileError
from infinipipe.ir.file import encoding, files
from infinipipe.ir.file.encoding import Index
from infinipipe.ir.plan import Header, Step, Totals
from infinipipe.ir.verify import verify_header, verify_step
from infinipipe.units import shown


class PlanWriter:
    """Writes a plan under a temporary name and renames it when all steps are there.

    A context manager. An error removes the temporary file; an interrupt or a kill leaves it, and
    with `resume` the next writer of the same header keeps its complete steps and goes on after
    them. Either way the plan has the same bytes, and one that was there before stays until the new
    one is complete.

    Raises:
        PlanFileError: the file cannot be written, or what is to be resumed was begun with another
            header.
    """

    def __init__(self, path: Path, header: Header, *, resume: bool = False) -> None:
        self.path = path
        self.header = header
        self.totals = Totals()
        self._resume = resume
        self._temporary = path.with_name(path.name + ".partial")
        self._encoder = msgspec.msgpack.Encoder()
        self._digest = hashlib.sha256()
        self._offsets = bytearray()
        self._crc32s = bytearray()
        self._size = 0

    @property
    def num_steps(self) -> int:
        """Number of steps written or kept so far; the index of the next one."""
        return self.totals.num_steps

    def __enter__(self) -> Self:
        with self._mapped_errors():
            if self.path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            self._file = files.open_alone(self._temporary)
        try:
            with self._mapped_errors():
                self._begin()
        except BaseException:
            self._leave(keep=self._resume)
            raise
        return self

    def append(self, step: Step) -> None:
        """Write the next step."""
        assert step.index == self.num_steps, "steps come in order"
        assert step.index < self.header.num_steps, "no more steps come than the header states"
        with self._mapped_errors():
            self._write(self._encoder.encode(step))
        self.totals = self.totals.plus(step)

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is not None:
            self._leave(keep=not issubclass(kind, Exception))
            return
        try:
            with self._mapped_errors():
                self._complete()
        except BaseException:
            self._leave(keep=False)
            raise
        self._file.close()

    def _leave(self, keep: bool) -> None:
        """End without a plan; keep the steps there are for `resume`, or nothing."""
        # Removed before it is closed, which ends the lock: later it might be another writer's file.
        if not keep:
            self._temporary.unlink(missing_ok=True)
        # Closing flushes, which can fail as well; what stopped us first is what the user must hear.
        with contextlib.suppress(OSError):
            self._file.close()

    def _begin(self) -> None:
        header = self._encoder.encode(self.header)
        if len(header) > encoding.MOST_HEADER_BYTES:
            raise PlanFileError(
                f"{shown(self.path)}: the header has {len(header)} bytes, "
                f"more than {encoding.MOST_HEADER_BYTES}; choose another profile with --profile"
            )
        if self._resume:
            self._keep_objects(header)
        self._file.seek(self._size)
        self._file.truncate()
        if self._size == 0:
            self._write(header)

    def _keep_objects(self, header: bytes) -> None:
        """Count what is already in the file: the header, and the complete steps after it."""
        for number, data in enumerate(files.complete_objects(self._file)):
            if number == 0 and data != header:
                raise self._other_header(data)
            if number > 0 and not self._keep_step(data):
                return
            self._count(data)

    def _keep_step(self, data: bytes) -> bool:
        """Add an object that is already in the file to the totals, if it is the next step."""
        try:
            step = encoding.decode(self._temporary, data, Step, "step")
            verify_step(self.header, step)
        except PlanFileError:
            return False
        if step.index != self.num_steps or step.index >= self.header.num_steps:
            return False
        self.totals = self.totals.plus(step)
        return True

    def _other_header(self, data: bytes) -> PlanFileError:
        """Return the error of a file that begins with a header other than ours."""
        begun = f"{shown(self._temporary)}: was begun"
        advice = "compile without --resume"
        try:
            other = encoding.decode_header(self._temporary, data)
        except PlanFileError:
            return PlanFileError(f"{begun} by another infinipipe; {advice}")
        names = [
            name
            for name in other.__struct_fields__
            if getattr(other, name) != getattr(self.header, name)
        ]
        return PlanFileError(f"{begun} with another {', '.join(names)}; {advice}")

    def _count(self, data: bytes) -> None:
        """Add an object to the index and to the digest."""
        self._offsets += self._size.to_bytes(8)
        self._crc32s += zlib.crc32(data).to_bytes(4)
        self._digest.update(data)
        self._size += len(data)

    def _write(self, data: bytes) -> None:
        self._count(data)
        self._file.write(data)
        # Now, so that a kill loses no complete step.
        self._file.flush()

    def _complete(self) -> None:
        assert self.num_steps == self.header.num_steps, "a plan is complete with all its steps"
        index = Index(
            offsets=bytes(self._offsets),
            crc32s=bytes(self._crc32s),
            sha256=self._digest.hexdigest(),
            totals=self.totals,
        )
        packed = self._encoder.encode(index)
        self._file.write(packed)
        self._file.write(encoding.make_trailer(self._size, packed))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._temporary.replace(self.path)
        files.sync_folder(self.path.parent)

    @contextlib.contextmanager
    def _mapped_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            raise PlanFileError(
                f"{shown(self.path)}: {reason}; choose another file with --output"
            ) from None


class PlanReader:
    """An open plan file. A context manager; `open_plan` makes one.

    Raises:
        PlanFileError: the file is missing, damaged, truncated, foreign, or of another format.
        VerifyError: its header breaks a rule.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = files.open_regular(path)
        try:
            self._open()
        except BaseException:
            self._file.close()
            raise

    def _open(self) -> None:
        """Read and check all but the steps."""
        path = self.path
        self._index_offset, index = _read_index(path, self._file)
        self._offsets, self._crc32s = encoding.unpack_index(path, index, self._index_offset)
        self.sha256 = index.sha256
        self.totals = index.totals
        self.header = encoding.decode_header(path, self._checked(0, "header"))
        if not self.totals.finite:
            raise encoding.damaged(path, "its totals are not finite")
        if self.header.num_steps != self.num_steps or self.totals.num_steps != self.num_steps:
            why = f"the file holds {self.num_steps} steps, its header promises another number"
            raise encoding.damaged(path, why)
        with encoding.named_faults(path):
            verify_header(self.header)

    @property
    def num_steps(self) -> int:
        """Number of steps in the file."""
        return len(self._offsets) - 1

    def step(self, index: int) -> Step:
        """Read, check and verify one step, without the others.

        Raises:
            PlanFileError: there is no such step, or it is damaged.
            VerifyError: it breaks a rule.
        """
        if not 0 <= index < self.num_steps:
            raise PlanFileError(
                f"{shown(self.path)}: no step {index}; choose 0 to {self.num_steps - 1} with --step"
            )
        what = f"step {index}"
        data = self._checked(index + 1, what)
        step = encoding.decode(self.path, data, Step, what)
        if step.index != index:
            raise encoding.damaged(self.path, f"{what} says it is step {step.index}")
        with encoding.named_faults(self.path):
            verify_step(self.header, step)
        return step

    def __len__(self) -> int:
        return self.num_steps

    def __iter__(self) -> Iterator[Step]:
        return map(self.step, range(self.num_steps))

    def check_all(self) -> None:
        """Check the digest of everything before the index, a block at a time.

        Raises:
            PlanFileError: the bytes are not those that were written.
        """
        digest = hashlib.sha256()
        start = 0
        while start < self._index_offset:
            size = min(files.BLOCK_BYTES, self._index_offset - start)
            block = self._read(start, size)
            if not block:
                raise encoding.damaged(self.path, "the file was cut short while it was read")
            digest.update(block)
            start += len(block)
        if digest.hexdigest() != self.sha256:
            raise encoding.damaged(self.path, "its sha256 does not match its content")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _read(self, offset: int, size: int) -> bytes:
        return files.read_at(self.path, self._file, offset, size)

    def _checked(self, number: int, what: str) -> bytes:
        """Read the object of a number, the header's being 0, and compare its checksum."""
        is_last = number == self.num_steps
        start = self._offsets[number]
        stop = self._index_offset if is_last else self._offsets[number + 1]
        data = self._read(start, stop - start)
        if zlib.crc32(data) != self._crc32s[number]:
            raise encoding.damaged(self.path, f"the checksum of its {what} does not match")
        return data


def open_plan(path: Path) -> PlanReader:
    """Open a plan file; header, index and trailer are checked, and every step when it is read.

    Raises:
        PlanFileError: the file is missing, damaged, truncated, foreign, or of another format.
        VerifyError: its header breaks a rule.
    """
    return PlanReader(path)


def _read_index(path: Path, file: BinaryIO) -> tuple[int, Index]:
    """Find the index from the end of the file; return its offset and content."""
    opening = files.read_at(path, file, 0, encoding.OPENING_BYTES)
    encoding.check_opening(path, opening)
    file_bytes = os.fstat(file.fileno()).st_size
    trailer_offset = file_bytes - encoding.TRAILER_BYTES
    trailer = files.read_at(path, file, max(0, trailer_offset), encoding.TRAILER_BYTES)
    offset = encoding.parse_trailer(path, trailer, trailer_offset)
    data = files.read_at(path, file, offset, trailer_offset - offset)
    if trailer != encoding.make_trailer(offset, data):
        raise encoding.damaged(path, "the checksum of its index does not match")
    return offset, encoding.decode(path, data, Index, "index")
