"""The policy `paper`: InfiniPipe's own algorithm (arXiv 2509.21275), with its misprints mended.

For every slice number K, Algorithm 1 makes chunks, a dynamic program groups them into 1F1B
pipelines that run one after the other, and an integer program chooses the recomputed layers, tied
along diagonals. The K with the best simulated makespan is kept. Mended or filled in:

* dKV is charged to split sequences (the text prints the complement), and the bytes are the cost
  model's own.
* The token limit of a chunk, which the text leaves open, is that of the mesh's longest slice.
* While K and the groups are searched, a sweep that raises whole diagonals stands in for the integer
  program. SCIP then solves it for the best K (gap 2 %), starting from the sweep's solution; where
  an op needs more while it runs than the program knows, the sweep goes on from SCIP's.
* Groups end at eight numbers of chunks at most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from infinipipe.aliases import Ints
from infinipipe.costs import StageMemory, Work
from infinipipe.ir import Chunk, Search, Slice
from infinipipe.planner.passes.chunking import Chunks, join_chunks
from infinipipe.planner.passes.order import join_orders, windowed_order
from infinipipe.planner.passes.packing import Bin
from infinipipe.planner.passes.recompute import Shortage
from infinipipe.planner.passes.schedule import (
    NOTHING,
    Result,
    Schedule,
    cannot_beat,
    fixed_schedule,
    is_better,
    makespan_of,
    order_memories,
    price_chains,
    simulate_schedule,
)
from infinipipe.planner.policies.tied_recompute import (
    TiedSolution,
    diagonal_counts,
    solve_diagonals,
    sweep_diagonals,
)
from infinipipe.planner.problem import Problem

# K that are tried. Closer ones come nearer to the best and take longer to plan.
_SLICE_NUMBERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
# Where groups may end, at most: the dynamic program takes the square of it. The paper finds at most
# two groups typical.
_MOST_GROUP_ENDS = 8

Chain = tuple[Chunk, ...]


@dataclass(frozen=True)
class _Group:
    """Chains that share one 1F1B pipeline."""

    chunks: Chunks
    memories: tuple[StageMemory, ...]
    diagonals: Ints
    """c of the tied recompute."""
    recompute_s: float
    """What recompute adds to the pipeline."""


def plan_paper(problem: Problem, incumbent: Result = NOTHING) -> Result:
    """Return the paper's schedule for the best slice number, or the incumbent if that is better."""
    own: Result = NOTHING
    own_groups: list[_Group] = []
    for number in _SLICE_NUMBERS:
        if number > problem.lengths.max():
            break
        chains = make_chains(problem, problem.pipeline.costs.work, number)
        priced = price_chains(problem, _join(chains))
        if cannot_beat(incumbent, priced) or cannot_beat(own, priced):
            continue
        result, groups = _plan_chains(problem, chains)
        if isinstance(result, Schedule):
            winner = f"paper: K = {number}, {len(groups)} groups"
            result = result.won_by(winner)
        if is_better(result, own):
            own = result
            own_groups = groups
    if isinstance(own, Schedule) and _can_gain(own, incumbent):
        own = _solve(problem, own, own_groups)
    return own if is_better(own, incumbent) else incumbent


def _plan_chains(problem: Problem, chains: list[Chain]) -> tuple[Result, list[_Group]]:
    """Group chains and schedule the groups.

    If they do not fit together, leave room for what the next one receives.
    """
    pipeline = problem.pipeline
    chunks = _join(chains).chunks
    most_tokens = max(chunk.num_tokens for chunk in chunks)
    coming = pipeline.costs.boundary_bytes(most_tokens)
    limits = [limit - coming for limit in pipeline.limits]
    tighter = replace(pipeline, limits=tuple(limits))
    result: Result = NOTHING
    groups: list[_Group] = []
    for within in (pipeline, tighter):
        grouped = _group(replace(problem, pipeline=within), chains)
        if isinstance(grouped, Shortage):
            return grouped, []
        groups = grouped
        result = _schedule(problem, groups)
        if isinstance(result, Schedule):
            break
    return result, groups


def _can_gain(schedule: Schedule, incumbent: Result) -> bool:
    """Return whether other recompute counts could make a schedule faster than the incumbent."""
    if not schedule.levels.any():
        return False
    # No counts can undercut this order without any.
    none = np.zeros_like(schedule.levels)
    simulated = simulate_schedule(schedule.problem, schedule.chains, schedule.memories, none)
    return simulated.makespan_s < makespan_of(incumbent)


