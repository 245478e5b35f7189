"""The optimizer: AdamW on a stage's own parameters."""

from __future__ import annotations

import torch
from torch import nn

BETAS = (0.9, 0.95)
"""Of LLM pretraining since GPT-3: the second moment follows within some twenty steps, where
torch's own 0.999 would remember a thousand."""
EPSILON = 1e-8
"""AdamW's usual value: far below the root of any second moment that matters."""
WEIGHT_DECAY = 0.1
"""As GPT-3 and llama were pretrained; each step takes off `lr` times this of a weight."""


def make_optimizer(parameters: dict[str, nn.Parameter], lr: float) -> torch.optim.AdamW:
    """Return AdamW with its state allocated.

    Args:
        parameters: by global name. Only matrices decay: to shrink a norm's scale or a bias would
            not regularise, and a parameter's dims are the same on any stage.
        lr: the learning rate.
    """
    decayed = [parameter for parameter in parameters.values() if parameter.ndim >= 2]
    others = [parameter for parameter in parameters.values() if parameter.ndim < 2]
    groups = [
        {"params": decayed, "weight_decay": WEIGHT_DECAY},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=lr, betas=BETAS, eps=EPSILON, fused=True
    )
    for parameter in parameters.values():
        # Allocated now, so that the first step needs the memory that all others need.
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer
