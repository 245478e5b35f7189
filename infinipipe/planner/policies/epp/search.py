"""The search of `epp` over chunks and orders: what is tried, what it yields, what is tried next."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from infinipipe.planner.passes.chunking import Chunks, cut_chunks
from infinipipe.planner.passes.in_flight import Warmup, forwards_within_memory
from infinipipe.planner.passes.ladder import whole_menu
from infinipipe.planner.passes.least import least_in_order_s
from infinipipe.planner.passes.recompute import Shortage
from infinipipe.planner.passes.schedule import (
    NOTHING,
    Beaten,
    CostedChains,
    Result,
    Schedule,
    cannot_beat,
    fit_schedule,
    is_better,
    makespan_of,
    order_memories,
    price_chains,
)
from infinipipe.planner.policies.epp.candidates import (
    COARSE,
    FINE,
    ONE_CHAIN,
    RAMPS,
    Candidate,
    Move,
    SearchSpace,
    Variation,
    clip_parts,
    first_candidate,
    scale_parts,
    variations,
    with_attention,
    with_even,
)
from infinipipe.planner.problem import Problem

# Chunks times stages of the candidates that are ordered in one search, after which climbs and
# variations end; looking for anything that fits is not limited by it. More finds more and takes
# longer, and one plan may run several searches. It is no clock, so that plans are the same on every
# machine.
_EFFORT = 100_000
# More parts take longer to plan, and each costs the overhead of a chunk. What `epp` chose for the
# batches of benchmarks/RESULTS.md has 94 to 626 chunks.
_MOST_PARTS = 800
# With so few sequences the makespan has no slope to climb over the number of parts, so many numbers
# are tried: all small ones, then ever wider apart.
_FEW_SEQUENCES = 24
_FEW_COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48)
# How many times slower than the incumbent a move has to be for it not to be tried again around a
# better one: that rarely changes so much. With 1.005 a case of benchmarks/planner.py is 0.14 %
# slower, and planning 5 % faster.
_HOPELESS = 1.02
# How often an order that does not fit is drawn again with what it lacked left free. It helps where
# the estimate of `in_flight`, which is rough about transients and transfers, is too low. Where a
# chain's own F force the order, a larger margin lowers nothing, and all retries are in vain.
_RETRIES = 3
# How often the search goes on from what lacks least, where nothing fits yet. Each time tries all
# moves of `descend`.
_DESCENTS = 3
# Numbers of parts around what lacks least: the next ones of a fine climb, and one close by.
_DESCENT_FACTORS = (FINE, 1 / FINE, 1.05)


def search_schedule(problem: Problem, space: SearchSpace) -> Result:
    """Return the best schedule found for a replica's sequences, or the smallest shortage."""
    trials = Trials(problem, space)
    num_parts = trials.guess_parts()
    start = first_candidate(space, num_parts)
    find_feasible(trials, start)
    if len(problem.members) <= _FEW_SEQUENCES:
        try_few_counts(trials, start)
    most_parts = trials.most_parts
    varied = variations(space, problem.pipeline.num_stages, most_parts)
    climb(trials, COARSE)
    vary(trials, varied)
    climb(trials, FINE)
    while vary(trials, varied):
        climb(trials, COARSE)
        climb(trials, FINE)
    return trials.best


@dataclass(frozen=True)
class Outcome:
    """What a candidate yields."""

    result: Result | None
    """None where it cannot beat the incumbent, so that it was not simulated."""
    at_least_s: float
    """Of the result, infinity for a shortage; without a result, what it cannot undercut."""
    effort: int
    """Chunks times stages that were ordered; 0 if the quick bound sufficed."""