def make_chains(problem: Problem, work: Work, number: int) -> list[Chain]:
    """Algorithm 1, "workload-balanced sequence chunking": return chains, longest first."""
    members = problem.longest_first()
    longest = problem.sequences[members[0]].length
    most = problem.pipeline.costs.max_chunk_tokens
    mesh = _mesh(work, longest, number, most)
    # Steps 1 and 2: long sequences are cut at the mesh; a tail begins a bucket.
    heads: list[list[Slice]] = []
    buckets: list[Bin] = []
    shorts: list[Slice] = []
    for member in members:
        length = problem.sequences[member].length
        if length <= mesh[1]:
            shorts.append(Slice(member, 0, length))
            continue
        bounds = [bound for bound in mesh if bound < length]
        slices = _slices(member, [*bounds, length])
        tail = slices.pop()
        heads.append(slices)
        tail_work = work.between(tail.start, tail.stop)
        buckets.append(Bin(tail_work, tail.length, [tail]))
    most_work = work.between(0, mesh[1])
    most_tokens = max(stop - start for start, stop in pairwise(mesh))
    _fill_buckets(work, shorts, buckets, most_work, most_tokens)

    chains: list[Chain] = []
    # Buckets that only short sequences opened come last, and have no heads.
    num_opened = len(buckets) - len(heads)
    heads += [[] for _ in range(num_opened)]
    for slices, bucket in zip(heads, buckets, strict=True):
        chunks = [Chunk((head,)) for head in slices]
        chains.append((*chunks, bucket.chunk))
    return sorted(chains, key=len, reverse=True)


def _slices(sequence: int, bounds: SequenceOf[int]) -> list[Slice]:
    slices: list[Slice] = []
    for start, stop in pairwise(bounds):
        length = stop - start
        slices.append(Slice(sequence, start, length))
    return slices


