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
    diagonal_counts,
    solve_diagonals,
    sweep_diagonals,
)
from infinipipe.planner.problem import Problem

# K that are tried. Closer ones come nearer to the best, and each takes a dynamic program and
# simulations.
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
            result = result.won_by(f"paper: K = {number}, {len(groups)} groups")
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
    most_tokens = max(chunk.num_tokens for chain in chains for chunk in chain)
    coming = pipeline.costs.boundary_bytes(most_tokens)
    tighter = replace(pipeline, limits=tuple(limit - coming for limit in pipeline.limits))
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
    if not schedule.recompute.any():
        return False
    # No counts can undercut this order without any.
    none = np.zeros_like(schedule.recompute)
    simulated = simulate_schedule(schedule.problem, schedule.chains, schedule.memories, none)
    return simulated.makespan_s < makespan_of(incumbent)


def make_chains(problem: Problem, work: Work, number: int) -> list[Chain]:
    """Algorithm 1, "workload-balanced sequence chunking": return chains, longest first."""
    members = problem.longest_first()
    lengths = {member: problem.sequences[member].length for member in members}
    longest = lengths[members[0]]
    mesh = _mesh(work, longest, number, problem.pipeline.costs.max_chunk_tokens)
    # Steps 1 and 2: long sequences are cut at the mesh; a tail begins a bucket.
    heads: list[list[Slice]] = []
    buckets: list[Bin] = []
    shorts: list[Slice] = []
    for member in members:
        length = lengths[member]
        if length <= mesh[1]:
            shorts.append(Slice(member, 0, length))
            continue
        bounds = [*(bound for bound in mesh if bound < length), length]
        slices = [Slice(member, start, stop - start) for start, stop in pairwise(bounds)]
        tail = slices.pop()
        heads.append(slices)
        buckets.append(Bin(work.between(tail.start, tail.stop), tail.length, [tail]))
    most_tokens = max(stop - start for start, stop in pairwise(mesh))
    _fill_buckets(work, shorts, buckets, work.between(0, mesh[1]), most_tokens)

    chains: list[Chain] = []
    for index, bucket in enumerate(buckets):
        slices = heads[index] if index < len(heads) else []
        chains.append((*(Chunk((head,)) for head in slices), bucket.chunk))
    return sorted(chains, key=len, reverse=True)


def _mesh(work: Work, longest: int, number: int, most_tokens: int) -> list[int]:
    """Return boundaries of equal work: b_i solves a1 b^2 + a2 b = (i / K) (a1 n^2 + a2 n)."""
    number = max(number, -(-longest // most_tokens))
    bare = replace(work, s_per_slice=0.0)
    total = bare.between(0, longest)
    inner = [round(bare.reach(0, total * i / number)) for i in range(1, number)]
    mesh = sorted({0, longest, *inner})
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
            buckets.append(Bin())
            fitting = [buckets[-1]]
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
    costs = price_chains(problem, _join(chains)).costs
    mean_s = float((costs.forward_s + costs.backward_s).mean())
    delta = (problem.pipeline.num_stages - 1) * mean_s
    if isinstance(whole, _Group) and whole.recompute_s <= delta:
        return [whole]
    ends = _group_ends(chains)
    longest = _make_group(problem, [chain for chain in chains if len(chain) > ends[-2]])
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
            if before_s + delta >= best[last][0]:
                continue
            members = [chain for chain in chains if ends[first] < len(chain) <= ends[last]]
            is_whole = len(members) == len(chains)
            group = whole if is_whole else _make_group(problem, members)
            if isinstance(group, Shortage):
                shortage = group if is_better(group, shortage) else shortage
                continue
            seconds = before_s + delta + group.recompute_s
            if seconds < best[last][0]:
                best[last] = (seconds, [group, *before])
    return best[-1][1] or shortage


def _group_ends(chains: list[Chain]) -> list[int]:
    """Return numbers of chunks after which a group may end, from 0."""
    sizes = sorted({len(chain) for chain in chains})
    count = min(len(sizes), _MOST_GROUP_ENDS)
    ends = [sizes[(i + 1) * len(sizes) // count - 1] for i in range(count)]
    return [0, *ends]


def _make_group(problem: Problem, chains: list[Chain]) -> _Group | Shortage:
    priced = price_chains(problem, _join(chains))
    order = _one_pipeline(problem, priced.chunks)
    memories = order_memories(problem, priced, order)
    diagonals = sweep_diagonals(memories, problem.pipeline.limits)
    if isinstance(diagonals, Shortage):
        return diagonals
    slowest_stage = diagonal_counts(memories, diagonals).max(axis=0)
    recompute_s = float((slowest_stage * priced.costs.recompute_s).sum())
    return _Group(priced.chunks, memories, diagonals, recompute_s)


def _one_pipeline(problem: Problem, chunks: Chunks) -> Ints:
    """Return the order of one 1F1B pipeline with N_split warm-up."""
    num_stages = problem.pipeline.num_stages
    return windowed_order(chunks, num_stages, "uniform", depth=num_stages)


def _solve(problem: Problem, swept: Schedule, groups: SequenceOf[_Group]) -> Schedule:
    """Solve the integer program of every group.

    The sweep's counts are kept where its solution is not faster.
    """
    limits = problem.pipeline.limits
    solutions = [solve_diagonals(group.memories, limits, group.diagonals) for group in groups]
    fitting = []
    for group, solution in zip(groups, solutions, strict=True):
        # The program knows nothing of what an op needs while it runs: where that is too much,
        # counts rise a little more.
        counts = sweep_diagonals(group.memories, limits, solution.counts)
        if not isinstance(counts, Shortage):
            group = replace(group, diagonals=counts)
        fitting.append(group)
    result = _schedule(problem, fitting)
    faster = isinstance(result, Schedule) and is_better(result, swept)
    statuses = list(dict.fromkeys(solution.status for solution in solutions))
    gaps = [solution.gap for solution in solutions if solution.gap is not None]
    search = Search(
        winner=swept.search.winner,
        solver="SCIP",
        status=", ".join(statuses) + ("" if faster else "; the sweep's counts are as good"),
        gap=max(gaps) if len(gaps) == len(solutions) else None,
    )
    best = result if isinstance(result, Schedule) and faster else swept
    return replace(best, search=search)


def _schedule(problem: Problem, groups: SequenceOf[_Group]) -> Result:
    """Run the groups' pipelines one after the other, that of the longest chains first."""
    chains = price_chains(problem, join_chunks(group.chunks for group in groups))
    order = join_orders([_one_pipeline(problem, group.chunks) for group in groups])
    memories = order_memories(problem, chains, order)
    counts = [diagonal_counts(group.memories, group.diagonals) for group in groups]
    return fixed_schedule(problem, chains, memories, np.concatenate(counts, axis=1))


def _join(chains: SequenceOf[Chain]) -> Chunks:
    return Chunks.of_chains(chains)
