"""Exactness of every kind of layout on real gloo ranks, by the worker itself.

Loss and EVERY gradient, then losses, clipped norms and weights of three steps.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from infinipipe.ir import Header, Step
from infinipipe.runtime.gradients import MAX_GRAD_NORM
from infinipipe.runtime.model import EMBEDDING, HEAD
from tests.runtime.cuts import HYBRID, LAYERS, MENU, slices
from tests.runtime.ranks_of_layouts import Case, run_cases
from tests.runtime.replay import (
    MemoryDataset,
    Result,
    assert_equal,
    hand_header,
    hand_step,
    make_plain_adamw,
    oracle,
    small_model,
    whole_model,
)

pytestmark = pytest.mark.slow

LR = 1e-3
NUM_STEPS = 3
NUM_RANKS = 8
LAYOUTS = ((2, 1, 2), (2, 2, 1), (1, 2, 2), (1, 4, 1), (2, 2, 2), (4, 1, 1))
"""Stages, ranks that share sequences, replicas."""
LENGTHS = (11, 3, 6, 1, 2, 29, 5)
OTHERS = [[(3, 0, 1)], [(4, 0, 2)], *slices(5, (13, 1, 15)), [(6, 0, 5)]]
"""Besides `HYBRID`: chunks of 1 and 2 tokens, and three slices of a sequence."""


class Variant(NamedTuple):
    """What a layout is tried with."""

    name: str
    kv_heads: int
    tied: bool
    loss_norm: str
    recompute: str
    masked: str = "some"
    """Which labels are masked: `some` or `all`."""
    idle_replica: bool = False


VARIANTS = (
    Variant("2 kv heads", 2, tied=False, loss_norm="token", recompute="all kinds"),
    Variant("1 kv head, tied", 1, tied=True, loss_norm="sequence", recompute="attention kept"),
    Variant("8 kv heads, tied", 8, tied=True, loss_norm="token", recompute="all"),
)
IDLE = Variant(
    "idle replica", 2, tied=True, loss_norm="token", recompute="mixed", idle_replica=True
)
ALL_MASKED = Variant(
    "all masked", 2, tied=True, loss_norm="sequence", recompute="mixed", masked="all"
)
CASES = (
    *((layout, variant) for layout in LAYOUTS for variant in VARIANTS),
    ((2, 1, 2), IDLE),
    ((2, 2, 2), IDLE),
    ((2, 2, 2), ALL_MASKED),
    ((1, 4, 1), ALL_MASKED),
)
IDS = ["x".join(map(str, layout)) + f" {variant.name}" for layout, variant in CASES]


class Trained(NamedTuple):
    """What training left."""

    first: Result
    """Loss and gradients of the first step."""
    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def make_dataset(variant: Variant) -> MemoryDataset:
    """All rows of all steps: each step has its own, of the same lengths."""
    dataset = MemoryDataset(LENGTHS * NUM_STEPS)
    for row, example in enumerate(dataset.examples):
        if variant.masked == "all" or row % len(LENGTHS) == 2:
            example.labels[:] = -100
        if row % len(LENGTHS) == 5:
            example.labels[4:20] = -100
    return dataset


def make_plan(layout: tuple[int, int, int], variant: Variant) -> tuple[Header, list[Step]]:
    num_stages, sequence_parallel, num_replicas = layout
    model = small_model(
        num_attention_heads=8, num_key_value_heads=variant.kv_heads, tied=variant.tied, head_dim=4
    )
    header = hand_header(
        model,
        LAYERS[num_stages],
        sequence_parallel=sequence_parallel,
        num_replicas=num_replicas,
        loss_norm=variant.loss_norm,
        num_steps=NUM_STEPS,
        batch_size=len(LENGTHS),
    )
    replicas = [[*HYBRID, *OTHERS]]
    if num_replicas == 2:
        replicas = [[*HYBRID, *OTHERS], []] if variant.idle_replica else [HYBRID, OTHERS]
    dataset = make_dataset(variant)
    dataset.examples = dataset.examples[: len(LENGTHS)]
    step = hand_step(header, dataset, replicas, *MENU[variant.recompute])
    return header, [_nth(step, index) for index in range(NUM_STEPS)]


def _nth(step: Step, index: int) -> Step:
    first = index * len(LENGTHS)
    sequences = tuple(
        msgspec.structs.replace(sequence, row=first + sequence.row) for sequence in step.sequences
    )
    return msgspec.structs.replace(step, index=index, sequences=sequences)


def write_case(folder: Path, layout: tuple[int, int, int], variant: Variant) -> Case:
    folder.mkdir()
    header, steps = make_plan(layout, variant)
    with (folder / "dataset.jsonl").open("w") as file:
        for example in make_dataset(variant).examples:
            row = {"input_ids": example.input_ids.tolist(), "labels": example.labels.tolist()}
            file.write(json.dumps(row) + "\n")
    return Case(str(folder), header, steps)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Run all cases; return the folder of each."""
    scratch = tmp_path_factory.mktemp("layouts")
    folders = [scratch / str(index) for index in range(len(CASES))]
    cases = [write_case(folder, *case) for folder, case in zip(folders, CASES, strict=True)]
    run_cases(cases, scratch, NUM_RANKS, LR)
    return folders


