"""Exchange: ranks that share sequences turn their tokens of all heads into all tokens of their
heads, and back (Ulysses).

Tensors have their tokens first, (tokens, heads, head dim), so that what arrives from the ranks, one
behind the other, is the chunk. A rank's tokens are its shard, as `runtime.shards` cuts it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from infinipipe.runtime.shards import shard_sizes

AllToAll = Callable[[Tensor, Tensor, list[int], list[int]], object]
"""Sends parts of its second argument to all ranks and receives into its first one; the last two
are the rows from and to each rank. As `torch.distributed.all_to_all_single`."""


class Exchange(Protocol):
    """What a rank shares sequences by."""

    num_ranks: int
    """That share every sequence, this one included."""
    index: int
    """Of this rank among them."""

    def own_heads(self, heads: int) -> int:
        """Return how many of a model's heads a rank attends with."""

    def to_heads(self, shard: Tensor, num_tokens: int, into: Tensor | None = None) -> Tensor:
        """Return all tokens of the rank's heads, for its own tokens of all heads.

        Args:
            shard: (tokens of the shard, heads, head dim).
            num_tokens: of the chunk.
            into: where to receive, (tokens of the chunk, own heads, head dim); new if None.
        """

    def to_tokens(self, tensor: Tensor, heads: int) -> Tensor:
        """Return the rank's tokens of all heads, for all tokens of its own heads.

        Where several ranks have the same head, what they have of it is added up.

        Args:
            tensor: (tokens of the chunk, own heads, head dim).
            heads: of the model.
        """


class _NoExchange:
    """Of a rank that shares its sequences with no other; it copies nothing it need not."""

    num_ranks = 1
    index = 0

    def own_heads(self, heads: int) -> int:
        return heads

    def to_heads(self, shard: Tensor, num_tokens: int, into: Tensor | None = None) -> Tensor:
        return shard if into is None else into.copy_(shard)

    def to_tokens(self, tensor: Tensor, heads: int) -> Tensor:
        return tensor


NO_EXCHANGE: Exchange = _NoExchange()


class HeadExchange:
    """See `Exchange`. Fewer heads than ranks are repeated, so that each rank has one of them.

    Args:
        num_ranks: that share every sequence.
        index: of this one.
        all_to_all: moves the parts.
    """

    def __init__(self, num_ranks: int, index: int, all_to_all: AllToAll) -> None:
        self.num_ranks = num_ranks
        self.index = index
        self._all_to_all = all_to_all

    def own_heads(self, heads: int) -> int:
        """See `Exchange`."""
        return max(1, heads // self.num_ranks)

    def to_heads(self, shard: Tensor, num_tokens: int, into: Tensor | None = None) -> Tensor:
        """See `Exchange`."""
        shard_tokens, heads, head_dim = shard.shape
        num_groups, repeats = self._groups(heads)
        by_group = shard.unflatten(1, (num_groups, -1)).transpose(0, 1)
        repeated = by_group[:, None].expand(-1, repeats, -1, -1, -1)
        # The one copy: (ranks * tokens of the shard, own heads, head dim).
        by_rank = repeated.flatten(0, 2).contiguous()
        if into is None:
            into = shard.new_empty(num_tokens, self.own_heads(heads), head_dim)
        sizes = shard_sizes(num_tokens, self.num_ranks)
        self._all_to_all(into, by_rank, sizes, [shard_tokens] * self.num_ranks)
        return into

    def to_tokens(self, tensor: Tensor, heads: int) -> Tensor:
        """See `Exchange`."""
        num_tokens, own_heads, head_dim = tensor.shape
        sizes = shard_sizes(num_tokens, self.num_ranks)
        shard_tokens = sizes[self.index]
        by_rank = tensor.new_empty(self.num_ranks * shard_tokens, own_heads, head_dim)
        self._all_to_all(by_rank, tensor.contiguous(), [shard_tokens] * self.num_ranks, sizes)
        num_groups, repeats = self._groups(heads)
        repeated = by_rank.unflatten(0, (num_groups, repeats, shard_tokens))
        by_group = repeated.sum(1) if repeats > 1 else repeated[:, 0]
        shard: Tensor = by_group.transpose(0, 1).flatten(1, 2)
        return shard

    def _groups(self, heads: int) -> tuple[int, int]:
        """Return into how many groups heads fall, and how many ranks have each group."""
        num_groups = min(heads, self.num_ranks)
        return num_groups, self.num_ranks // num_groups


def exchange_in(group: ProcessGroup | None) -> Exchange:
    """Return the exchange of the ranks of a process group; None for a rank without others."""
    if group is None:
        return NO_EXCHANGE
    all_to_all = functools.partial(dist.all_to_all_single, group=group)
    return HeadExchange(dist.get_world_size(group), dist.get_rank(group), all_to_all)
