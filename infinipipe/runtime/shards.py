"""Shards: which of a chunk's tokens each rank has, of those that share its sequences."""

from __future__ import annotations

from infinipipe.ir import Chunk, Slice


def shard_sizes(num_tokens: int, num_ranks: int) -> list[int]:
    """Return the tokens of each rank's shard, as even as can be: some ranks may have none."""
    least, more = divmod(num_tokens, num_ranks)
    return [least + (index < more) for index in range(num_ranks)]


def shard_of(chunk: Chunk, num_ranks: int, index: int) -> Chunk:
    """Return a rank's tokens of a chunk, which follow those of the rank before it.

    It has fewer slices or shorter ones, or none at all.
    """
    if num_ranks == 1:
        return chunk
    sizes = shard_sizes(chunk.num_tokens, num_ranks)
    first = sum(sizes[:index])
    last = first + sizes[index]
    parts: list[Slice] = []
    place = 0
    for part in chunk.slices:
        # In tokens of the slice.
        begin = max(first - place, 0)
        end = min(last - place, part.length)
        if begin < end:
            parts.append(Slice(part.sequence, part.start + begin, end - begin))
        place += part.length
    return Chunk(tuple(parts))
