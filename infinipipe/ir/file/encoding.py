"""How a plan file is laid out: its opening, its index, its trailer, and how they are checked."""

from __future__ import annotations

import contextlib
import math
import re
import struct
import zlib
from array import array
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import TypeVar

import msgspec

from infinipipe.errors import PlanFileError, VerifyError
from infinipipe.ir.plan import FORMAT_VERSION, Header, Step
from infinipipe.units import shown

T = TypeVar("T")

AGAIN = "compile it again with `infinipipe compile`"

_MAGIC = b"infiplan"
# bin8 of 24 bytes: magic, offset and crc32 of the index, crc32 of the 20 bytes before.
_TRAILER = struct.Struct(">2s8sQII")
_BIN8 = b"\xc4\x18"
TRAILER_BYTES = _TRAILER.size

# Every format begins with a map whose first key is `format_version`, a small integer.
_OPENING = re.compile(rb"(?:[\x80-\x8f]|\xde..)\xaeformat_version([\x00-\x7f])", re.DOTALL)
OPENING_BYTES = 64

MOST_HEADER_BYTES = 1 << 20
"""Small objects take a hundred times the memory of their bytes; a real header has some 20 kB."""


class Totals(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sums over all steps."""

    num_steps: int = 0
    num_sequences: int = 0
    num_tokens: int = 0
    num_targets: int = 0
    num_chunks: int = 0
    num_ops: int = 0
    makespan_s: float = 0.0
    bound_s: float = 0.0
    step_s: float = 0.0

    @property
    def finite(self) -> bool:
        """Whether the times are numbers."""
        return all(map(math.isfinite, (self.makespan_s, self.bound_s, self.step_s)))

    def plus(self, step: Step) -> Totals:
        """Return the sums with one more step."""
        return Totals(
            num_steps=self.num_steps + 1,
            num_sequences=self.num_sequences + len(step.sequences),
            num_tokens=self.num_tokens + step.num_tokens,
            num_targets=self.num_targets + step.num_targets,
            num_chunks=self.num_chunks + sum(len(r.chunks) for r in step.replicas),
            num_ops=self.num_ops
            + sum(len(program) for r in step.replicas for program in r.programs),
            makespan_s=self.makespan_s + step.makespan_s,
            bound_s=self.bound_s + step.bound_s,
            step_s=self.step_s + step.step_s,
        )


class Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where every object lies. Numbers are packed as big-endian bytes: 12 bytes an object, however many there are."""

    offsets: bytes
    """8 bytes for the header and for every step."""
    crc32s: bytes
    """4 bytes for the header and for every step."""
    sha256: str
    """Of all bytes before the index; it names the plan."""
    totals: Totals


def check_opening(path: Path, data: bytes) -> None:
    """Refuse foreign files and other formats by a file's first bytes, before anything is decoded."""
    match = _OPENING.match(data)
    if match is None:
        raise PlanFileError(
            f"{shown(path)}: not a plan file; make a plan with `infinipipe compile`"
        )
    version = match.group(1)[0]
    if version != FORMAT_VERSION:
        newer = "use a newer infinipipe, or " if version > FORMAT_VERSION else ""
        raise PlanFileError(
            f"{shown(path)}: plan format {version}, this infinipipe reads format {FORMAT_VERSION}; {newer}{AGAIN}"
        )


def make_trailer(offset: int, index: bytes) -> bytes:
    """Return the last object of a file whose index lies at an offset."""
    start = _TRAILER.pack(_BIN8, _MAGIC, offset, zlib.crc32(index), 0)[:-4]
    return start + zlib.crc32(start[2:]).to_bytes(4)


def parse_trailer(path: Path, trailer: bytes, limit: int) -> int:
    """Return the offset of the index, which ends at `limit`, where the trailer begins."""
    if len(trailer) != _TRAILER.size or trailer[:10] != _BIN8 + _MAGIC:
        raise damaged(path, "its end is missing, or something was added to it")
    _, _, offset, _, crc32 = _TRAILER.unpack(trailer)
    if zlib.crc32(trailer[2:-4]) != crc32 or not 0 < offset < limit:
        raise damaged(path, "its last bytes are not those that were written")
    return int(offset)


def unpack_index(path: Path, index: Index, index_offset: int) -> tuple[array[int], array[int]]:
    """Return the offsets and checksums; the offsets ascend from 0 to below `index_offset`."""
    offsets, crc32s = _unpacked("Q", index.offsets), _unpacked("I", index.crc32s)
    count = len(offsets)
    exact = len(index.offsets) == 8 * count and len(index.crc32s) == 4 * count and count > 0
    if (
        not exact
        or offsets[0] != 0
        or any(a >= b for a, b in pairwise(chain(offsets, [index_offset])))
    ):
        raise damaged(path, "its index does not cover the file")
    return offsets, crc32s


def _unpacked(code: str, data: bytes) -> array[int]:
    """Return packed big-endian numbers; a part of a number at the end makes none."""
    numbers = array(code)
    numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
    if struct.pack("=H", 1) != struct.pack(">H", 1):
        numbers.byteswap()
    return numbers


def decode_header(path: Path, data: bytes) -> Header:
    """Decode a header, whose size is bounded as its profile may hold anything."""
    if len(data) > MOST_HEADER_BYTES:
        raise damaged(path, f"its header has {len(data)} bytes, more than {MOST_HEADER_BYTES}")
    return decode(path, data, Header, "header")


def decode(path: Path, data: bytes, type_: type[T], what: str) -> T:
    """Decode one typed object; msgspec bounds counts by the bytes there are, and nesting by the interpreter's limit."""
    try:
        return msgspec.msgpack.decode(data, type=type_)
    except (msgspec.MsgspecError, RecursionError, ValueError, MemoryError) as error:
        raise damaged(path, f"its {what} is not as the format says: {error}") from None


@contextlib.contextmanager
def named_faults(path: Path) -> Iterator[None]:
    """Name the file in what the rules say."""
    try:
        yield
    except VerifyError as error:
        raise VerifyError(f"{shown(path)}: {shown(str(error))}; {AGAIN}") from None
    except PlanFileError as error:
        raise PlanFileError(f"{shown(path)}: {error}") from None


def damaged(path: Path, why: str) -> PlanFileError:
    """Return the error for a file whose bytes cannot be trusted."""
    return PlanFileError(f"{shown(path)}: the plan file is damaged: {shown(why)[:300]}; {AGAIN}")
