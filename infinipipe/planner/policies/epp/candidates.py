"""What `epp` may choose, and which choices stand next to each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from infinipipe.planner.passes.in_flight import Warmup
from infinipipe.planner.passes.ramp import NO_RAMP, Ramp, geometric_ramp, linear_ramp

RampName = Literal["geometric", "linear", "no"]
RAMPS: dict[RampName, Callable[[int], Ramp]] = {
    "geometric": geometric_ramp,
    "linear": linear_ramp,
    "no": lambda num_stages: NO_RAMP,
}
"""By name, what makes the ramp for a number of stages."""

ONE_CHAIN = Warmup(per_stage=0.0, burst=1_000_000)
"""A chain's F directly before its B: the least that can be in flight.

Bursts are longer than any chain, so no F runs in advance.
"""

_WARMUPS = (Warmup(2.0, 2), Warmup(2.0, 1), Warmup(1.5, 1), Warmup(1.0, 1))
"""From two F ahead of each next stage to the one of plain 1F1B.

More ahead hides waits. A larger burst runs fewer F in advance, which takes less memory.
"""


@dataclass(frozen=True)
class SearchSpace:
    """What may be chosen, the first of each to begin with."""

    attentions: tuple[float, ...] = (0.5, 1.0, 0.0)
    """How much of the attention's time counts when chunks are cut: all for equal work, none for
    equal tokens."""
    evens: tuple[bool, ...] = (False, True)
    """Whether a long sequence is cut evenly by itself, or by the mesh of all."""
    ramps: tuple[RampName, ...] = ("linear", "geometric", "no")
    """How the first chunks grow and the last shrink."""
    warmups: tuple[Warmup, ...] = _WARMUPS


@dataclass(frozen=True)
class Candidate:
    """One way to plan a step."""

    num_parts: float
    """Parts into which the whole work is cut: about as many chunks, unless they are on a ramp."""
    attention: float
    even: bool
    ramp: RampName
    warmup: Warmup

    def __str__(self) -> str:
        """Return what a plan says of it."""
        cut = "even slices" if self.even else "one mesh"
        warmup = self.warmup
        # Plan files hold this text, and `grades` is their word for a ramp.
        parts = (
            f"{self.num_parts:.4g} parts",
            f"{self.attention:.0%} of attention",
            cut,
            f"{self.ramp} grades",
            f"{warmup.per_stage:g} ahead",
            f"bursts of {warmup.burst}",
        )
        return "epp: " + ", ".join(parts)


def first_candidate(space: SearchSpace, num_parts: float) -> Candidate:
    """Return where the search begins."""
    return Candidate(
        num_parts=num_parts,
        attention=space.attentions[0],
        even=space.evens[0],
        ramp=space.ramps[0],
        warmup=space.warmups[0],
    )


Move = Callable[[Candidate], Candidate]
"""From a candidate to one beside it."""

# Factors by which the number of parts climbs. Large steps reach far numbers in few simulations,
# small ones come closer to the best.
COARSE = 1.5
FINE = 1.2


def scale_parts(factor: float, most_parts: float) -> Move:
    """Return the move to so many times as many parts."""

    def move(candidate: Candidate) -> Candidate:
        num_parts = candidate.num_parts * factor
        return replace(candidate, num_parts=clip_parts(num_parts, most_parts))

    return move


def clip_parts(num_parts: float, most_parts: float) -> float:
    """Return a number of parts within what there can be."""
    at_least_one = max(num_parts, 1.0)
    return min(at_least_one, most_parts)


class Variation(NamedTuple):
    """Another order, or another cut."""

    move: Move
    more: tuple[Move, ...] = ()
    """What may be better still if the move comes close."""


def variations(space: SearchSpace, num_stages: int, most_parts: float) -> list[Variation]:
    """Return the ways to every other order and every other cut."""
    moves = [_with_warmup(warmup) for warmup in space.warmups]
    if num_stages == 1:
        # Without neighbours to keep busy, what is in flight only costs memory.
        moves.insert(0, _with_warmup(ONE_CHAIN))
    moves += [with_even(even) for even in space.evens]
    moves += [with_attention(attention) for attention in space.attentions]
    varied = [Variation(move) for move in moves]
    # A ramp is of many small chunks, so with another one another number may be best.
    more = (scale_parts(COARSE, most_parts), scale_parts(1 / COARSE, most_parts))
    for ramp in space.ramps:
        moved = _with_ramp(ramp)
        scaled = tuple(_one_after_the_other(moved, scale) for scale in more)
        varied.append(Variation(moved, scaled))
    return varied


def _with_warmup(warmup: Warmup) -> Move:
    return lambda c: replace(c, warmup=warmup)


def with_even(even: bool) -> Move:
    """Return the move to cutting each sequence by itself, or all by one mesh."""
    return lambda c: replace(c, even=even)


def with_attention(attention: float) -> Move:
    """Return the move to counting so much of the attention's time."""
    return lambda c: replace(c, attention=attention)


def _with_ramp(ramp: RampName) -> Move:
    return lambda c: replace(c, ramp=ramp)


def _one_after_the_other(first: Move, second: Move) -> Move:
    return lambda c: second(first(c))
