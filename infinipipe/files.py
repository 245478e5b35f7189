"""Files that commands write: checked before the work begins, complete or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from infinipipe.errors import InputError
from infinipipe.units import shown

_TEMPORARY_SUFFIX = ".tmp"
"""Of a file's name until it is complete."""

_UNFINISHED_SUFFIXES = (_TEMPORARY_SUFFIX, ".partial")
"""Of all the names that an output has until it is complete; `.partial` is a plan's."""


def check_output(path: Path, option: str, *inputs: Path) -> None:
    """Refuse a file that cannot be written, or that is one of the inputs.

    Raises:
        InputError: it names the option.
    """
    obstacle = _obstacle(path, inputs)
    if obstacle is not None:
        raise _no_output(path, option, obstacle)


def _obstacle(path: Path, inputs: tuple[Path, ...]) -> str | None:
    if path.is_dir() or not path.name:
        return "is a directory"
    if path.exists() and not path.is_file():
        return "is not a regular file"
    if not path.parent.is_dir():
        return "its folder does not exist"
    if not os.access(path.parent, os.W_OK):
        return "its folder cannot be written"
    unfinished = [path.with_name(path.name + suffix) for suffix in _UNFINISHED_SUFFIXES]
    for written in (path, *unfinished):
        if any(_is_same_file(written, given) for given in inputs):
            return "would overwrite an input"
    return None


def _is_same_file(first: Path, second: Path) -> bool:
    return first.exists() and second.exists() and first.samefile(second)


def write_output(path: Path, option: str, text: str) -> None:
    """Write a text file, complete or not at all.

    Raises:
        InputError: it cannot be written; it names the option.
    """
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise _no_output(path, option, error.strerror or str(error)) from None


def write_whole(path: Path, data: bytes) -> None:
    """Write a file, complete or not at all: until then, one that was there before stays.

    Raises:
        OSError: it cannot be written.
    """
    temporary = path.with_name(path.name + _TEMPORARY_SUFFIX)
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _no_output(path: Path, option: str, reason: str) -> InputError:
    return InputError(f"{shown(path)}: {reason}; choose another file with {option}")
