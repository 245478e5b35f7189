"""Whether a file is still the dataset that a plan was compiled from."""

from __future__ import annotations

import hashlib
from pathlib import Path

from infinipipe.errors import InputError, PlanFileError
from infinipipe.ir import DatasetInfo

_SHOWN_DIGITS = 12
"""Digits of a digest in a message: enough to tell two files apart, and both fit into a line."""


def check_same_dataset(path: Path, info: DatasetInfo) -> None:
    """Check by its digest that a file is the dataset that a plan was compiled from.

    Raises:
        InputError: the file cannot be read.
        PlanFileError: it is another dataset.
    """
    sha256 = _sha256(path)
    if sha256 != info.sha256:
        raise PlanFileError(
            f"{path}: is not the dataset that the plan was compiled from "
            f"(sha256 {sha256[:_SHOWN_DIGITS]}, the plan says {info.sha256[:_SHOWN_DIGITS]}); "
            "compile it again or choose another with --data"
        )


def _sha256(path: Path) -> str:
    try:
        # A device or a pipe might never end.
        if path.exists() and not path.is_file():
            raise InputError(f"{path}: is not a file; name the plan's dataset with --data")
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError) as error:  # ValueError: the plan's path has a NUL
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{str(path)!r}: {reason}; name the plan's dataset with --data") from None
