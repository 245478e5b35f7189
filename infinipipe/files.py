"""Files that commands write: checked before the work begins, complete or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from infinipipe.errors import InputError
from infinipipe.units import shown


def check_output(path: Path, option: str, *inputs: Path) -> None:
    """Refuse a file that cannot be written, or that is one of the inputs.

    Raises:
        InputError: it names the option.
    """
    reason = _obstacle(path, inputs)
    if reason is not None:
        raise InputError(f"{shown(path)}: {reason}; choose another file with {option}")


def _obstacle(path: Path, inputs: tuple[Path, ...]) -> str | None:
    if path.is_dir() or not path.name:
        return "is a directory"
    if path.exists() and not path.is_file():
        return "is not a regular file"
    if not path.parent.is_dir():
        return "its folder does not exist"
    if not os.access(path.parent, os.W_OK):
        return "its folder cannot be written"
    # What is written has other names until it is complete.
    for name in (path, path.with_name(path.name + ".partial"), path.with_name(path.name + ".tmp")):
        if any(name.exists() and other.exists() and name.samefile(other) for other in inputs):
            return "would overwrite an input"
    return None


def write_output(path: Path, option: str, text: str) -> None:
    """Write a text file, complete or not at all.

    Raises:
        InputError: it cannot be written.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(text, encoding="utf-8", newline="")
        temporary.replace(path)
    except OSError as error:
        raise InputError(
            f"{shown(path)}: {error.strerror or error}; choose another file with {option}"
        ) from None
    finally:
        temporary.unlink(missing_ok=True)
