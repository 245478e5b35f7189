"""Types of arguments and options that several commands take."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

PATH = click.Path(path_type=Path)

COUNT = click.IntRange(min=1)

INDEX = click.IntRange(min=0)

SEED = click.IntRange(min=0, max=2**63 - 1)
"""What fits the signed 64 bits in which a plan holds it."""

DEVICE = click.Choice(["auto", "cpu", "cuda"])

_LETTERS = "KMGT"
"""Of 1000 and 1024 to the power of 1, 2, 3 and 4."""


def _make_units() -> dict[str, int]:
    units = {"": 1, "B": 1}
    for power, letter in enumerate(_LETTERS, start=1):
        units[f"{letter}B"] = 1000**power
        units[f"{letter}IB"] = 1024**power
    return units


_UNITS = _make_units()
"""Bytes of each unit, by its name in capitals."""


_SIZE = re.compile(r"\s*(?P<number>\d+(\.\d+)?)\s*(?P<unit>[A-Za-z]*)\s*", re.ASCII)


class MemoryLimits(click.ParamType[tuple[int, ...]]):
    """Bytes with a unit, such as `80GiB`; a comma list gives every stage its own limit."""

    name = "size"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Return the bytes."""
        limits = [_parse_bytes(part) for part in str(value).split(",")]
        if 0 in limits:
            reason = f"{value!r} is no size such as 80GiB, 512MiB, 40GB or 40GiB,80GiB"
            self.fail(reason, param, ctx)
        return tuple(limits)


def _parse_bytes(text: str) -> int:
    """Return the bytes, 0 for what is no size."""
    match = _SIZE.fullmatch(text)
    if match is None:
        return 0
    number = float(match["number"])
    unit_bytes = _UNITS.get(match["unit"].upper(), 0)
    return int(number * unit_bytes)


class Counts(click.ParamType[tuple[int, ...]]):
    """Positive numbers, separated by commas."""

    name = "n,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Return the numbers."""
        return tuple(COUNT(part, param, ctx) for part in str(value).split(","))
