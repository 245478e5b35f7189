"""Transport and exchange within one process, whose ranks are threads."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Iterable, Mapping
from functools import partial

import torch
from torch import Tensor

from infinipipe.runtime.attention import NO_EXCHANGE, Exchange, HeadExchange
from infinipipe.runtime.ranks import Channel
from infinipipe.runtime.transport import Shape
from tests.processes import HARD_LIMIT_S

TIMEOUT_S = HARD_LIMIT_S / 2
"""A stage that waits so long for another hangs, and says so before its thread is given up."""

Queue = queue.Queue[Tensor]


class LoopbackTransport:
    """See `infinipipe.runtime.transport.Transport`.

    It never blocks a sender, and checks shapes and types of what arrives.
    """

    def __init__(self, sources: Mapping[Channel, Queue], targets: Mapping[Channel, Queue]) -> None:
        self._sources = sources
        self._targets = targets
        self._expected: dict[Channel, deque[tuple[Shape, torch.dtype]]] = {}

    @staticmethod
    def connect(num_stages: int) -> list[LoopbackTransport]:
        """Return the transports of a pipeline's stages."""
        # Queue i lies between stages i - 1 and i; those at both ends stay empty.
        down = [Queue() for _ in range(num_stages + 1)]
        up = [Queue() for _ in range(num_stages + 1)]
        return [
            LoopbackTransport(
                sources={Channel.DOWNSTREAM: down[s], Channel.UPSTREAM: up[s + 1]},
                targets={Channel.DOWNSTREAM: down[s + 1], Channel.UPSTREAM: up[s]},
            )
            for s in range(num_stages)
        ]

    def begin(self, channel: Channel, shapes: Iterable[Shape], dtype: torch.dtype) -> None:
        self._expected[channel] = deque((shape, dtype) for shape in shapes)

    def receive(self, channel: Channel) -> Tensor:
        tensor = self._sources[channel].get(timeout=TIMEOUT_S)
        shape, dtype = self._expected[channel].popleft()
        actual = tuple(tensor.shape)
        assert actual == shape, f"received {actual}, the plan says {shape}"
        assert tensor.dtype == dtype, f"received {tensor.dtype}, the plan says {dtype}"
        return tensor

    def send(self, channel: Channel, tensor: Tensor) -> None:
        self._targets[channel].put(tensor)

    def finish(self) -> None:
        for channel, expected in self._expected.items():
            assert not expected, f"the step ended with {len(expected)} tensors to come on {channel}"


def loopback_exchanges(num_ranks: int) -> list[Exchange]:
    """Return the exchanges of the ranks of a stage that share its sequences."""
    if num_ranks == 1:
        return [NO_EXCHANGE]
    # Queue [i][j] leads from rank i to rank j.
    queues = [[Queue() for _ in range(num_ranks)] for _ in range(num_ranks)]
    return [
        HeadExchange(num_ranks, index, partial(_all_to_all, queues, index))
        for index in range(num_ranks)
    ]


def _all_to_all(
    queues: list[list[Queue]],
    index: int,
    received: Tensor,
    sent: Tensor,
    received_rows: list[int],
    sent_rows: list[int],
) -> None:
    """As torch.distributed has it: parts of contiguous tensors, along their first dim."""
    assert received.is_contiguous()
    assert sent.is_contiguous()
    for target, part in zip(queues[index], sent.split(sent_rows), strict=True):
        target.put(part.clone())
    for source, rows in zip(queues, received.split(received_rows), strict=True):
        part = source[index].get(timeout=TIMEOUT_S)
        assert part.shape == rows.shape
        rows.copy_(part)
