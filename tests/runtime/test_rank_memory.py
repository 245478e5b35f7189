"""Peaks of ranks that share sequences and optimizer state are what the cost model says."""

from __future__ import annotations

from functools import cache

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from infinipipe.costs import CostModel, PackedProgram, Recompute
from infinipipe.ir import Model
from infinipipe.profiles import Profile
from infinipipe.profiles.analytic import analytic_profile
from infinipipe.runtime.attention import NO_EXCHANGE, Exchange, HeadExchange
from infinipipe.runtime.data import StepData
from infinipipe.runtime.executor import Executor
from infinipipe.runtime.memory import CpuMemory
from infinipipe.runtime.model import StageModel
from infinipipe.runtime.optimizer import make_adamw
from tests.runtime.loopback import LoopbackTransport
from tests.runtime.replay import CPU, MemoryDataset, hand_header, hand_step, small_model
from tests.runtime.stage_memory import measure_bytes

pytestmark = pytest.mark.slow

Pieces = list[list[tuple[int, int, int]]]

PACKS: tuple[list[int], Pieces] = (
    [301] * 4,
    [[(0, 0, 301), (1, 0, 301)], [(2, 0, 301), (3, 0, 301)]],
)
SLICES: tuple[list[int], Pieces] = (
    [2001],
    [[(0, 0, 999)], [(0, 999, 701)], [(0, 1700, 301)]],
)
LONG: tuple[list[int], Pieces] = ([4100], [[(0, 0, 4001)], [(0, 4001, 99)]])
HYBRID: tuple[list[int], Pieces] = (
    [1500, 250],
    [[(0, 0, 1000)], [(0, 1000, 500), (1, 0, 250)]],
)
CHUNKS = {"packs": PACKS, "slices": SLICES, "long": LONG, "hybrid": HYBRID}


@cache
def profile_of(num_kv_heads: int) -> Profile:
    """Return a profile with the bytes of a model of 8 heads."""
    model = model_of(num_kv_heads)
    profile = analytic_profile(model, "a800-80g")
    return msgspec.structs.replace(profile, bytes=measure_bytes(model, CPU), dtype="float32")


def model_of(num_kv_heads: int) -> Model:
    return small_model(
        hidden_size=64,
        intermediate_size=176,
        head_dim=16,
        num_attention_heads=8,
        num_key_value_heads=num_kv_heads,
    )


def first_exchange(num_ranks: int) -> Exchange:
    """Return the exchange of the first rank, which has most tokens, among ranks that are not there.

    What arrives does not matter for memory.
    """
    if num_ranks == 1:
        return NO_EXCHANGE

    def all_to_all(received: Tensor, _: Tensor, *__: list[int]) -> None:
        received.fill_(0.01)

    return HeadExchange(num_ranks, 0, all_to_all)


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("recompute", [0, 2, 4])
@pytest.mark.parametrize(("num_ranks", "num_kv_heads"), [(2, 8), (4, 2), (4, 1)])
def test_peaks_of_a_rank(num_ranks: int, recompute: int, num_kv_heads: int, chunks: str) -> None:
    lengths, pieces = CHUNKS[chunks]
    profile = profile_of(num_kv_heads)
    header = hand_header(profile.model, (4,), batch_size=100, sequence_parallel=num_ranks)
    dataset = MemoryDataset(lengths)
    step = hand_step(header, dataset, [pieces], lambda stage, chunk: recompute)
    (replica,) = step.replicas
    costs = CostModel(profile, header.layout, header.stages, header.logits_tokens)
    costed = costs.price(replica.chunks, step.sequences)
    ledger = costs.memory(0, costed, PackedProgram.pack(replica.programs[0]))
    counts = Recompute(np.array(replica.recompute[0]), np.array(replica.keep_attention[0]))
    predicted = ledger.during(counts).max()

    model = StageModel(profile.model, header.stages[0], CPU, num_shards=num_ranks)
    model.init_random(0)
    adamw = make_adamw(model.flat.shards(0, num_ranks), lr=0.0)
    static: list[torch.Tensor] = [model.flat.parameters, model.flat.gradients]
    for state in adamw.state.values():
        static += state.values()
    transport = LoopbackTransport.connect(1)[0]
    executor = Executor(header, 0, model, transport, first_exchange(num_ranks))
    data = StepData(dataset, step, "token")
    with CpuMemory(static) as memory:
        assert memory.current_bytes == pytest.approx(costs.static_bytes(0), rel=1e-3)
        executor.run(step, replica, data)
        measured = memory.peak_bytes
    assert 0.98 * measured <= predicted <= 1.05 * measured
