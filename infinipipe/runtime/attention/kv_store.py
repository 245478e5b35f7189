"""Slots: K and V of split sequences, kept on a stage from the first slice's F to its B."""

from __future__ import annotations

import torch
from torch import Tensor

from infinipipe.runtime.attention.segments import Segment


class Slot:
    """K and V of one split sequence on one layer, and their gradients.

    Args:
        total: tokens of the whole sequence.
        heads: of K, and of V.
        like: a tensor of their head dim (its last dim), type and device.

    Attributes:
        key: (total, heads, head dim), one token after the other.
        value: the same.
        gradients: of K and V, sums over the slices whose B is done; each (tokens before the
            sequence's last slice, heads, head dim), as no slice asks anything of the last one's.
            None before the first B, which is the last slice's.
    """

    def __init__(self, total: int, heads: int, like: Tensor) -> None:
        shape = (total, heads, like.shape[-1])
        self.key = like.new_empty(shape)
        self.value = like.new_empty(shape)
        self.gradients: tuple[Tensor, Tensor] | None = None

    def add_gradients(self, key: Tensor, value: Tensor) -> None:
        """Add what a slice asks of the tokens before it, (tokens, heads, head dim) each."""
        if self.gradients is None:
            self.gradients = self.no_gradients(len(key))
        key_sum, value_sum = self.gradients
        key_sum[: len(key)] += key
        value_sum[: len(value)] += value

    def no_gradients(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return gradients of zeros for the first tokens.

        In float32 whatever K and V are: many slices add to the same tokens.
        """
        key_gradient = torch.zeros_like(self.key[:num_tokens], dtype=torch.float32)
        return key_gradient, torch.zeros_like(key_gradient)


class KVStore:
    """The slots of a stage, by sequence and layer."""

    def __init__(self) -> None:
        self._slots: dict[int, dict[int, Slot]] = {}

    def open(self, segment: Segment, layer: int, heads: int, like: Tensor) -> Slot:
        """Return a slice's slot to write to, made at the first slice's F; see `Slot`."""
        layers = self._slots.setdefault(segment.sequence, {})
        if layer not in layers:
            # For the whole sequence at once, so that no later slice has to move what is there.
            layers[layer] = Slot(segment.total, heads, like)
        return layers[layer]

    def slot(self, segment: Segment, layer: int) -> Slot:
        """Return the slot that an earlier F has written to."""
        return self._slots[segment.sequence][layer]

    def free(self, sequence: int) -> None:
        """Drop a sequence whose first slice's backward is done."""
        del self._slots[sequence]

    def __len__(self) -> int:
        """Count the sequences that have a slot."""
        return len(self._slots)
