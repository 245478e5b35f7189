"""How a plan file is laid out: its opening, its index, its trailer, and how they are checked."""

from __future__ import annotations

import contextlib
import re
import struct
import sys
import zlib
from array import array
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import msgspec

from infinipipe.errors import PlanFileError, VerifyError
from infinipipe.ir.plan import FORMAT_VERSION, Header, Totals
from infinipipe.units import shown

T = TypeVar("T")

AGAIN = "compile it again with `infinipipe compile`"

_MAGIC = b"infiplan"
# bin8 of 24 bytes: magic, offset and crc32 of the index, crc32 of the 20 bytes before.
_TRAILER = struct.Struct(">2s8sQII")
_BIN8 = b"\xc4\x18"
_CRC32_BYTES = 4  # as zlib counts them
TRAILER_BYTES = _TRAILER.size

# Every format begins with a map whose first key is `format_version`, a small integer.
_OPENING = re.compile(rb"(?:[\x80-\x8f]|\xde..)\xaeformat_version([\x00-\x7f])", re.DOTALL)
OPENING_BYTES = 64
"""As many as show what a file is: what is looked for ends within 19."""

MOST_HEADER_BYTES = 1 << 20
"""Small objects take a hundred times the memory of their bytes; a real header has some 20 kB."""

# The library's words about a damaged object may quote it; an error is a line that can be read.
_MOST_REASON_CHARACTERS = 300


class Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    # One line of the schema that `infinipipe inspect --schema` prints.
    """Where every object lies. Numbers are packed as big-endian bytes: 12 bytes an object, \
however many there are."""

    offsets: bytes
    """8 bytes for the header and for every step."""
    crc32s: bytes
    """4 bytes for the header and for every step."""
    sha256: str
    """Of all bytes before the index; it names the plan."""
    totals: Totals


def check_opening(path: Path, data: bytes) -> None:
    """Refuse foreign files and other formats by a file's first bytes, before all decoding.

    Raises:
        PlanFileError: it is no plan, or of another format.
    """
    match = _OPENING.match(data)
    if match is None:
        raise PlanFileError(
            f"{shown(path)}: not a plan file; make a plan with `infinipipe compile`"
        )
    version = match.group(1)[0]
    if version == FORMAT_VERSION:
        return
    newer = "use a newer infinipipe, or " if version > FORMAT_VERSION else ""
    raise PlanFileError(
        f"{shown(path)}: plan format {version}, this infinipipe reads format {FORMAT_VERSION}; "
        f"{newer}{AGAIN}"
    )


def make_trailer(offset: int, index: bytes) -> bytes:
    """Return the last object of a file whose index lies at an offset."""
    index_crc32 = zlib.crc32(index)
    unsigned = _TRAILER.pack(_BIN8, _MAGIC, offset, index_crc32, 0)
    crc32 = _content_crc32(unsigned)
    return _TRAILER.pack(_BIN8, _MAGIC, offset, index_crc32, crc32)


def parse_trailer(path: Path, trailer: bytes, limit: int) -> int:
    """Return the offset of the index, which ends at `limit`, where the trailer begins.

    Raises:
        PlanFileError: it is not a trailer, or a damaged one.
    """
    if len(trailer) != TRAILER_BYTES or not trailer.startswith(_BIN8 + _MAGIC):
        raise damaged(path, "its end is missing, or something was added to it")
    _, _, offset, _, stated_crc32 = _TRAILER.unpack(trailer)
    actual_crc32 = _content_crc32(trailer)
    if actual_crc32 != stated_crc32 or not 0 < offset < limit:
        raise damaged(path, "its last bytes are not those that were written")
    return int(offset)


def _content_crc32(trailer: bytes) -> int:
    """Return the checksum of what stands in a trailer before its own."""
    content = trailer[len(_BIN8) : -_CRC32_BYTES]
    return zlib.crc32(content)


def unpack_index(path: Path, index: Index, index_offset: int) -> tuple[array[int], array[int]]:
    """Return the offsets and checksums; the offsets ascend from 0 to below `index_offset`.

    Raises:
        PlanFileError: they do not.
    """
    offsets = _unpacked("Q", index.offsets)
    crc32s = _unpacked("I", index.crc32s)
    num_objects = len(offsets)
    packed_sizes = (len(index.offsets), len(index.crc32s))
    expected_sizes = (8 * num_objects, _CRC32_BYTES * num_objects)
    if packed_sizes != expected_sizes or not _covers(offsets, index_offset):
        raise damaged(path, "its index does not cover the file")
    return offsets, crc32s


def _covers(offsets: array[int], end: int) -> bool:
    """Return whether every byte from 0 to the end belongs to one object, none of them empty."""
    if not offsets:
        return False
    ascending = all(offset < following for offset, following in pairwise(offsets))
    return ascending and offsets[0] == 0 and offsets[-1] < end


def _unpacked(code: str, data: bytes) -> array[int]:
    """Return packed big-endian numbers; a part of a number at the end makes none."""
    numbers = array(code)
    num_whole = len(data) // numbers.itemsize
    whole = data[: num_whole * numbers.itemsize]
    numbers.frombytes(whole)
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers


def decode_header(path: Path, data: bytes) -> Header:
    """Decode a header, whose size is bounded as its profile may hold anything.

    Raises:
        PlanFileError: it is too large, or not a header.
    """
    if len(data) > MOST_HEADER_BYTES:
        raise damaged(path, f"its header has {len(data)} bytes, more than {MOST_HEADER_BYTES}")
    return decode(path, data, Header, "header")


def decode(path: Path, data: bytes, type_: type[T], what: str) -> T:
    """Decode one typed object.

    msgspec bounds counts by the bytes there are, and nesting by the interpreter's limit.

    Raises:
        PlanFileError: it is not of the type; the message calls it `what`.
    """
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
        why = shown(str(error))
        raise VerifyError(f"{shown(path)}: {why}; {AGAIN}") from None
    except PlanFileError as error:
        raise PlanFileError(f"{shown(path)}: {error}") from None


def damaged(path: Path, why: str) -> PlanFileError:
    """Return the error for a file whose bytes cannot be trusted."""
    reason = shown(why)[:_MOST_REASON_CHARACTERS]
    return PlanFileError(f"{shown(path)}: the plan file is damaged: {reason}; {AGAIN}")
