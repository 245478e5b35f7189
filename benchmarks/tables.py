"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def table(names: Iterable[str], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Yield the lines of a table."""
    names = tuple(names)
    yield "| " + " | ".join(names) + " |"
    yield "|" + "---|" * len(names)
    for cells in rows:
        yield "| " + " | ".join(cells) + " |"
