"""Replays a hand-made step on loopback stages; the oracle does so on the unsplit model."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from infinipipe.dataset import Example
from infinipipe.ir import (
    Chunk,
    Header,
    Model,
    Replica,
    Sequence,
    Slice,
    Stage,
    StagePrediction,
    Step,
    chunk_chains,
    loss_denominator,
    verify_step,
)
from infinipipe.profiles import PRESETS
from infinipipe.profiles.models import model_from_config
from infinipipe.runtime.attention import Exchange
from infinipipe.runtime.data import StepData, token_weight
from infinipipe.runtime.executor import Executor
from infinipipe.runtime.model import EMBEDDING, HEAD, StageModel
from infinipipe.runtime.optimizer import BETAS, EPSILON, WEIGHT_DECAY
from tests.plans import make_header, order_1f1b
from tests.processes import HARD_LIMIT_S
from tests.runtime.loopback import LoopbackTransport, loopback_exchanges

CPU = torch.device("cpu")


def small_model(
    architecture: str = "llama", num_layers: int = 4, tied: bool = False, **more: object
) -> Model:
    """A supported model with grouped-query attention, small enough for hundreds of runs."""
    shape = {
        "num_hidden_layers": num_layers,
        "hidden_size": 32,
        "head_dim": 8,
        "intermediate_size": 48,
        "vocab_size": 64,
    }
    # Larger weights than usual, so that attention is far from uniform and every gradient matters.
    config = (
        PRESETS["tiny"]
        | shape
        | {"model_type": architecture, "initializer_range": 0.2, "tie_word_embeddings": tied}
    )
    return model_from_config(architecture, config | {"sliding_window": None} | more)


class MemoryDataset:
    """A dataset held in memory, of random ids; `labels` of a row can be set."""

    def __init__(self, lengths: SequenceOf[int], vocabulary_size: int = 64, seed: int = 0) -> None:
        generator = np.random.default_rng(seed)
        self.examples = []
        for length in lengths:
            ids = generator.integers(0, vocabulary_size, length)
            self.examples.append(Example(input_ids=ids, labels=ids.copy()))

    def read(self, row: int) -> Example:
        """Return one row."""
        return self.examples[row]


def hand_header(model: Model, layers: SequenceOf[int], **changes: object) -> Header:
    """A header whose stages have the given numbers of layers."""
    first = [sum(layers[:s]) for s in range(len(layers))]
    last = len(layers) - 1
    stages = tuple(
        Stage(first_layer=first[s], num_layers=n, embedding=s == 0, head=s == last)
        for s, n in enumerate(layers)
    )
    return msgspec.structs.replace(
        make_header(),
        model=model,
        stages=stages,
        memory_limit_bytes=(10**9,) * len(layers),
        **changes,
    )


def hand_step(
    header: Header,
    dataset: MemoryDataset,
    replicas: SequenceOf[SequenceOf[SequenceOf[tuple[int, int, int]]]],
    recompute: Callable[[int, int], int] = lambda stage, chunk: 0,
    keep_attention: Callable[[int, int], int] = lambda stage, chunk: 0,
) -> Step:
    """A step over all rows of a dataset.

    Every replica's chunks are given as (sequence, start, length) slices. Chains are scheduled 1F1B
    in the order of their first chunk; `recompute(stage, chunk)` is capped to the layers, and
    `keep_attention(stage, chunk)` to those that are left.
    """
    sequences = tuple(
        Sequence(row=row, length=len(e.input_ids), num_targets=int((e.labels[1:] != -100).sum()))
        for row, e in enumerate(dataset.examples)
    )
    step = Step(
        index=0,
        sequences=sequences,
        denominator=loss_denominator(sequences, header.loss_norm),
        replicas=tuple(
            _hand_replica(header, sequences, chunks, recompute, keep_attention)
            for chunks in replicas
        ),
        makespan_s=1.0,
        bound_s=0.5,
        step_s=1.25,
    )
    verify_step(header, step)
    return step


def _hand_replica(
    header: Header,
    sequences: SequenceOf[Sequence],
    slices: SequenceOf[SequenceOf[tuple[int, int, int]]],
    recompute: Callable[[int, int], int],
    keep_attention: Callable[[int, int], int],
) -> Replica:
    chunks = tuple(Chunk(tuple(Slice(*piece) for piece in chunk)) for chunk in slices)
    chains, num_stages = chunk_chains(chunks, sequences), len(header.stages)
    in_whole = [
        [min(stage.num_layers, recompute(s, c)) for c in range(len(chunks))]
        for s, stage in enumerate(header.stages)
    ]
    return Replica(
        chunks=chunks,
        recompute=tuple(map(tuple, in_whole)),
        keep_attention=tuple(
            tuple(
                min(stage.num_layers - in_whole[s][c], keep_attention(s, c))
                for c in range(len(chunks))
            )
            for s, stage in enumerate(header.stages)
        ),
        programs=tuple(order_1f1b(chains, s, num_stages) for s in range(num_stages)),
        predicted=(StagePrediction(busy_s=0.5, recompute_s=0.0, bubble_s=0.5, peak_bytes=10**6),)
        * num_stages,
    )


@dataclass
class Result:
    """What a step leaves: its loss and every gradient by global name."""

    loss: float
    gradients: dict[str, Tensor]
    outputs: list[dict[int, Tensor]]
    """Per rank, what each chunk's forward produced."""


