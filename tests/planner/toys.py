"""Small problems: few short sequences, and a small model with the proportions of a large one."""

from __future__ import annotations

import json
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from infinipipe.aliases import Ints
from infinipipe.costs import CostModel, PackedProgram, Recompute, Work
from infinipipe.ir import Layout, Op, Sequence
from infinipipe.planner.passes.chunking import Chunks, cut_chunks
from infinipipe.planner.passes.order import backward_order, windowed_order
from infinipipe.planner.passes.partition import make_stages
from infinipipe.planner.passes.ramp import NO_RAMP, Ramp
from infinipipe.planner.problem import Pipeline, Problem
from infinipipe.profiles import PRESETS, Curve, LayerTime, Line, Links, Profile
from infinipipe.profiles.analytic import analytic_profile
from infinipipe.profiles.models import model_from_config

ToyWindow = Literal["adaptive", "uniform", "serial"]
"""The product's windows, and one that ends a chain before it starts the next."""
TOY_WINDOWS: tuple[ToyWindow, ...] = ("adaptive", "uniform", "serial")

ROOMY = 2**62
_NO_SECONDS = Line(constant=0.0, rate=0.0)
NO_LINKS = Links(
    transfer_s=_NO_SECONDS,
    all_to_all_s=_NO_SECONDS,
    reduce_scatter_s=_NO_SECONDS,
    all_gather_s=_NO_SECONDS,
    num_ranks=1,
)
"""Links that take no time at all."""
_QUANTILES = Path(__file__).parents[1] / "length_quantiles.json"


@cache
def toy_profile(num_layers: int = 6) -> Profile:
    """Return a profile in which one token of one layer takes 1 s in F and 2 s in B.

    Attention and overhead take some as well.
    """
    model = model_from_config("tiny", PRESETS["tiny"] | {"num_hidden_layers": num_layers})
    profile = analytic_profile(model, "a800-80g")

    def layer(scale: float) -> LayerTime:
        curve = Curve(tokens=(2, 4, 64), seconds=(2.5 * scale, 4.2 * scale, 64 * scale))
        return LayerTime(
            curve=curve,
            s_per_pair=0.02 * scale,
            s_per_slice=0.01 * scale,
            s_per_context=0.02 * scale,
            s_per_context_token=0.001 * scale,
            s_per_continued_token=0.01 * scale,
        )

    def ends(scale: float) -> Curve:
        return Curve(tokens=(1, 64), seconds=(scale, 64 * scale))

    def links(latency_s: float) -> Links:
        line = Line(constant=latency_s, rate=0.002 * latency_s)
        return Links(
            transfer_s=line,
            all_to_all_s=line,
            reduce_scatter_s=line,
            all_gather_s=line,
            num_ranks=8,
        )

    times = msgspec.structs.replace(
        profile.times,
        layer_forward=layer(1),
        layer_backward=layer(2),
        layer_recompute=layer(1),
        chunk_forward_s=0.1,
        chunk_backward_s=0.2,
        embedding_forward=ends(0.05),
        embedding_backward=ends(0.1),
        head_forward=ends(0.5),
        head_backward=ends(0.1),
        optimizer_s=Line(constant=1.0, rate=0.0),
        links=links(0.05),
        links_between=links(0.2),
    )
    return msgspec.structs.replace(profile, times=times)


def toy_sequences(lengths: SequenceOf[int]) -> tuple[Sequence, ...]:
    return tuple(Sequence(row, length, length - 1) for row, length in enumerate(lengths))


def toy_costs(
    profile: Profile, counts: SequenceOf[int], logits_tokens: int = 16, num_replicas: int = 1
) -> CostModel:
    """Return what stages of so many layers cost."""
    layout = Layout(num_stages=len(counts), num_replicas=num_replicas)
    return CostModel(profile, layout, make_stages(counts), logits_tokens)


def roomy_limits(costs: CostModel, room_bytes: float) -> tuple[int, ...]:
    """Return limits that leave every stage so many bytes besides its static ones."""
    stages = range(len(costs.stages))
    return tuple(costs.static_bytes(stage) + int(room_bytes) for stage in stages)