class Trials:
    """Which candidates were tried, and the best of them."""

    def __init__(self, problem: Problem, space: SearchSpace) -> None:
        self.problem = problem
        self.space = space
        self.best: Result = NOTHING
        self.best_candidate: Candidate | None = None
        """What made it: before anything fits, what lacks least."""
        self.effort = 0
        num_tokens = int(problem.lengths.sum())
        self.most_parts = float(min(num_tokens, _MOST_PARTS))
        self._outcomes: dict[Candidate, Outcome] = {}
        self._hopeless: set[Move] = set()
        """Moves that led far from the best."""
        self._evaluator = Evaluator(problem)

    @property
    def exhausted(self) -> bool:
        """Whether climbs and variations have to end (`_EFFORT`)."""
        return self.effort >= _EFFORT

    @property
    def feasible(self) -> bool:
        """Whether anything fits."""
        return isinstance(self.best, Schedule)

    def try_out(self, candidate: Candidate) -> float:
        """Evaluate a candidate unless it was tried before, keep it if it is the best, and return
        its makespan (`Outcome.at_least_s`)."""
        if candidate not in self._outcomes:
            outcome = self._evaluator.evaluate(candidate, self.best)
            self._outcomes[candidate] = outcome
            self.effort += outcome.effort
            if outcome.result is not None and is_better(outcome.result, self.best):
                self.best = outcome.result
                self.best_candidate = candidate
        return self._outcomes[candidate].at_least_s

    def try_move(self, move: Move) -> bool:
        """Evaluate the candidate that a move leads to from the best one.

        Return whether it is close to the best. A move that once was not is not tried again; with
        few sequences it may be close the next time.
        """
        before = self.best_candidate
        if before is None or self.exhausted or move in self._hopeless:
            return False
        makespan_s = self.try_out(move(before))
        if len(self.problem.members) <= _FEW_SEQUENCES:
            return True
        if makespan_s > makespan_of(self.best) * _HOPELESS:
            self._hopeless.add(move)
            return False
        return True

    def guess_parts(self) -> float:
        """Return where filling and draining takes twice as long as the overhead of chunks.

        That is the n for which (P - 1) * work / n = 2 * n * overhead. Where the two are equal, n is
        larger, but ramps add chunks, so the search starts with fewer. It climbs from there.
        """
        pipeline = self.problem.pipeline
        costs = pipeline.costs
        works_s = costs.work.whole(self.problem.lengths)
        work_s = float(works_s.sum())
        num_waits = pipeline.num_stages - 1
        square = num_waits * work_s / (2 * costs.chunk_overhead_s)
        num_parts = math.sqrt(square)
        return clip_parts(num_parts, self.most_parts)


def find_feasible(trials: Trials, start: Candidate) -> None:
    """Look for a candidate that fits: with more or fewer parts, the least in flight, equal tokens.

    Fewer parts can help: large chunks need much while they run, but a sequence that is not split
    needs no slot.
    """
    numbers = _numbers_around(start.num_parts, trials.most_parts)
    for num_parts in numbers:
        if math.isfinite(trials.try_out(replace(start, num_parts=num_parts))):
            return
    descend(trials)
    if trials.feasible:
        return
    frugal = replace(start, warmup=ONE_CHAIN)
    for attention in (start.attention, min(trials.space.attentions)):
        for num_parts in numbers:
            trials.try_out(replace(frugal, num_parts=num_parts, attention=attention))
    descend(trials)


def descend(trials: Trials) -> None:
    """Follow what lacks least, for a while, until something fits or nothing lacks less."""
    moves = [scale_parts(factor, trials.most_parts) for factor in _DESCENT_FACTORS]
    moves += [with_attention(attention) for attention in trials.space.attentions]
    moves += [with_even(even) for even in trials.space.evens]
    for _ in range(_DESCENTS):
        before = trials.best_candidate
        if before is None:
            return
        for move in moves:
            if trials.feasible:
                return
            trials.try_out(move(before))
        if trials.best_candidate == before:
            return


def try_few_counts(trials: Trials, start: Candidate) -> None:
    """Try many numbers of parts, and other cuts of those close to the best."""
    for count in _FEW_COUNTS:
        num_parts = clip_parts(count, trials.most_parts)
        for attention in trials.space.attentions:
            trials.try_out(replace(start, num_parts=num_parts, attention=attention))
    if trials.best_candidate is None:
        return
    best_parts = trials.best_candidate.num_parts
    for count in _FEW_COUNTS:
        if best_parts / 2 < count < best_parts * 2:
            num_parts = clip_parts(count, trials.most_parts)
            for even in trials.space.evens:
                trials.try_out(replace(start, num_parts=num_parts, even=even))


def climb(trials: Trials, factor: float) -> None:
    """Follow the number of parts from the best candidate to a local optimum."""
    for move in (
        scale_parts(factor, trials.most_parts),
        scale_parts(1 / factor, trials.most_parts),
    ):
        while trials.best_candidate is not None and not trials.exhausted:
            candidate = trials.best_candidate
            if trials.try_out(move(candidate)) >= trials.try_out(candidate):
                break