def _mesh(work: Work, longest: int, number: int, most_tokens: int) -> list[int]:
    """Return boundaries of equal work: b_i solves a1 b^2 + a2 b = (i / K) (a1 n^2 + a2 n)."""
    least_number = -(-longest // most_tokens)
    number = max(number, least_number)
    bare = replace(work, s_per_slice=0.0)
    total = bare.between(0, longest)
    bounds = {0, longest}
    for i in range(1, number):
        reach = bare.reach(0, total * i / number)
        bounds.add(round(reach))
    mesh = sorted(bounds)
    # The first slice has the most tokens, because it has the least attention.
    if mesh[1] > most_tokens:
        return _mesh(work, longest, number + 1, most_tokens)
    return mesh


def _fill_buckets(
    work: Work, shorts: SequenceOf[Slice], buckets: list[Bin], most_work: float, most_tokens: int
) -> None:
    """Steps 3 to 5 of Algorithm 1, in place."""
    for short in shorts:
        seconds = work.between(0, short.length)
        fitting = [bucket for bucket in buckets if bucket.has_room(short, most_tokens)]
        if not fitting:
            # Not even the emptiest has room for its tokens.
            opened = Bin()
            buckets.append(opened)
            fitting = [opened]
        within = [bucket for bucket in fitting if bucket.work + seconds <= most_work]
        if within:
            # The first by time per token.
            chosen = min(within, key=_work_per_token)
        else:
            # The limit of work gives way for the least.
            chosen = min(fitting, key=lambda bucket: bucket.work)
            most_work = max(most_work, chosen.work + seconds)
        chosen.add(short, seconds)


def _work_per_token(bucket: Bin) -> float:
    return bucket.work / bucket.tokens if bucket.tokens else 0.0


def _group(problem: Problem, chains: list[Chain]) -> list[_Group] | Shortage:
    """Group chains by their number of chunks.

    dp[i + 1] = min over k of dp[k] + delta + T_ckpt(k + 1 .. i + 1 chunks), where delta is what one
    more pipeline takes to fill and drain.
    """
    whole = _make_group(problem, chains)
    if isinstance(whole, _Group) and whole.recompute_s == 0:
        return [whole]
    delta = _fill_and_drain_s(problem, chains)
    if isinstance(whole, _Group) and whole.recompute_s <= delta:
        # One more pipeline takes longer to fill and drain than all the recompute it could spare.
        return [whole]
    ends = _group_ends(chains)
    last_chains = _between(chains, ends[-2], ends[-1])
    longest = _make_group(problem, last_chains)
    if isinstance(longest, Shortage):
        # With others they need no less.
        return longest

    # The seconds and the groups of the chains of up to each end.
    best: list[tuple[float, list[_Group]]] = [(0.0, [])]
    shortage = whole if isinstance(whole, Shortage) else NOTHING
    for last in range(1, len(ends)):
        best.append((math.inf, []))
        for first in range(last):
            before_s, before = best[first]
            best_s, _ = best[last]
            if before_s + delta >= best_s:
                continue
            members = _between(chains, ends[first], ends[last])
            is_whole = len(members) == len(chains)
            group = whole if is_whole else _make_group(problem, members)
            if isinstance(group, Shortage):
                shortage = group if is_better(group, shortage) else shortage
                continue
            seconds = before_s + delta + group.recompute_s
            if seconds < best_s:
                best[last] = (seconds, [group, *before])
    _, groups = best[-1]
    return groups or shortage


def _fill_and_drain_s(problem: Problem, chains: list[Chain]) -> float:
    """Return the paper's delta: (stages - 1) times the mean seconds of a chunk."""
    costs = price_chains(problem, _join(chains)).costs
    seconds = costs.forward_s + costs.backward_s
    mean_s = float(seconds.mean())
    return (problem.pipeline.num_stages - 1) * mean_s


def _between(chains: list[Chain], more_than: int, most: int) -> list[Chain]:
    """Return the chains of so many chunks."""
    return [chain for chain in chains if more_than < len(chain) <= most]


def _group_ends(chains: list[Chain]) -> list[int]:
    """Return numbers of chunks after which a group may end, from 0."""
    sizes = sorted({len(chain) for chain in chains})
    num_sizes = len(sizes)
    count = min(num_sizes, _MOST_GROUP_ENDS)
    ends = [0]
    for i in range(1, count + 1):
        place = i * num_sizes // count
        ends.append(sizes[place - 1])
    return ends


def _make_group(problem: Problem, chains: list[Chain]) -> _Group | Shortage:
    priced = price_chains(problem, _join(chains))
    order = _one_pipeline(problem, priced.chunks)
    memories = order_memories(problem, priced, order)
    diagonals = sweep_diagonals(memories, problem.pipeline.limits)
    if isinstance(diagonals, Shortage):
        return diagonals
    # The others wait for the stage that recomputes most of a chunk.
    most_layers = diagonal_counts(memories, diagonals).max(axis=0)
    seconds = most_layers * priced.costs.recompute_s
    return _Group(priced.chunks, memories, diagonals, float(seconds.sum()))


def _one_pipeline(problem: Problem, chunks: Chunks) -> Ints:
    """Return the order of one 1F1B pipeline with N_split warm-up."""
    num_stages = problem.pipeline.num_stages
    return windowed_order(chunks, num_stages, "uniform", depth=num_stages)


def _solve(problem: Problem, swept: Schedule, groups: SequenceOf[_Group]) -> Schedule:
    """Solve the integer program of every group.

    The sweep's counts are kept where its solution is not faster.
    """
    limits = problem.pipeline.limits
    solutions: list[TiedSolution] = []
    fitting: list[_Group] = []
    for group in groups:
        solution = solve_diagonals(group.memories, limits, group.diagonals)
        solutions.append(solution)
        # The program knows nothing of what an op needs while it runs: where that is too much,
        # counts rise a little more.
        counts = sweep_diagonals(group.memories, limits, solution.counts)
        if not isinstance(counts, Shortage):
            group = replace(group, diagonals=counts)
        fitting.append(group)
    result = _schedule(problem, fitting)
    best = swept
    note = "; the sweep's counts are as good"
    if isinstance(result, Schedule) and is_better(result, swept):
        best = result
        note = ""
    # Each status once, in order.
    statuses = dict.fromkeys(solution.status for solution in solutions)
    gaps = [solution.gap for solution in solutions if solution.gap is not None]
    all_have_gaps = len(gaps) == len(solutions)
    search = Search(
        winner=swept.search.winner,
        solver="SCIP",
        status=", ".join(statuses) + note,
        gap=max(gaps) if all_have_gaps else None,
    )
    return replace(best, search=search)


def _schedule(problem: Problem, groups: SequenceOf[_Group]) -> Result:
    """Run the groups' pipelines one after the other, that of the longest chains first."""
    parts = [group.chunks for group in groups]
    chains = price_chains(problem, join_chunks(parts))
    order = join_orders([_one_pipeline(problem, part) for part in parts])
    memories = order_memories(problem, chains, order)
    counts = [diagonal_counts(group.memories, group.diagonals) for group in groups]
    return fixed_schedule(problem, chains, memories, np.concatenate(counts, axis=1))


def _join(chains: SequenceOf[Chain]) -> Chunks:
    return Chunks.of_chains(chains)
