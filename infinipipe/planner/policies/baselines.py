"""Rivals, each with the best of its own static settings for the step: sizes of chunks and one recompute rule.

They go through the same prices, memory and simulator as every policy. GPipe, 1F1B and Seq1F1B train on
micro-batches of one fixed shape, which has to hold the longest sequence of all steps
(`Pipeline.context_tokens`). Where a system would cut a short sequence at a fixed size, the cut is moved to its end,
because a chunk holds a part of at most one sequence.

All take the best schedule that is known already: what cannot beat it is not simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from infinipipe.aliases import Ints
from infinipipe.costs import Work
from infinipipe.ir import Chunk
from infinipipe.planner.passes.chunking import Chunks, cut_chunks
from infinipipe.planner.passes.order import Window, flush_leads, stage_leads
from infinipipe.planner.passes.schedule import (
    NOTHING,
    CostedChains,
    Result,
    Schedule,
    cannot_beat,
    fixed_schedule,
    is_better,
    order_memories,
    price_chains,
)
from infinipipe.planner.problem import Problem

TOKENS = Work(s_per_token=1.0, s_per_pair=0.0, s_per_slice=0.0)
"""Work as systems count it that balance tokens."""

_WINDOWS: tuple[Window, ...] = ("adaptive", "uniform")
_MOST_PARTS = 1024
_UNIFORM_PARTS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Parts of a stage's layers that are tried as the one recompute count of all its chunks."""
_STEP = math.sqrt(2)


class _Setting(NamedTuple):
    """Chunks, leads, and what may be recomputed, from the least to the most."""

    name: str
    priced: CostedChains
    leads: Ints
    choices: list[tuple[str, Ints]]


def plan_gpipe(problem: Problem, best: Result = NOTHING) -> Result:
    """GPipe (Huang et al. 2019): whole sequences packed by tokens; all F, then all B, in as many rounds as needed."""
    return _best(problem, "gpipe", _flushed(problem, _packed(problem)), best)


def plan_1f1b(problem: Problem, best: Result = NOTHING) -> Result:
    """1F1B as in DAPPLE (Fan et al. 2020): whole sequences packed by tokens, F and B alternate."""
    return _best(problem, "1f1b", _windowed(problem, _packed(problem)), best)


def plan_terapipe(problem: Problem, best: Result = NOTHING) -> Result:
    """TeraPipe (Li et al. 2021): slices of equal time, which is what its dynamic program finds; all F, then all B."""
    work = problem.pipeline.costs.work
    return _best(problem, "terapipe", _flushed(problem, _cuts(problem, work)), best)


def plan_seq1f1b(problem: Problem, best: Result = NOTHING) -> Result:
    """Seq1F1B (Ao et al. 2024): packed micro-batches of k slices of equal length, last in first out."""
    return _best(problem, "seq1f1b", _windowed(problem, _sliced_micro_batches(problem)), best)


def plan_chunkflow(problem: Problem, best: Result = NOTHING) -> Result:
    """ChunkFlow (Yuan et al. 2025): chunks of one size; only the last K of a sequence keep their activations."""
    return _best(problem, "chunkflow", _chunkflow(problem), best)


def _best(problem: Problem, policy: str, settings: Iterable[_Setting], best: Result) -> Result:
    for name, priced, leads, choices in settings:
        if cannot_beat(best, priced):
            continue
        memories = order_memories(problem, priced, leads)
        for recomputed, counts in choices:
            if cannot_beat(best, priced, counts):
                break
            found = fixed_schedule(problem, priced, memories, counts)
            if is_better(found, best):
                best = (
                    found.won_by(f"{policy}: {name}, {recomputed}")
                    if isinstance(found, Schedule)
                    else found
                )
            if isinstance(found, Schedule):
                break
    return best


def _packed(problem: Problem) -> Iterator[tuple[str, CostedChains]]:
    """Yield packs of whole sequences, none of more tokens than a micro-batch or its even share has, if that is more."""
    context, most = _context_tokens(problem), problem.pipeline.costs.max_chunk_tokens
    if problem.lengths.max() > most:
        return iter(())
    return _distinct(
        problem,
        lambda size: cut_chunks(
            problem, TOKENS, max(size, context), min(most, max(int(size), context))
        ),
    )


def _cuts(problem: Problem, work: Work) -> Iterator[tuple[str, CostedChains]]:
    most = problem.pipeline.costs.max_chunk_tokens
    total, tokens = float(work.whole(problem.lengths).sum()), int(problem.lengths.sum())
    return _distinct(problem, lambda size: cut_chunks(problem, work, size * total / tokens, most))


