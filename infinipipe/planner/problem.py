"""What is to be planned: one replica's part of one step, on given stages and within given limits."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from infinipipe.aliases import Floats, Ints
from infinipipe.ir import Sequence, Stage
from infinipipe.profiles import Curve, LayerTime, Profile


@dataclass(frozen=True)
class Pipeline:
    """What holds for every step of a plan."""

    profile: Profile
    stages: tuple[Stage, ...]
    limits: tuple[int, ...]
    """Bytes per stage."""
    logits_tokens: int
    context_tokens: int
    """The longest sequence of all steps: systems with fixed shapes pack micro-batches of so many."""

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.stages)


@dataclass(frozen=True)
class Problem:
    """One replica's sequences of one step."""

    pipeline: Pipeline
    sequences: tuple[Sequence, ...]
    """Of the whole step."""
    members: tuple[int, ...]
    """The replica's sequences, as indices into `sequences`."""

    @property
    def lengths(self) -> Ints:
        """Tokens of each member."""
        return np.array([self.sequences[member].length for member in self.members], dtype=np.int64)


@dataclass(frozen=True)
class Work:
    """Seconds of F and B on an average stage, straight in tokens, pairs and slices.

    Chunks of one size differ from it by the same constant, so equal work is equal time.
    """

    s_per_token: float
    s_per_pair: float
    s_per_slice: float

    def whole(self, lengths: Ints) -> Floats:
        """Return the work of whole sequences."""
        pairs = lengths * (lengths + 1) / 2
        return np.asarray(self.s_per_token * lengths + self.s_per_pair * pairs + self.s_per_slice)

    def between(self, start: int, stop: int) -> float:
        """Return the work of one slice."""
        length = stop - start
        pairs = length * start + length * (length + 1) / 2
        return self.s_per_token * length + self.s_per_pair * pairs + self.s_per_slice

    def reach(self, start: int, work: float) -> float:
        """Return where a slice from `start` ends that has so much work (PAPER.md, Algorithm 1)."""
        room = max(0.0, work - self.s_per_slice)
        if self.s_per_pair <= 0:
            return start + room / self.s_per_token
        rate = self.s_per_token + self.s_per_pair * (start + 0.5)
        # s_per_pair/2 * x**2 + rate * x = room, in the form that loses no digits when pairs are cheap
        return float(start + 2 * room / (rate + np.sqrt(rate * rate + 2 * self.s_per_pair * room)))


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
    share = profile.model.num_layers / num_stages

    def total(rates: SequenceOf[float]) -> float:
        return share * sum(rates)

    return Work(
        s_per_token=max(
            1e-12,
            total([_slope(layer) for layer in layers]) + sum(map(_curve_slope, ends)) / num_stages,
        ),
        s_per_pair=max(0.0, total([layer.s_per_pair for layer in layers])),
        s_per_slice=max(0.0, total([layer.s_per_slice for layer in layers])),
    )


def _slope(layer: LayerTime) -> float:
    return _curve_slope(layer.curve)


def _curve_slope(curve: Curve) -> float:
    return (curve.seconds[-1] - curve.seconds[0]) / (curve.tokens[-1] - curve.tokens[0])
