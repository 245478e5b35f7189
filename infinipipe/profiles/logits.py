"""How many tokens' logits the head computes at a time: the largest tensor of a step, in blocks."""

from __future__ import annotations

_BLOCK_ELEMENTS = 2**26
"""256 MiB in float32. All logits of 16,384 tokens in a vocabulary of 128,256 would take 8 GiB."""
_MOST_TOKENS = 1024
"""Saves memory where the vocabulary is small; larger blocks would only save a few launches."""
_LEAST_TOKENS = 64
"""Each block reads the head's whole weight, so it should be worth it.

Only a vocabulary of more than 2**20 tokens would get fewer.
"""


def logits_tokens(vocabulary_size: int) -> int:
    """Return for how many tokens at most the head computes logits at a time."""
    fitting = _BLOCK_ELEMENTS // vocabulary_size
    return min(_MOST_TOKENS, max(_LEAST_TOKENS, fitting))
