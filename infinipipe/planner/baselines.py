"""Rivals, each with the best of its own static settings for the step: sizes of chunks and one recompute rule.

They go through the same prices, memory and simulator as every policy. Where a system would cut a short sequence
at a fixed size, the cut is moved to its end, because a chunk holds a part of at most one sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from infinipipe.ir import Chunk
from infinipipe.planner.checkpointing import Shortage
from infinipipe.planner.chunking import Chunks, cut_chunks
from infinipipe.planner.order import Window, flush_leads, stage_leads
from infinipipe.planner.problem import Ints, Problem, Work, average_work
from infinipipe.planner.schedule import Priced, Schedule, fixed_schedule, is_better, order_memories, price
from infinipipe.planner.sizes import most_chunk_tokens

TOKENS = Work(s_per_token=1.0, s_per_pair=0.0, s_per_slice=0.0)
"""Work as systems count it that balance tokens."""

_RECOMPUTED = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Parts of a stage's layers that are tried as the one static recompute count."""
_WINDOWS: tuple[Window, ...] = ("adaptive", "uniform")
_MOST_PARTS = 1024
_STEP = math.sqrt(2)

Setting = tuple[Priced, Ints, list[Ints]]
"""Chunks, leads, and recompute counts from the least recompute to the most."""


def plan_gpipe(problem: Problem) -> Schedule | Shortage:
    """GPipe (Huang et al. 2019): whole sequences packed by tokens; all F, then all B, in as many rounds as needed."""
    return _best(problem, _flushed(problem, _packed(problem)))


def plan_1f1b(problem: Problem) -> Schedule | Shortage:
    """1F1B as in DAPPLE (Fan et al. 2020): whole sequences packed by tokens, F and B alternate."""
    return _best(problem, _windowed(problem, _packed(problem), ("uniform",)))


def plan_terapipe(problem: Problem) -> Schedule | Shortage:
    """TeraPipe (Li et al. 2021): slices of equal time, which is what its dynamic program finds; all F, then all B."""
    work = average_work(problem.pipeline.profile, problem.pipeline.num_stages)
    return _best(problem, _flushed(problem, _cuts(problem, work)))


def plan_seq1f1b(problem: Problem) -> Schedule | Shortage:
    """Seq1F1B (Ao et al. 2024): packed micro-batches of k slices of equal length, last in first out."""
    cuts = (price(problem, _micro_batches(priced.chunks)) for priced in _cuts(problem, TOKENS))
    return _best(problem, _windowed(problem, cuts, ("uniform",)))


def plan_chunkflow(problem: Problem) -> Schedule | Shortage:
    """ChunkFlow (Yuan et al. 2025): chunks of one size; only the last K of a sequence keep their activations."""
    return _best(problem, _chunkflow(problem))


def _best(problem: Problem, settings: Iterable[Setting]) -> Schedule | Shortage:
    best: Schedule | Shortage = Shortage(0, math.inf)
    for priced, leads, choices in settings:
        if isinstance(best, Schedule) and float(priced.work_s.max()) >= best.makespan_s:
            continue
        memories = order_memories(problem, priced, leads)
        for recompute in choices:
            found = fixed_schedule(problem, priced, memories, recompute)
            best = found if is_better(found, best) else best
            if isinstance(found, Schedule):
                break
    return best


def _packed(problem: Problem) -> Iterator[Priced]:
    """Yield packs of whole sequences, none with more tokens than the longest sequence or its even share."""
    longest = int(problem.lengths.max())
    return _distinct(problem, lambda size: cut_chunks(problem, TOKENS, max(size, longest), max(int(size), longest)))


def _cuts(problem: Problem, work: Work) -> Iterator[Priced]:
    most = most_chunk_tokens(problem.pipeline)
    total, tokens = float(work.whole(problem.lengths).sum()), int(problem.lengths.sum())
    return _distinct(problem, lambda size: cut_chunks(problem, work, size * total / tokens, most))


def _distinct(problem: Problem, cut: Callable[[float], Chunks]) -> Iterator[Priced]:
    """Yield priced chunks for ever smaller sizes in tokens, each once."""
    tokens = int(problem.lengths.sum())
    seen: set[Chunks] = set()
    for power in range(1 + math.ceil(math.log(min(tokens, _MOST_PARTS), _STEP))):
        chunks = cut(max(1.0, tokens / _STEP**power))
        if chunks not in seen:
            seen.add(chunks)
            yield price(problem, chunks)


def _windowed(problem: Problem, cuts: Iterable[Priced], windows: tuple[Window, ...]) -> Iterator[Setting]:
    num_stages = problem.pipeline.num_stages
    for priced in cuts:
        for window in windows:
            leads = stage_leads(priced.chunks, num_stages, window, num_stages)
            yield priced, leads, _static_counts(problem, priced)


def _flushed(problem: Problem, cuts: Iterable[Priced]) -> Iterator[Setting]:
    """All F before all B, in rounds of equally many chunks."""
    for priced in cuts:
        rounds = 1
        while rounds <= len(priced.chunks.chains):
            leads = flush_leads(priced.chunks, problem.pipeline.num_stages, rounds)
            yield priced, leads, _static_counts(problem, priced)
            rounds *= 2


def _chunkflow(problem: Problem) -> Iterator[Setting]:
    num_stages = problem.pipeline.num_stages
    layers = np.array([[stage.num_layers] for stage in problem.pipeline.stages])
    for priced in _cuts(problem, TOKENS):
        sizes = np.repeat(priced.chunks.chains, priced.chunks.chains)
        behind = np.array(priced.chunks.chain_ends) - np.arange(len(sizes))
        longest = int(sizes.max())
        kept_counts = sorted({*(1 << power for power in range(longest.bit_length())), longest}, reverse=True)
        choices = [layers * (behind > kept)[None, :] for kept in kept_counts]
        choices.append(np.repeat(layers, len(sizes), axis=1))
        for window in _WINDOWS:
            yield priced, stage_leads(priced.chunks, num_stages, window, num_stages), choices


def _micro_batches(chunks: Chunks) -> Chunks:
    """Fill micro-batches of as many chunks as the longest chain has, and call each of them a chain."""
    most = max(chunks.chains)
    ends = np.cumsum(chunks.chains).tolist()
    batches: list[list[Chunk]] = []
    for end, size in zip(ends, chunks.chains, strict=True):
        place = next((batch for batch in batches if len(batch) + size <= most), None)
        if place is None:
            place = []
            batches.append(place)
        place += chunks.chunks[end - size : end]
    return Chunks(tuple(chunk for batch in batches for chunk in batch), tuple(map(len, batches)))


def _static_counts(problem: Problem, priced: Priced) -> list[Ints]:
    """Return one count for all chunks, from no layer to all of a stage's."""
    layers = np.array([[stage.num_layers] for stage in problem.pipeline.stages])
    counts = [np.ceil(part * layers).astype(np.int64) for part in _RECOMPUTED]
    return [np.repeat(count, len(priced.chunks.chunks), axis=1) for count in counts]
