"""What the executor and its transport refuse, and the order in which they move tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from infinipipe.errors import RunError
from infinipipe.runtime.executor import HANDLERS
from infinipipe.runtime.model import StageModel
from infinipipe.runtime.prepare import RUNNABLE
from infinipipe.runtime.ranks import Channel
from tests.runtime.loopback import LoopbackTransport
from tests.runtime.replay import MemoryDataset, hand_header, hand_step, replay, small_model


def test_an_output_of_another_size_than_planned_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES E6: the plan says 8 tokens, the stage produces 7."""
    run_layers = StageModel.run_layers

    def drop_a_token(self: StageModel, *arguments: object) -> Tensor:
        return run_layers(self, *arguments)[:, :7]

    monkeypatch.setattr(StageModel, "run_layers", drop_a_token)
    header = hand_header(small_model(), (4,))
    dataset = MemoryDataset([8])
    step = hand_step(header, dataset, [[[(0, 0, 8)]]])
    message = (
        r"stage 0, step 0, chunk 0, op 0F0: .*"
        r"the plan says \(1, 8, 32\), the stage produced \(1, 7, 32\)"
    )
    with pytest.raises(RunError, match=message) as caught:
        replay(header, step, dataset)
    assert isinstance(caught.value.__cause__, AssertionError)


def test_what_a_plan_may_hold_is_what_the_executor_handles() -> None:
    assert set(RUNNABLE) == HANDLERS.keys()


def test_a_tensor_of_another_size_or_type_than_expected_is_refused() -> None:
    first, second = LoopbackTransport.connect(2)
    second.begin(Channel.DOWNSTREAM, [(1, 4), (1, 3)], torch.float32)
    first.send(Channel.DOWNSTREAM, torch.zeros(1, 4))
    first.send(Channel.DOWNSTREAM, torch.zeros(1, 5))
    assert second.receive(Channel.DOWNSTREAM).shape == (1, 4)
    with pytest.raises(AssertionError, match=r"received \(1, 5\), the plan says \(1, 3\)"):
        second.receive(Channel.DOWNSTREAM)
    first.send(Channel.DOWNSTREAM, torch.zeros(1, 2))
    second.begin(Channel.DOWNSTREAM, [(1, 2)], torch.bfloat16)
    with pytest.raises(AssertionError, match=r"received torch.float32, the plan says torch.bf"):
        second.receive(Channel.DOWNSTREAM)
    second.begin(Channel.UPSTREAM, [(1, 1)], torch.float32)
    with pytest.raises(AssertionError, match="1 tensors to come"):
        second.finish()
