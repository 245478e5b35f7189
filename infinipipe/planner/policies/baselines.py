"""Rivals: published schedules, each with the best of its own settings for the step.

Settings are sizes of chunks and one recompute rule for all chunks.

They go through the same prices, memory and simulator as every policy. GPipe, 1F1B and Seq1F1B train
on micro-batches of one fixed shape, which has to hold the longest sequence of all steps
(`Pipeline.context_tokens`). Where a system would cut a short sequence at a fixed size, the cut is
moved to its end, because a chunk holds a part of at most one sequence.

All take an incumbent: what cannot beat it is not simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from infinipipe.aliases import Floats, Ints
from infinipipe.costs import Work
from infinipipe.ir import Chunk
from infinipipe.planner.passes.chunking import Chunks, cut_chunks
from infinipipe.planner.passes.least import (
    least_in_order_s,
    least_of_size_s,
    least_with_levels_s,
)
from infinipipe.planner.passes.order import Window, flushed_order, windowed_order
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
# Parts of a step or of a micro-batch up to which sizes are tried: more cost more planning.
_MOST_PARTS = 1024
# How many times smaller each size is than the one before: finer steps come closer to the best and
# take more simulations.
_STEP = math.sqrt(2)
# Parts of a stage's layers that are tried as the one recompute count of all its chunks; finer ones
# take more simulations.
_RECOMPUTED_PARTS = (0.0, 0.25, 0.5, 0.75, 1.0)


class _Cut(NamedTuple):
    """One way to make chunks."""

    name: str
    least_s: Floats
    """(stages,) what no schedule of them can undercut."""
    make: Callable[[], Chunks]


class _Setting(NamedTuple):
    """An order of chunks, and what may be recomputed, from the least to the most."""

    name: str
    order: Ints
    """(stages, chunks) how many F come before each B."""
    recompute: list[tuple[str, Ints]]
    """Names, and (stages, chunks) counts."""


_Arrange = Callable[[Problem, CostedChains], Iterable[_Setting]]
"""Yields what a policy does with chunks; a setting's name says what is set besides them."""


def plan_gpipe(problem: Problem, incumbent: Result = NOTHING) -> Result:
    """GPipe (Huang et al. 2019): whole sequences packed by tokens; all F, then all B, in as many
    rounds as needed."""
    micro_batches = _packed(problem, _context_tokens(problem))
    return _best(problem, "gpipe", micro_batches, _flushed, incumbent)


def plan_1f1b(problem: Problem, incumbent: Result = NOTHING) -> Result:
    """1F1B as in DAPPLE (Fan et al. 2020): whole sequences packed by tokens, F and B alternate."""
    micro_batches = _packed(problem, _context_tokens(problem))
    return _best(problem, "1f1b", micro_batches, _windowed, incumbent)


def plan_terapipe(problem: Problem, incumbent: Result = NOTHING) -> Result:
    """TeraPipe (Li et al. 2021): slices of equal time, which is what its dynamic program finds; all
    F, then all B."""
    cuts = _cuts(problem, problem.pipeline.costs.work)
    return _best(problem, "terapipe", cuts, _flushed, incumbent)


def plan_seq1f1b(problem: Problem, incumbent: Result = NOTHING) -> Result:
    """Seq1F1B (Ao et al. 2024): packed micro-batches of k slices of equal length, last in first
    out."""
    cuts = _sliced_micro_batches(problem)
    return _best(problem, "seq1f1b", cuts, _windowed, incumbent)


def plan_chunkflow(problem: Problem, incumbent: Result = NOTHING) -> Result:
    """ChunkFlow (Yuan et al. 2025): chunks of one size; only the last K of a sequence keep their
    activations."""
    return _best(problem, "chunkflow", _cuts(problem, TOKENS), _chunkflow, incumbent)


def plan_deepspeed(problem: Problem, incumbent: Result = NOTHING) -> Result:
    """DeepSpeed-Ulysses (Jacobs et al. 2023): one stage, all ranks of which share every sequence,
    and ZeRO: micro-batches of whole sequences packed by tokens, of any size that holds the longest
    one of the step.

    How many ranks share a sequence is the layout's to say, which has one stage (`ONE_STAGE`). Left
    out: ZeRO-2 and ZeRO-3, which would spare gradients and parameters for traffic in every
    micro-batch, and offloading to the host.
    """
    longest = int(problem.lengths.max())
    return _best(problem, "deepspeed", _packed(problem, longest), _windowed, incumbent)