def read_trained(folder: Path, num_ranks: int, *, tied: bool) -> Trained:
    total: dict[str, Tensor] = {}
    loss = 0.0
    for rank in range(num_ranks):
        own_loss, gradients = torch.load(folder / f"gradients-{rank}")
        loss += own_loss
        for name, gradient in gradients.items():
            total[name] = total.get(name, 0) + gradient
    if tied and HEAD in total:
        total[EMBEDDING] += total.pop(HEAD)
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    weights: dict[str, Tensor] = {}
    for file in (folder / "run" / "model").glob("*.safetensors"):
        weights |= load_file(file)
    return Trained(
        Result(loss, total, []),
        [step["loss"] for step in metrics],
        [step["grad_norm"] for step in metrics],
        weights,
    )


def train_oracle(variant: Variant) -> Trained:
    """Train the unsplit model one sequence at a time."""
    header, steps = make_plan((1, 1, 1), variant)
    dataset = make_dataset(variant)
    first = oracle(header, steps[0], dataset)
    whole = whole_model(header.model)
    optimizer = make_plain_adamw(whole, LR)
    losses: list[float] = []
    norms: list[float] = []
    for step in steps:
        optimizer.zero_grad()
        losses.append(oracle(header, step, dataset, whole=whole).loss)
        norms.append(float(torch.nn.utils.clip_grad_norm_(whole.parameters(), MAX_GRAD_NORM)))
        if step.denominator:
            optimizer.step()
    weights = {name: parameter.detach() for name, parameter in whole.named_parameters()}
    return Trained(first, losses, norms, weights)


@pytest.mark.parametrize("index", range(len(CASES)), ids=IDS)
def test_every_layout_equals_the_unsplit_model(folders: list[Path], index: int) -> None:
    """CASES C1 to C5, D1, E3, I1: one process, each sequence alone, is what all must equal."""
    (num_stages, sequence_parallel, num_replicas), variant = CASES[index]
    num_ranks = num_stages * sequence_parallel * num_replicas
    trained = read_trained(folders[index], num_ranks, tied=variant.tied)
    expected = train_oracle(variant)
    assert_equal(trained.first, expected.first)
    assert trained.losses == pytest.approx(expected.losses, rel=1e-5)
    assert trained.norms == pytest.approx(expected.norms, rel=1e-5)
    assert trained.losses[0] == pytest.approx(trained.first.loss, rel=1e-6)
    assert trained.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        error = float((trained.weights[name] - weight).norm() / weight.norm())
        assert error < 1e-5, f"{name}: relative error {error:.2e}"
    assert any(expected.losses) == (variant.masked == "some")


def test_the_same_dataset_has_the_same_losses_on_every_layout(folders: list[Path]) -> None:
    same = [
        read_trained(folder, 1, tied=variant.tied).losses
        for folder, (_, variant) in zip(folders, CASES, strict=True)
        if variant is VARIANTS[0]
    ]
    assert len(same) == len(LAYOUTS)
    assert same[0][0] != same[0][1]
    for losses in same[1:]:
        assert losses == pytest.approx(same[0], rel=1e-5)