def vary(trials: Trials, varied: list[Variation]) -> bool:
    """Try other orders and other cuts around the best; return whether any is better."""
    before = trials.best_candidate
    for variation in varied:
        if trials.try_move(variation.move):
            for move in variation.more:
                trials.try_move(move)
    return trials.best_candidate != before


def _numbers_around(start: float, most_parts: float) -> list[float]:
    """Return numbers of parts ever farther from a first one, by factors of two."""
    numbers = []
    # So many doublings lead from one part to the most.
    num_doublings = math.ceil(math.log2(most_parts))
    for power in range(1 + num_doublings):
        factor = 2.0**power
        more = start * factor
        fewer = start / factor
        numbers.append(clip_parts(more, most_parts))
        numbers.append(clip_parts(fewer, most_parts))
    # In order, each once.
    return list(dict.fromkeys(numbers))


class Evaluator:
    """Makes schedules of candidates. It remembers chunks, and nothing of what they came to."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._chains: dict[Candidate, CostedChains] = {}

    def evaluate(self, candidate: Candidate, incumbent: Result) -> Outcome:
        """Make the schedule of a candidate, unless it cannot beat the incumbent."""
        chains = self._cut(candidate)
        if cannot_beat(incumbent, chains.least_s):
            return Outcome(None, float(chains.least_s.max()), effort=0)
        effort = chains.num_chunks * self._problem.pipeline.num_stages
        result = self._order(chains, candidate.warmup, incumbent)
        if isinstance(result, Beaten):
            return Outcome(None, result.at_least_s, effort)
        if isinstance(result, Schedule):
            result = result.won_by(str(candidate))
        return Outcome(result, makespan_of(result), effort)

    def _cut(self, candidate: Candidate) -> CostedChains:
        """Return the chunks of a candidate, which do not depend on its order."""
        key = replace(candidate, warmup=ONE_CHAIN)
        if key not in self._chains:
            chunks = _cut_chunks(self._problem, candidate)
            self._chains[key] = price_chains(self._problem, chunks, whole_menu)
        return self._chains[key]

    def _order(self, chains: CostedChains, warmup: Warmup, incumbent: Result) -> Result | Beaten:
        """Order chunks and choose their recompute.

        Where that does not fit, leave as much more free as was missing and try again.
        """
        problem = self._problem
        margins = np.zeros(problem.pipeline.num_stages)
        result: Result | Beaten = NOTHING
        order = np.empty(0, dtype=np.int64)
        for _ in range(1 + _RETRIES):
            before = order
            order = forwards_within_memory(problem.pipeline, chains, warmup, margins)
            if np.array_equal(order, before):
                break
            least_s = least_in_order_s(problem, chains, order)
            if cannot_beat(incumbent, least_s):
                return Beaten(float(least_s.max()))
            memories = order_memories(problem, chains, order)
            result = fit_schedule(problem, chains, memories, incumbent)
            if not isinstance(result, Shortage):
                break
            margins[result.stage] += result.missing
        return result


def _cut_chunks(problem: Problem, candidate: Candidate) -> Chunks:
    costs = problem.pipeline.costs
    s_per_pair = candidate.attention * costs.work.s_per_pair
    work = replace(costs.work, s_per_pair=s_per_pair)
    works = work.whole(problem.lengths)
    target = float(works.sum()) / candidate.num_parts
    longest = float(works.max())
    if longest > target:
        # If the longest sequence is a whole number of targets, its tail is so small that it mostly
        # joins the slice before it (`chunking._LEAST_TAIL`).
        num_slices = max(1, round(longest / target))
        target = longest / num_slices
    max_tokens = costs.max_chunk_tokens
    if candidate.attention == 0.0:
        # Where tokens are what counts, no chunk may have more, but each has one.
        target_tokens = max(1, math.ceil(work.reach(0, target)))
        max_tokens = min(max_tokens, target_tokens)
    make_ramp = RAMPS[candidate.ramp]
    ramp = make_ramp(problem.pipeline.num_stages)
    return cut_chunks(problem, work, target, max_tokens, even=candidate.even, ramp=ramp)