def replay(header: Header, step: Step, dataset: MemoryDataset, seed: int = 0) -> Result:
    """Run every rank of every replica in its own thread and add up all their gradients."""
    total: dict[str, Tensor] = {}
    loss, outputs = 0.0, []
    for replica in step.replicas:
        stages = _loopback_ranks(header, seed)
        threads = [
            threading.Thread(target=stage.run, args=(step, replica, dataset)) for stage in stages
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=HARD_LIMIT_S)
            assert not thread.is_alive(), "a stage hangs"
        for stage in stages:
            if stage.error is not None:
                raise stage.error
            for name, gradient in stage.gradients().items():
                total[name] = total.get(name, 0) + gradient
            loss += stage.loss
            outputs.append(stage.outputs)
    if header.model.tied and HEAD in total:
        total[EMBEDDING] += total.pop(HEAD)
    return Result(loss, total, outputs)


def _loopback_ranks(header: Header, seed: int) -> list[_LoopbackRank]:
    """Return the ranks of one replica, connected, those of a stage behind one another."""
    num_stages = len(header.stages)
    num_sharers = header.sequence_parallel
    pipelines = [LoopbackTransport.connect(num_stages) for _ in range(num_sharers)]
    ranks = []
    for stage in range(num_stages):
        transports = [pipeline[stage] for pipeline in pipelines]
        for ends in zip(transports, loopback_exchanges(num_sharers), strict=True):
            ranks.append(_LoopbackRank(header, stage, seed, *ends))
    return ranks


class _LoopbackRank:
    def __init__(
        self,
        header: Header,
        index: int,
        seed: int,
        transport: LoopbackTransport,
        exchange: Exchange,
    ) -> None:
        self.model = StageModel(header.model, header.stages[index], CPU)
        self.model.init_random(seed)
        self.executor = Executor(header, index, self.model, transport, exchange)
        self.loss_norm = header.loss_norm
        self.loss = 0.0
        self.error: Exception | None = None
        self.outputs: dict[int, Tensor] = {}

    def run(self, step: Step, replica: object, dataset: MemoryDataset) -> None:
        run_layers = self.model.run_layers

        def keep_output(hidden: Tensor, *arguments: object) -> Tensor:
            result = run_layers(hidden, *arguments)
            self.outputs[len(self.outputs)] = result.detach().clone()
            return result

        self.model.run_layers = keep_output
        try:
            self.loss = float(
                self.executor.run(step, replica, StepData(dataset, step, self.loss_norm))
            )
        except Exception as error:
            self.error = error

    def gradients(self) -> dict[str, Tensor]:
        return {name: parameter.grad for name, parameter in self.model.global_parameters().items()}


def whole_model(model: Model, seed: int = 0) -> torch.nn.Module:
    """Return transformers' own model with the stages' weights, attending by its own SDPA code."""
    config = AutoConfig.for_model(**json.loads(model.config))
    whole = AutoModelForCausalLM.from_config(
        config, attn_implementation="sdpa", dtype=torch.float32
    )
    stage = StageModel(
        model, Stage(first_layer=0, num_layers=model.num_layers, embedding=True, head=True), CPU
    )
    stage.init_random(seed)
    missing = whole.load_state_dict(
        {n: p.detach() for n, p in stage.global_parameters().items()}, strict=False
    )
    assert not missing.unexpected_keys
    assert set(missing.missing_keys) <= {HEAD}
    whole.tie_weights()
    return whole


def make_plain_adamw(whole: torch.nn.Module, lr: float) -> torch.optim.AdamW:
    """Return torch's own optimizer on whole weights, of which only matrices decay."""
    decayed = [parameter for parameter in whole.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in whole.parameters() if parameter.ndim < 2]
    groups = [
        {"params": decayed, "weight_decay": WEIGHT_DECAY},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=BETAS, eps=EPSILON)


def oracle(
    header: Header, step: Step, dataset: MemoryDataset, whole: torch.nn.Module | None = None
) -> Result:
    """One process, each sequence alone: no packing, no slicing, no recompute."""
    whole = whole or whole_model(header.model)
    total = torch.zeros(())
    for sequence in step.sequences:
        if not sequence.num_targets:
            continue
        example = dataset.read(sequence.row)
        logits = whole(input_ids=torch.from_numpy(example.input_ids)[None], use_cache=False).logits[
            0, :-1
        ]
        labels = torch.from_numpy(example.labels)[1:]
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        loss = loss * token_weight(sequence, step.denominator, header.loss_norm)
        loss.backward()
        total += loss.detach()
    names = dict(whole.named_parameters())
    return Result(
        float(total),
        {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in names.items()},
        [],
    )


def assert_equal(result: Result, expected: Result, tolerance: float = 1e-5) -> None:
    """Compare the loss and EVERY gradient, each by its relative error."""
    assert result.loss == pytest.approx(expected.loss, rel=tolerance)
    assert result.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        error = float((result.gradients[name] - gradient).norm() / gradient.norm().clamp(min=1e-30))
        assert error < tolerance, f"{name}: relative error {error:.2e}"
