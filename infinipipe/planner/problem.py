"""What is to be planned: one replica's part of one step, on given stages and within limits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from infinipipe.aliases import Ints
from infinipipe.costs import ChunkRates, CostModel
from infinipipe.ir import Sequence, Slice, Stage


@dataclass(frozen=True)
class Pipeline:
    """What holds for every step of a plan."""

    costs: CostModel
    limits: tuple[int, ...]
    """Bytes per stage."""
    context_tokens: int
    """The longest sequence of all steps: systems with fixed shapes pack micro-batches as long."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The layers of each stage."""
        return self.costs.stages

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.costs.stages)

    @property
    def num_replicas(self) -> int:
        """Copies of the pipeline."""
        return self.costs.layout.num_replicas


@dataclass(frozen=True)
class Problem:
    """One replica's sequences of one step."""

    pipeline: Pipeline
    sequences: tuple[Sequence, ...]
    """Of the whole step."""
    members: tuple[int, ...]
    """The replica's sequences, as indices into `sequences`."""

    @cached_property
    def lengths(self) -> Ints:
        """Tokens of each member."""
        lengths = [self.sequences[member].length for member in self.members]
        return np.array(lengths, dtype=np.int64)

    @cached_property
    def longest_first(self) -> tuple[int, ...]:
        """The members by length, the longest first."""
        members = sorted(self.members, key=lambda m: (-self.sequences[m].length, m))
        return tuple(members)

    @cached_property
    def rates(self) -> ChunkRates:
        """What chunks of the members need at least."""
        lengths = np.sort(self.lengths)[::-1].astype(np.float64)
        return self.pipeline.costs.rates(self.pipeline.limits, lengths)

    @cached_property
    def wholes(self) -> tuple[Slice, ...]:
        """Each member as one slice, the longest first."""
        return tuple(
            Slice(member, 0, self.sequences[member].length) for member in self.longest_first
        )