def _distinct(
    problem: Problem, cut: Callable[[float], Chunks]
) -> Iterator[tuple[str, CostedChains]]:
    """Yield a name and priced chunks for ever smaller sizes in tokens, each once."""
    tokens = int(problem.lengths.sum())
    seen: set[Chunks] = set()
    for power in range(1 + math.ceil(math.log(min(tokens, _MOST_PARTS), _STEP))):
        size = max(1.0, tokens / _STEP**power)
        chunks = cut(size)
        if chunks not in seen:
            seen.add(chunks)
            yield f"chunks of {size:.0f} tokens", price_chains(problem, chunks)


def _sliced_micro_batches(problem: Problem) -> Iterator[tuple[str, CostedChains]]:
    """Yield micro-batches of the context's tokens, cut into ever more slices."""
    context, most = _context_tokens(problem), problem.pipeline.costs.max_chunk_tokens
    seen: set[Chunks] = set()
    for power in range(1 + math.ceil(math.log(min(context, _MOST_PARTS), _STEP))):
        count = round(_STEP**power)
        chunks = _micro_batches(cut_chunks(problem, TOKENS, context / count, most), count)
        if chunks not in seen:
            seen.add(chunks)
            yield f"{count} slices of a micro-batch", price_chains(problem, chunks)


def _context_tokens(problem: Problem) -> int:
    return max(problem.pipeline.context_tokens, int(problem.lengths.max()))


def _windowed(problem: Problem, cuts: Iterable[tuple[str, CostedChains]]) -> Iterator[_Setting]:
    num_stages = problem.pipeline.num_stages
    for name, priced in cuts:
        leads = stage_leads(priced.chunks, num_stages, "uniform", num_stages)
        yield _Setting(name, priced, leads, _static_counts(problem, priced))


def _flushed(problem: Problem, cuts: Iterable[tuple[str, CostedChains]]) -> Iterator[_Setting]:
    """All F before all B, in rounds of equally many chunks."""
    for name, priced in cuts:
        rounds = 1
        while rounds <= len(priced.chunks.chains):
            leads = flush_leads(priced.chunks, problem.pipeline.num_stages, rounds)
            yield _Setting(
                f"{name}, {rounds} rounds", priced, leads, _static_counts(problem, priced)
            )
            rounds *= 2


def _chunkflow(problem: Problem) -> Iterator[_Setting]:
    num_stages = problem.pipeline.num_stages
    layers = np.array([[stage.num_layers] for stage in problem.pipeline.stages])
    for name, priced in _cuts(problem, TOKENS):
        sizes = np.repeat(priced.chunks.chains, priced.chunks.chains)
        behind = np.array(priced.chunks.chain_ends) - np.arange(len(sizes))
        longest = int(sizes.max())
        kept_counts = sorted(
            {*(1 << power for power in range(longest.bit_length())), longest}, reverse=True
        )
        choices = [(f"K = {kept}", layers * (behind > kept)[None, :]) for kept in kept_counts]
        choices.append(("K = 0", np.repeat(layers, len(sizes), axis=1)))
        for window in _WINDOWS:
            leads = stage_leads(priced.chunks, num_stages, window, num_stages)
            yield _Setting(f"{name}, {window} window", priced, leads, choices)


def _micro_batches(chunks: Chunks, count: int) -> Chunks:
    """Fill micro-batches of `count` chunks, or as many as the longest chain has, and call each of them a chain."""
    most = max(count, *chunks.chains)
    ends = np.cumsum(chunks.chains).tolist()
    batches: list[list[Chunk]] = []
    for end, size in zip(ends, chunks.chains, strict=True):
        place = next((batch for batch in batches if len(batch) + size <= most), None)
        if place is None:
            place = []
            batches.append(place)
        place += chunks.chunks[end - size : end]
    return Chunks(tuple(chunk for batch in batches for chunk in batch), tuple(map(len, batches)))


def _static_counts(problem: Problem, priced: CostedChains) -> list[tuple[str, Ints]]:
    """Return one count for all chunks, from no layer to all of a stage's."""
    layers = np.array([[stage.num_layers] for stage in problem.pipeline.stages])
    choices = []
    for part in _UNIFORM_PARTS:
        counts = np.ceil(part * layers).astype(np.int64)
        everywhere = np.repeat(counts, priced.num_chunks, axis=1)
        choices.append((f"{part:.0%} of layers recomputed", everywhere))
    return choices