def _best(
    problem: Problem,
    policy: str,
    cuts: Iterable[_Cut],
    arrange: _Arrange,
    incumbent: Result,
) -> Result:
    """Return the best schedule of all settings of all cuts, or the incumbent if none is better."""
    best = incumbent
    seen: set[Chunks] = set()
    for cut in cuts:
        if cannot_beat(best, cut.least_s):
            continue
        chunks = cut.make()
        if chunks in seen:
            continue
        seen.add(chunks)
        chains = price_chains(problem, chunks)
        if cannot_beat(best, chains.least_s):
            continue
        for setting in arrange(problem, chains):
            least_s = least_in_order_s(problem, chains, setting.order)
            if not cannot_beat(best, least_s):
                name = f"{policy}: {cut.name}{setting.name}"
                best = _least_recompute(problem, name, chains, setting, best)
    return best


def _least_recompute(
    problem: Problem, name: str, chains: CostedChains, setting: _Setting, best: Result
) -> Result:
    """Return the schedule of a setting with the least recompute that fits, if it is better."""
    memories = order_memories(problem, chains, setting.order)
    for recomputed, counts in setting.recompute:
        if cannot_beat(best, least_with_levels_s(chains, counts)):
            break
        result = fixed_schedule(problem, chains, memories, counts, best)
        if isinstance(result, Schedule):
            # The first that fits recomputes least.
            result = result.won_by(f"{name}, {recomputed}")
            return result if is_better(result, best) else best
        if is_better(result, best):
            best = result
    return best


def _packed(problem: Problem, least_tokens: int) -> Iterator[_Cut]:
    """Yield packs of whole sequences, none of more tokens than a micro-batch has at least, or than
    its even share has if that is more."""
    most = problem.pipeline.costs.max_chunk_tokens
    if problem.lengths.max() > most:
        return
    for size in _sizes(int(problem.lengths.sum())):
        target = max(size, least_tokens)
        yield _cut(problem, _size_name(size), TOKENS, target, min(most, int(target)))
        if size <= least_tokens:
            # So are all smaller ones.
            break


def _cuts(problem: Problem, work: Work) -> Iterator[_Cut]:
    """Yield slices of equal work, and short sequences packed to as much, for ever smaller sizes in
    tokens."""
    most = problem.pipeline.costs.max_chunk_tokens
    works = work.whole(problem.lengths)
    total = float(works.sum())
    num_tokens = int(problem.lengths.sum())
    for size in _sizes(num_tokens):
        target = size * total / num_tokens
        yield _cut(problem, _size_name(size), work, target, most)


def _sliced_micro_batches(problem: Problem) -> Iterator[_Cut]:
    """Yield micro-batches of the context's tokens, cut into ever more slices."""
    context = _context_tokens(problem)
    most = problem.pipeline.costs.max_chunk_tokens
    for power in range(_num_sizes(context)):
        count = round(_STEP**power)
        name = f"{count} slices of a micro-batch"
        cut = _cut(problem, name, TOKENS, context / count, most)
        yield cut._replace(make=partial(_make_micro_batches, cut, count))


def _make_micro_batches(cut: _Cut, count: int) -> Chunks:
    return _micro_batches(cut.make(), count)


def _cut(problem: Problem, name: str, work: Work, target: float, max_tokens: int) -> _Cut:
    """Return chunks of about so much work (`cut_chunks`) that are made when they are asked for.

    Of the tokens that a chunk may have: what lacks most takes the next sequence, and lacks
    something, so it comes to less than twice the target, a sequence of at least one token aside.
    Where the token limit has a say in that, chunks are no larger than the limit.
    """
    longest = int(problem.lengths.max())
    first_end = round(min(work.reach(0, target), max_tokens))
    # Where the longest sequence is not split, its chunk need not be the first.
    is_split = first_end < longest
    # Ends are rounded up by less than a token.
    most_by_work = 2 * target / work.s_per_token + 2
    least_s = least_of_size_s(
        problem,
        first_tokens=max(1, first_end) if is_split else 1,
        most_tokens=min(max_tokens, most_by_work),
    )
    return _Cut(name, least_s, partial(cut_chunks, problem, work, target, max_tokens))


