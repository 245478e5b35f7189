"""The policy `paper`: InfiniPipe's own algorithm (arXiv 2509.21275), with its misprints mended.

For every slice number K, Algorithm 1 makes chunks, a dynamic program groups them into 1F1B pipelines that run
one after the other, and an integer program chooses the recomputed layers, tied along diagonals. The K with the
best simulated makespan is kept. Mended or filled in:

* dKV is charged to split sequences (the text prints the complement), and the bytes are the cost model's own.
* The token limit of a chunk, which the text leaves open, is that of the mesh's longest slice.
* While K and the groups are searched, a sweep that raises whole diagonals stands in for the integer program.
  SCIP then solves it for the best K (gap 2 %), starting from the sweep's solution; where an op needs more for a
  moment than the program knows, the sweep goes on from SCIP's.
* Groups end at eight numbers of chunks at most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from infinipipe.aliases import Ints
from infinipipe.costs.sizes import most_chunk_tokens
from infinipipe.ir import Chunk, Search, Slice
from infinipipe.planner.passes.chunking import Chunks, join_chunks
from infinipipe.planner.passes.order import join_leads, stage_leads
from infinipipe.planner.passes.packing import Bin
from infinipipe.planner.passes.recompute import Shortage, StageMemory
from infinipipe.planner.passes.schedule import (
    NOTHING,
    Schedule,
    fixed_schedule,
    is_better,
    least_seconds,
    order_memories,
    price,
    simulate_schedule,
)
from infinipipe.planner.policies.tied_recompute import (
    diagonal_counts,
    solve_diagonals,
    sweep_diagonals,
)
from infinipipe.planner.problem import Problem, Work, average_work

_SLICE_NUMBERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)

_MOST_CUTS = 8
"""Where groups may end, at most; the paper finds that two groups are typical."""

Chain = tuple[Chunk, ...]


@dataclass(frozen=True)
class _Group:
    """Chains that share one 1F1B pipeline."""

    chunks: Chunks
    memories: tuple[StageMemory, ...]
    diagonals: Ints
    recompute_s: float
    """What recompute adds to the pipeline."""


def plan_paper(
    problem: Problem, best: Schedule | Shortage = NOTHING, *, grouping: bool = True
) -> Schedule | Shortage:
    """Return the paper's schedule for the best slice number, or the best known already if that is better.

    Without `grouping` there is one pipeline for all chains, which shows what it is worth.
    """
    known = best.makespan_s if isinstance(best, Schedule) else math.inf
    work = average_work(problem.pipeline.profile, problem.pipeline.num_stages)
    own: Schedule | Shortage = NOTHING
    own_groups: list[_Group] = []
    for number in _SLICE_NUMBERS:
        if number > problem.lengths.max():
            break
        chains = make_chains(problem, work, number)
        if least_seconds(price(problem, _join(chains))) >= min(known, _makespan_s(own)):
            continue
        found, groups = _plan_chains(problem, chains, grouping)
        if is_better(found, own):
            own_groups = groups
            own = (
                found.won_by(f"paper: K = {number}, {len(groups)} groups")
                if isinstance(found, Schedule)
                else found
            )
    if isinstance(own, Schedule) and own.recompute.any() and _least_makespan_s(own) < known:
        own = _polish(problem, own, own_groups)
    return own if is_better(own, best) else best


def _plan_chains(
    problem: Problem, chains: list[Chain], grouping: bool
) -> tuple[Schedule | Shortage, list[_Group]]:
    """Group chains and schedule the groups; if they do not fit together, leave room for what the next one receives."""
    pipeline, most = problem.pipeline, max(chunk.num_tokens for chain in chains for chunk in chain)
    coming = math.ceil(most * pipeline.profile.bytes.activation_per_token)
    tighter = replace(pipeline, limits=tuple(limit - coming for limit in pipeline.limits))
    found: Schedule | Shortage = NOTHING
    for limits in (pipeline, tighter):
        within = replace(problem, pipeline=limits)
        groups = _group(within, chains) if grouping else _one_group(within, chains)
        found = groups if isinstance(groups, Shortage) else _schedule(problem, groups)
        if isinstance(groups, Shortage) or isinstance(found, Schedule):
            break
    return found, [] if isinstance(groups, Shortage) else groups


def _makespan_s(found: Schedule | Shortage) -> float:
    return found.makespan_s if isinstance(found, Schedule) else math.inf


def _least_makespan_s(schedule: Schedule) -> float:
    """Return what no recompute counts can undercut in this order."""
    none = np.zeros_like(schedule.recompute)
    return simulate_schedule(schedule.problem, schedule.priced, schedule.memories, none).makespan_s


def make_chains(problem: Problem, work: Work, number: int) -> list[Chain]:
    """Algorithm 1, "workload-balanced sequence chunking": return chains, longest first."""
    sizes = {member: problem.sequences[member].length for member in problem.members}
    members = sorted(sizes, key=lambda member: (-sizes[member], member))
    mesh = _mesh(work, sizes[members[0]], number, most_chunk_tokens(problem.pipeline))
    heads: list[list[Slice]] = []
    buckets: list[Bin] = []
    shorts: list[int] = []
    for member in members:
        if sizes[member] <= mesh[1]:
            shorts.append(member)
            continue
        bounds = [*(bound for bound in mesh if bound < sizes[member]), sizes[member]]
        pieces = [Slice(member, a, b - a) for a, b in pairwise(bounds)]
        heads.append(pieces[:-1])
        tail = pieces[-1]
        buckets.append(Bin(work.between(tail.start, tail.stop), tail.length, [tail]))
    limits = (work.between(0, mesh[1]), max(b - a for a, b in pairwise(mesh)))
    _fill_buckets(work, [Slice(member, 0, sizes[member]) for member in shorts], buckets, *limits)
    chains = [
        (*(Chunk((piece,)) for piece in head), final.chunk)
        for head, final in zip(heads, buckets, strict=False)
    ]
    chains += [(final.chunk,) for final in buckets[len(heads) :]]
    return sorted(chains, key=len, reverse=True)


def _mesh(work: Work, longest: int, number: int, most: int) -> list[int]:
    """Return boundaries of equal work: b_i solves a1 b^2 + a2 b = (i / K) (a1 n^2 + a2 n)."""
    number = max(number, -(-longest // most))
    bare = Work(work.s_per_token, work.s_per_pair, 0.0)
    total = bare.between(0, longest)
    mesh = sorted(
        {0, longest, *(round(bare.reach(0, total * i / number)) for i in range(1, number))}
    )
    # The first slice has the most tokens, because it has the least attention.
    return mesh if mesh[1] <= most else _mesh(work, longest, number + 1, most)


def _fill_buckets(
    work: Work, shorts: SequenceOf[Slice], buckets: list[Bin], most_work: float, most_tokens: int
) -> None:
    """Steps 3 to 5 of Algorithm 1, in place."""
    for piece in shorts:
        seconds = work.between(0, piece.length)
        fitting = [each for each in buckets if each.tokens + piece.length <= most_tokens]
        if not fitting:
            # Not even the emptiest has room for its tokens.
            fitting = [Bin(0.0, 0)]
            buckets.append(fitting[0])
        # The first by time per token that keeps to the time limit; if none does, the limit gives way for the least.
        within = [each for each in fitting if each.work + seconds <= most_work]
        if within:
            min(within, key=lambda each: each.work / each.tokens if each.tokens else 0.0).add(
                piece, seconds
            )
        else:
            least = min(fitting, key=lambda each: each.work)
            most_work = max(most_work, least.work + seconds)
            least.add(piece, seconds)


def _group(problem: Problem, chains: list[Chain]) -> list[_Group] | Shortage:
    """Group chains by their number of chunks: dp[i+1] = min over k of dp[k] + delta + T_ckpt(k+1 .. i+1 chunks)."""
    whole = _make_group(problem, chains)
    if isinstance(whole, _Group) and whole.recompute_s == 0:
        return [whole]
    priced = price(problem, _join(chains))
    mean_s = float((priced.costs.forward_s + priced.costs.backward_s).mean())
    delta = (problem.pipeline.num_stages - 1) * mean_s
    if isinstance(whole, _Group) and whole.recompute_s <= delta:
        return [whole]
    ends = _group_ends(chains)
    longest = _make_group(problem, [c for c in chains if len(c) > ends[-2]])
    if isinstance(longest, Shortage):
        # With others they need no less.
        return longest
    best: list[tuple[float, list[_Group]]] = [(0.0, [])]
    shortage = whole if isinstance(whole, Shortage) else NOTHING
    for last in range(1, len(ends)):
        best.append((math.inf, []))
        for first in range(last):
            before, members = best[first], [c for c in chains if ends[first] < len(c) <= ends[last]]
            if before[0] + delta >= best[last][0]:
                continue
            group = whole if len(members) == len(chains) else _make_group(problem, members)
            if isinstance(group, Shortage):
                shortage = group if group.missing < shortage.missing else shortage
            elif before[0] + delta + group.recompute_s < best[last][0]:
                best[last] = (before[0] + delta + group.recompute_s, [group, *before[1]])
    return best[-1][1] or shortage


def _one_group(problem: Problem, chains: list[Chain]) -> list[_Group] | Shortage:
    whole = _make_group(problem, chains)
    return whole if isinstance(whole, Shortage) else [whole]


def _group_ends(chains: list[Chain]) -> list[int]:
    """Return numbers of chunks after which a group may end, from 0."""
    sizes = sorted({len(chain) for chain in chains})
    count = min(len(sizes), _MOST_CUTS)
    return [0, *(sizes[(i + 1) * len(sizes) // count - 1] for i in range(count))]


def _make_group(problem: Problem, chains: list[Chain]) -> _Group | Shortage:
    chunks = _join(chains)
    priced = price(problem, chunks)
    leads = stage_leads(chunks, problem.pipeline.num_stages, "uniform", problem.pipeline.num_stages)
    memories = order_memories(problem, priced, leads)
    diagonals = sweep_diagonals(memories, problem.pipeline.limits)
    if isinstance(diagonals, Shortage):
        return diagonals
    counts = diagonal_counts(memories, diagonals)
    return _Group(
        chunks, memories, diagonals, float((counts.max(axis=0) * priced.costs.recompute_s).sum())
    )


def _polish(problem: Problem, swept: Schedule, groups: SequenceOf[_Group]) -> Schedule:
    """Solve the integer program of every group; keep the sweep's counts where its solution is not faster."""
    limits = problem.pipeline.limits
    solved = [solve_diagonals(group.memories, limits, group.diagonals) for group in groups]
    # The program knows nothing of what an op needs for a moment: where that is too much, counts rise a little more.
    repaired = [
        sweep_diagonals(group.memories, limits, c)
        for group, (c, _, _) in zip(groups, solved, strict=True)
    ]
    fitting = [
        group if isinstance(counts, Shortage) else replace(group, diagonals=counts)
        for group, counts in zip(groups, repaired, strict=True)
    ]
    found = _schedule(problem, fitting)
    statuses, gaps = [status for _, status, _ in solved], [gap for _, _, gap in solved]
    faster = isinstance(found, Schedule) and is_better(found, swept)
    search = Search(
        winner=swept.search.winner,
        solver="SCIP",
        status=", ".join(dict.fromkeys(statuses))
        + ("" if faster else "; the sweep's counts are as good"),
        gap=None if None in gaps else max(gap for gap in gaps if gap is not None),
    )
    return replace(found if isinstance(found, Schedule) and faster else swept, search=search)


def _schedule(problem: Problem, groups: SequenceOf[_Group]) -> Schedule | Shortage:
    """Run the groups' pipelines one after the other, that of the longest chains first."""
    priced = price(problem, join_chunks(group.chunks for group in groups))
    num_stages = problem.pipeline.num_stages
    leads = join_leads(
        [stage_leads(group.chunks, num_stages, "uniform", num_stages) for group in groups]
    )
    memories = order_memories(problem, priced, leads)
    counts = [diagonal_counts(group.memories, group.diagonals) for group in groups]
    return fixed_schedule(problem, priced, memories, np.concatenate(counts, axis=1))


def _join(chains: SequenceOf[Chain]) -> Chunks:
    return Chunks(tuple(chunk for chain in chains for chunk in chain), tuple(map(len, chains)))
