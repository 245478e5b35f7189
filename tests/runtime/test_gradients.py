"""Gradients of a step: parts of one buffer, each added up among the ranks that hold its weight."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from infinipipe.ir import Layout, Stage
from infinipipe.runtime.gradients import MAX_GRAD_NORM, Gradients
from infinipipe.runtime.model import EMBEDDING, HEAD, StageModel
from infinipipe.runtime.ranks import Ranks
from tests.runtime.replay import CPU, small_model

LAYOUT = Layout(num_stages=2, num_replicas=2)
ENDS = (
    Stage(first_layer=0, num_layers=2, embedding=True, head=False),
    Stage(first_layer=2, num_layers=2, embedding=False, head=True),
)


def make_stage(index: int, *, tied: bool) -> StageModel:
    model = StageModel(small_model(tied=tied), ENDS[index], CPU)
    model.init_random(0)
    return model


def gradients_of(model: StageModel, index: int, *, tied: bool, copies: bool = True) -> Gradients:
    groups = SimpleNamespace(copies="copies" if copies else None, tied="tied" if tied else None)
    return Gradients(model, Ranks(LAYOUT, index), groups)


def fill(model: StageModel) -> None:
    """Give every gradient numbers of its own, as B does."""
    for number, parameter in enumerate(model.global_parameters().values(), start=1):
        assert parameter.grad is not None
        parameter.grad.fill_(float(number))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("copies", [False, True])
def test_every_gradient_is_added_up_once_among_those_that_hold_its_weight(
    monkeypatch: pytest.MonkeyPatch, index: int, tied: bool, copies: bool
) -> None:
    model = make_stage(index, tied=tied)
    calls: list[str] = []

    def all_reduce(tensor: Tensor, group: str) -> None:
        calls.append(group)
        # Ten ranks that all hold the same, and two ends.
        tensor.mul_({"copies": 10, "tied": 2}[group])

    monkeypatch.setattr("torch.distributed.all_reduce", all_reduce)
    fill(model)
    gradients_of(model, index, tied=tied, copies=copies).sum_over_ranks()
    own_tied = (EMBEDDING, HEAD)[index]
    for number, (name, parameter) in enumerate(model.global_parameters().items(), start=1):
        both_ends = 2 if tied and name == own_tied else 1
        factor = both_ends * (10 if copies else 1)
        assert parameter.grad is not None
        assert parameter.grad.unique().tolist() == [number * factor], name
    # Ends first, so that copies at both add up the same.
    assert calls[:tied] == ["tied"] * tied
    assert set(calls[tied:]) == {"copies"} if copies else not calls[tied:]


def test_all_gradients_are_parts_of_one_buffer_and_go_to_zero_together() -> None:
    model = make_stage(0, tied=False)
    fill(model)
    parameters = list(model.global_parameters().values())
    assert model.gradients.numel() == sum(parameter.numel() for parameter in parameters)
    expected = [torch.full((p.numel(),), float(n)) for n, p in enumerate(parameters, start=1)]
    assert torch.equal(model.gradients, torch.cat(expected))
    gradients_of(model, 0, tied=False).zero()
    for parameter in parameters:
        assert parameter.grad is not None
        assert not parameter.grad.any()


@pytest.mark.parametrize("norm", [0.5, 4.0])
def test_clipping_scales_all_gradients_to_the_largest_norm(norm: float) -> None:
    model = make_stage(1, tied=False)
    model.gradients.fill_(norm / model.gradients.numel() ** 0.5)
    gradients_of(model, 1, tied=False).clip(norm)
    actual = float(torch.linalg.vector_norm(model.gradients, dtype=torch.float64))
    assert actual == pytest.approx(min(norm, MAX_GRAD_NORM), rel=1e-5)
