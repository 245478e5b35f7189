"""Numbers and names for people."""

from __future__ import annotations

from pathlib import Path


def show_bytes(count: float) -> str:
    """Return bytes with three digits and a binary unit, never less than they are by more than rounding."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    digits = 0 if unit == "B" or value >= 100 else 2 if value < 10 else 1
    return f"{value:.{digits}f} {unit}"


def shown(name: Path | str) -> str:
    """Return a name on one line, whatever is in it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(name))
