"""Numbers and names as people read them."""

from __future__ import annotations

from pathlib import Path

MIB = 2**20
"""Bytes of a MiB, for figures that are set side by side and so share one unit."""

_LARGER_UNITS = ("KiB", "MiB", "GiB", "TiB")


def show_bytes(count: float) -> str:
    """Return bytes with three digits and the binary unit that suits them."""
    value = float(count)
    unit = "B"
    for larger in _LARGER_UNITS:
        if value < 1024:
            break
        value /= 1024
        unit = larger
    return f"{value:.{_decimals(value, unit)}f} {unit}"


def _decimals(value: float, unit: str) -> int:
    """Return how many decimals make three digits; there is no part of a byte."""
    if unit == "B" or value >= 100:
        return 0
    return 2 if value < 10 else 1


def show_fraction(part: float, whole: float) -> str:
    """Return a part in percent, 0.0% of nothing."""
    return f"{part / whole:.1%}" if whole else "0.0%"


def shown(name: Path | str) -> str:
    """Return a name on one line, whatever is in it."""
    return "".join(_visible(character) for character in str(name))


def _visible(character: str) -> str:
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode()
