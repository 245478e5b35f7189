"""A stage's program as arrays: what planning and costing compute with."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from infinipipe.aliases import Bools, Ints
from infinipipe.ir import TRAITS, Direction, Held, Op, OpKind

KINDS = tuple(OpKind)
"""Kinds of ops; arrays hold a kind as its place here."""
_CODES = {kind: code for code, kind in enumerate(KINDS)}
_FORWARD = _CODES[OpKind.FORWARD]
_BACKWARD = _CODES[OpKind.BACKWARD]
_TRAVELS = np.array([int(TRAITS[kind].travels) for kind in KINDS], dtype=np.int64)
_OPENS_ACTIVATIONS = np.array([TRAITS[kind].opens is Held.ACTIVATIONS for kind in KINDS])
_CLOSES_ACTIVATIONS = np.array([TRAITS[kind].closes is Held.ACTIVATIONS for kind in KINDS])
_ACTIVATIONS: Ints = _OPENS_ACTIVATIONS.astype(np.int64) - _CLOSES_ACTIVATIONS


@dataclass(frozen=True)
class PackedProgram:
    """One stage's ops in order; arrays of shape (ops,)."""

    kinds: Ints
    """Each op's kind, as its place in `KINDS`."""
    chunks: Ints

    @classmethod
    def pack(cls, program: SequenceOf[Op]) -> PackedProgram:
        """Return the arrays of a program of the IR."""
        codes = [_CODES[op.kind] for op in program]
        numbers = [op.chunk for op in program]
        kinds = np.array(codes, dtype=np.int64)
        chunks = np.array(numbers, dtype=np.int64)
        return cls(kinds, chunks)

    @classmethod
    def interleave(cls, forwards_before: Ints, backwards: Ints) -> PackedProgram:
        """Return the program of F and B in which so many F come before each B.

        Args:
            forwards_before: (chunks,) F before each B, in the order of B; F run in the order of
                the chunks.
            backwards: (chunks,) the chunks in the order of B.
        """
        num_chunks = len(forwards_before)
        num_ops = 2 * num_chunks
        numbers = np.arange(num_chunks)
        # Before each B come so many F, and all earlier B.
        backward_places = forwards_before + numbers
        kinds = np.full(num_ops, _FORWARD, dtype=np.int64)
        kinds[backward_places] = _BACKWARD
        chunks = np.empty(num_ops, dtype=np.int64)
        chunks[backward_places] = backwards
        chunks[kinds == _FORWARD] = numbers
        return cls(kinds, chunks)

    def unpack(self) -> tuple[Op, ...]:
        """Return the ops of the IR."""
        kinds = [KINDS[code] for code in self.kinds.tolist()]
        chunks = self.chunks.tolist()
        return tuple(map(Op, kinds, chunks))

    @cached_property
    def travels(self) -> Ints:
        """Where each op's result goes, as a `Direction`."""
        return _TRAVELS[self.kinds]

    @cached_property
    def activation_signs(self) -> Ints:
        """What each op does to its chunk's activations: 1 where they come, -1 where they go."""
        return _ACTIVATIONS[self.kinds]

    @cached_property
    def is_forward(self) -> Bools:
        """Which ops are F."""
        return np.equal(self.travels, Direction.DOWN)

    @cached_property
    def is_backward(self) -> Bools:
        """Which ops are B, or the I of a B in two parts."""
        return np.equal(self.travels, Direction.UP)

    def is_kind(self, kind: OpKind) -> Bools:
        """Return which ops are of a kind."""
        return np.equal(self.kinds, _CODES[kind])

    @cached_property
    def has_input_weight(self) -> bool:
        """Whether any B is cut into I and W."""
        return bool(self.is_kind(OpKind.BACKWARD_INPUT).any())

    @cached_property
    def forward_places(self) -> Ints:
        """(chunks,) where each chunk's F stands."""
        return self._places(self.is_forward)

    @cached_property
    def backward_places(self) -> Ints:
        """(chunks,) where each chunk's B or I stands."""
        return self._places(self.is_backward)

    @property
    def forward_chunks(self) -> Ints:
        """(chunks,) the chunks in the order of F."""
        return self.chunks[self.is_forward]

    @property
    def backward_chunks(self) -> Ints:
        """(chunks,) the chunks in the order of B."""
        return self.chunks[self.is_backward]

    def _places(self, chosen: Bools) -> Ints:
        """Return (chunks,) where each chunk's one op among the chosen ones stands."""
        numbers = np.flatnonzero(chosen)
        chunks = self.chunks[chosen]
        places = np.empty(len(numbers), dtype=np.int64)
        places[chunks] = numbers
        return places