def toy_pipeline(
    counts: SequenceOf[int],
    room_bytes: float = ROOMY,
    context_tokens: int = 1,
    num_replicas: int = 1,
) -> Pipeline:
    """Return stages of so many layers, each with so many bytes besides its static ones.

    No system packs less than the longest sequence, so a context of 1 leaves that to each problem.
    """
    costs = toy_costs(toy_profile(sum(counts)), counts, num_replicas=num_replicas)
    return Pipeline(costs, roomy_limits(costs, room_bytes), context_tokens)


def toy_problem(
    lengths: SequenceOf[int], counts: SequenceOf[int], room_bytes: float = ROOMY
) -> Problem:
    return Problem(
        toy_pipeline(counts, room_bytes), toy_sequences(lengths), tuple(range(len(lengths)))
    )


def with_profile(problem: Problem, profile: Profile) -> Problem:
    """Return the same problem on the same stages, with other costs and the same limits."""
    costs = problem.pipeline.costs
    costs = CostModel(profile, costs.layout, costs.stages, costs.logits_tokens)
    return replace(problem, pipeline=replace(problem.pipeline, costs=costs))


def with_limits(problem: Problem, limits: SequenceOf[int]) -> Problem:
    """Return the same problem with other limits."""
    return replace(problem, pipeline=replace(problem.pipeline, limits=tuple(limits)))


def cut(
    problem: Problem,
    parts: float,
    max_tokens: int = 10**6,
    even: bool = False,
    ramp: Ramp = NO_RAMP,
) -> tuple[Chunks, Work, float]:
    """Cut into so many parts of equal work; return the chunks, the work and that of a part."""
    work = problem.pipeline.costs.work
    target = float(work.whole(problem.lengths).sum()) / parts
    return cut_chunks(problem, work, target, max_tokens, even=even, ramp=ramp), work, target


def in_whole(counts: SequenceOf[int] | Ints) -> Recompute:
    """Return so many layers of each chunk that keep only their input, and none that keep more."""
    keep_input = np.asarray(counts)
    return Recompute(keep_input, np.zeros_like(keep_input))


def drawn_recompute(generator: np.random.Generator, num_layers: int, num_chunks: int) -> Recompute:
    """Draw how many layers of each chunk are recomputed in whole, and how many without attention.

    Mostly some are left that keep everything, sometimes none.
    """
    keep_input = generator.integers(0, num_layers + 1, num_chunks)
    keep_attention = generator.integers(0, num_layers - keep_input + 1)
    all_others = generator.random(num_chunks) < 0.3
    return Recompute(keep_input, np.where(all_others, num_layers - keep_input, keep_attention))


def toy_leads(chunks: Chunks, num_stages: int, window: ToyWindow, depth: int) -> Ints:
    """Do as `windowed_order` does, for one window more."""
    if window != "serial":
        return windowed_order(chunks, num_stages, window, depth)
    ends = np.array(chunks.chain_ends, dtype=np.int64)
    ahead = np.minimum(np.arange(num_stages)[::-1], depth)
    return np.asarray(np.minimum(ends + ahead[:, None], len(ends)))


def toy_programs(
    chains: tuple[int, ...], num_stages: int, window: ToyWindow, depth: int
) -> list[tuple[Op, ...]]:
    """Return every stage's program for chains of so many chunks."""
    chunks = Chunks(chunks=(), chains=chains)
    backwards = backward_order(chunks)
    leads = toy_leads(chunks, num_stages, window, depth)
    return [PackedProgram.interleave(row, backwards).unpack() for row in leads]


def draw_lengths(name: str, count: int, seed: int) -> list[int]:
    """Draw lengths from the quantiles of a real data set."""
    quantiles = json.loads(_QUANTILES.read_text())[name]["quantiles"]
    return np.random.default_rng(seed).choice(np.array(quantiles), count).tolist()
