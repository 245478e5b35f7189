"""Segment: where a slice stands in its chunk and in its sequence.

A chunk's table of them, with what attention needs besides, is `Segments` in `chunk_attention.py`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Segment:
    """One slice's place in a chunk."""

    first: int
    """Its first token in the chunk."""
    length: int
    sequence: int
    """Index into the step's sequences."""
    start: int
    """Its context: the sequence's tokens before it."""
    total: int
    """Tokens of the whole sequence."""

    @property
    def last(self) -> int:
        """One past its last token in the chunk."""
        return self.first + self.length

    @property
    def stop(self) -> int:
        """One past its last token in the sequence."""
        return self.start + self.length

    @property
    def split(self) -> bool:
        """Whether it is only a part of its sequence."""
        return self.length != self.total

    @property
    def rows(self) -> slice:
        """Its tokens in the chunk."""
        return slice(self.first, self.last)

    @property
    def span(self) -> slice:
        """Its tokens in the sequence."""
        return slice(self.start, self.stop)

    @property
    def context(self) -> slice:
        """The sequence's tokens before it."""
        return slice(0, self.start)
