"""Work: how long a slice keeps an average stage busy, in a form that can be solved for its end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from infinipipe.aliases import Floats, Ints
from infinipipe.costs.times import mean_slope
from infinipipe.profiles import Profile

# A profile whose times do not rise with tokens would make slices endless. Far below what any device
# takes for a token.
_LEAST_S_PER_TOKEN = 1e-12


@dataclass(frozen=True)
class Work:
    """Seconds of F and B without recompute on an average stage, by tokens, pairs and slices.

    They are linear in these. What every chunk costs alike is left out, so chunks of equal work take
    equal time.
    """

    s_per_token: float
    s_per_pair: float
    s_per_slice: float

    def whole(self, lengths: Ints) -> Floats:
        """Return the work of whole sequences."""
        pairs = lengths * (lengths + 1) / 2
        of_tokens = self.s_per_token * lengths
        of_pairs = self.s_per_pair * pairs
        return np.asarray(of_tokens + of_pairs + self.s_per_slice)

    def between(self, start: int, stop: int) -> float:
        """Return the work of one slice."""
        length = stop - start
        # Each token attends to the whole context, and within the slice to those up to itself.
        with_context = length * start
        within = length * (length + 1) / 2
        of_tokens = self.s_per_token * length
        of_pairs = self.s_per_pair * (with_context + within)
        return of_tokens + of_pairs + self.s_per_slice

    def reach(self, start: int, work: float) -> float:
        """Return where a slice from `start` ends that has so much work.

        As in Algorithm 1 of InfiniPipe (arXiv 2509.21275), but solved for the end.
        """
        room = max(0.0, work - self.s_per_slice)
        if self.s_per_pair <= 0:
            length = room / self.s_per_token
            return start + length
        # The length x solves s_per_pair / 2 * x**2 + rate * x = room.
        first_pairs = start + 0.5
        rate = self.s_per_token + self.s_per_pair * first_pairs
        discriminant = rate * rate + 2 * self.s_per_pair * room
        # This form of the root loses no digits when pairs are cheap.
        length = 2 * room / (rate + np.sqrt(discriminant))
        return float(start + length)


def average_work(profile: Profile, num_stages: int) -> Work:
    """Return the work of a stage that holds its share of layers, embedding and head."""
    times = profile.times
    layers = (times.layer_forward, times.layer_backward)
    ends = (
        times.embedding_forward,
        times.embedding_backward,
        times.head_forward,
        times.head_backward,
    )
    num_layers = profile.model.num_layers / num_stages
    layer_slope = sum(mean_slope(layer.curve) for layer in layers)
    end_slopes = sum(mean_slope(curve) for curve in ends)
    s_per_token = num_layers * layer_slope
    s_per_token += end_slopes / num_stages
    s_per_pair = num_layers * sum(layer.s_per_pair for layer in layers)
    s_per_slice = num_layers * sum(layer.s_per_slice for layer in layers)
    # Work never falls with tokens, pairs or slices, whatever was measured.
    return Work(
        s_per_token=max(_LEAST_S_PER_TOKEN, s_per_token),
        s_per_pair=max(0.0, s_per_pair),
        s_per_slice=max(0.0, s_per_slice),
    )
