"""Slots: K and V of split sequences, kept on a stage from the first slice's F to its B."""

from __future__ import annotations

import torch
from torch import Tensor

from infinipipe.runtime.attention.segments import Segment


class Slot:
    """K and V of one split sequence on one layer, and their gradients.

    All have the shape (1, kv heads, tokens, head dim): K and V of the whole sequence, gradients of
    the tokens before its last slice.
    """

    def __init__(self, key: Tensor, total: int) -> None:
        batch, kv_heads, _, head_dim = key.shape
        shape = (batch, kv_heads, total, head_dim)
        self.key = key.new_empty(shape)
        self.value = key.new_empty(shape)
        self._gradients: tuple[Tensor, Tensor] | None = None

    def gradients(self, segment: Segment) -> tuple[Tensor, Tensor]:
        """Return sums of dK and dV over the slices after a slice, for the tokens before the last.

        They are made when the last slice's backward asks, which is the sequence's first: nothing is
        added to its own tokens. In float32 whatever K and V are: many slices add to the same
        tokens.
        """
        if self._gradients is None:
            before = self.key[:, :, segment.context]
            key_gradient = torch.zeros_like(before, dtype=torch.float32)
            self._gradients = key_gradient, torch.zeros_like(key_gradient)
        return self._gradients


class KVStore:
    """The slots of a stage, by sequence and layer."""

    def __init__(self) -> None:
        self._slots: dict[int, dict[int, Slot]] = {}

    def write(self, segment: Segment, layer: int, key: Tensor, value: Tensor) -> Slot:
        """Put a slice's K and V into the sequence's slot; recompute writes the same again."""
        layers = self._slots.setdefault(segment.sequence, {})
        if layer not in layers:
            # For the whole sequence at once, so that no later slice has to move what is there.
            layers[layer] = Slot(key, segment.total)
        slot = layers[layer]
        slot.key[:, :, segment.span] = key
        slot.value[:, :, segment.span] = value
        return slot

    def slot(self, segment: Segment, layer: int) -> Slot:
        """Return the slot that an earlier `write` filled."""
        return self._slots[segment.sequence][layer]

    def free(self, sequence: int) -> None:
        """Drop a sequence whose first slice's backward is done."""
        del self._slots[sequence]

    def __len__(self) -> int:
        """Count the sequences that have a slot."""
        return len(self._slots)