def _sizes(num_tokens: int) -> Iterator[float]:
    """Yield ever smaller sizes in tokens, from all of them."""
    for power in range(_num_sizes(num_tokens)):
        size = num_tokens / _STEP**power
        yield max(1.0, size)


def _size_name(size: float) -> str:
    return f"chunks of {size:.0f} tokens"


def _num_sizes(num_tokens: int) -> int:
    """Return how many sizes there are from all tokens to one, or to the most parts."""
    most_parts = min(num_tokens, _MOST_PARTS)
    num_steps = math.log(most_parts, _STEP)
    return 1 + math.ceil(num_steps)


def _context_tokens(problem: Problem) -> int:
    """Return the tokens of a micro-batch: no less than any sequence has."""
    longest = int(problem.lengths.max())
    return max(problem.pipeline.context_tokens, longest)


def _windowed(problem: Problem, chains: CostedChains) -> Iterator[_Setting]:
    """1F1B, with as many chunks in flight as the longest chain has."""
    num_stages = problem.pipeline.num_stages
    order = windowed_order(chains.chunks, num_stages, "uniform", depth=num_stages)
    yield _Setting("", order, _static_counts(problem, chains))


def _flushed(problem: Problem, chains: CostedChains) -> Iterator[_Setting]:
    """All F before all B, in rounds of equally many chunks."""
    num_stages = problem.pipeline.num_stages
    counts = _static_counts(problem, chains)
    rounds = 1
    most_rounds = len(chains.chunks.chains)
    while rounds <= most_rounds:
        order = flushed_order(chains.chunks, num_stages, rounds)
        yield _Setting(f", {rounds} rounds", order, counts)
        rounds *= 2


def _chunkflow(problem: Problem, chains: CostedChains) -> Iterator[_Setting]:
    """All layers recomputed but in the last K chunks of each chain."""
    num_stages = problem.pipeline.num_stages
    recompute = _chunkflow_counts(problem, chains.chunks)
    for window in _WINDOWS:
        order = windowed_order(chains.chunks, num_stages, window, depth=num_stages)
        yield _Setting(f", {window} window", order, recompute)


def _chunkflow_counts(problem: Problem, chunks: Chunks) -> list[tuple[str, Ints]]:
    """Return what is recomputed for each K, from the largest K to none."""
    layers = _stage_layers(problem)
    sizes = np.array(chunks.chains)
    num_chunks = len(chunks.chunks)
    # How many chunks of its chain come from each chunk on.
    from_here = chunks.chain_ends - np.arange(num_chunks)
    recompute = []
    for kept in _kept_counts(int(sizes.max())):
        is_dropped = from_here > kept
        counts = layers * is_dropped
        recompute.append((f"K = {kept}", counts))
    everything = np.repeat(layers, num_chunks, axis=1)
    recompute.append(("K = 0", everything))
    return recompute


def _stage_layers(problem: Problem) -> Ints:
    """Return the layers of each stage; shape (stages, 1)."""
    layers = [stage.num_layers for stage in problem.pipeline.stages]
    return np.array(layers)[:, None]


def _kept_counts(longest: int) -> list[int]:
    """Return the K that are tried for chains of at most so many chunks, the largest first."""
    counts = {longest}
    power = 1
    while power < longest:
        counts.add(power)
        power *= 2
    return sorted(counts, reverse=True)


def _micro_batches(chunks: Chunks, count: int) -> Chunks:
    """Fill micro-batches of `count` chunks, or as many as the longest chain has, and call each of
    them a chain."""
    most = max(count, *chunks.chains)
    batches: list[list[Chunk]] = []
    first = 0
    for size in chunks.chains:
        chain = chunks.chunks[first : first + size]
        first += size
        with_room = (batch for batch in batches if len(batch) + size <= most)
        batch = next(with_room, None)
        if batch is None:
            batch = []
            batches.append(batch)
        batch += chain
    return Chunks.of_chains(batches)


def _static_counts(problem: Problem, chains: CostedChains) -> list[tuple[str, Ints]]:
    """Return one count for all chunks, from no layer to all of a stage's."""
    layers = _stage_layers(problem)
    choices = []
    for part in _RECOMPUTED_PARTS:
        counts = np.ceil(part * layers)
        counts = counts.astype(np.int64)
        everywhere = np.repeat(counts, chains.num_chunks, axis=1)
        choices.append((f"{part:.0%} of layers recomputed", everywhere))
    return choices
