"""The optimizer: AdamW on this rank's shards of a stage's parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from infinipipe.runtime.collectives import all_gather, place_in
from infinipipe.runtime.flat import FlatBuffers, Part, PartKind

BETAS = (0.9, 0.95)
"""Of LLM pretraining since GPT-3: the second moment follows within some twenty steps, where
torch's own 0.999 would remember a thousand."""
EPSILON = 1e-8
"""AdamW's usual value: far below the root of any second moment that matters."""
WEIGHT_DECAY = 0.1
"""As GPT-3 and llama were pretrained; each step takes off `lr` times this of a weight."""


class Optimizer:
    """AdamW that holds state for this rank's shards only.

    Args:
        flat: the stage's buffers, padded for as many shards as the stage has copies.
        copies: the ranks that hold this stage; None if there is no other.
        lr: the learning rate.
    """

    def __init__(self, flat: FlatBuffers, copies: ProcessGroup | None, lr: float) -> None:
        self._flat = flat
        self._copies = copies
        self._adamw = make_adamw(flat.shards(*place_in(copies)), lr)

    def step(self) -> None:
        """Update this rank's shards of the parameters, and take those of the others from them."""
        self._adamw.step()
        if self._copies is not None:
            for part in self._flat.parts:
                all_gather(part.parameters, self._copies)

    def state_tensors(self) -> list[Tensor]:
        """Return what AdamW remembers of the shards: two moments of each, and its steps."""
        tensors: list[Tensor] = []
        for state in self._adamw.state.values():
            tensors += state.values()
        return tensors


def make_adamw(shards: Sequence[Part], lr: float) -> torch.optim.AdamW:
    """Return AdamW with its state allocated.

    Args:
        shards: each becomes one tensor of the optimizer.
        lr: the learning rate.
    """
    groups = []
    for shard in shards:
        shard.parameters.grad = shard.gradients
        decay = 0.0 if shard.kind is PartKind.PLAIN else WEIGHT_DECAY
        groups.append({"params": [shard.parameters], "weight_decay": decay})
    adamw = torch.optim.AdamW(groups, lr=lr, betas=BETAS, eps=EPSILON, fused=True)
    for shard in shards:
        # Allocated now, so that the first step needs the memory that all others need.
        adamw.state[shard.parameters] = {
            "step": torch.zeros((), dtype=torch.float32, device=shard.parameters.device),
            "exp_avg": torch.zeros_like(shard.parameters),
            "exp_avg_sq": torch.zeros_like(shard.parameters),
        }
    return adamw
