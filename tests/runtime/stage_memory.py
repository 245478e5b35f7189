"""What a stage needs by count and by the cost model."""

from __future__ import annotations

import msgspec
import numpy as np
import torch

from infinipipe.costs import CostModel, PackedProgram, Recompute
from infinipipe.ir import Model, Op, OpKind, Step, verify_step
from infinipipe.measure.bench import Bench
from infinipipe.measure.footprint import Footprint
from infinipipe.profiles import Bytes, Profile
from infinipipe.runtime.data import StepData
from infinipipe.runtime.executor import Executor
from infinipipe.runtime.memory import CpuMemory, track_memory
from infinipipe.runtime.model import StageModel
from infinipipe.runtime.optimizer import Optimizer
from tests.runtime.loopback import LoopbackTransport
from tests.runtime.replay import CPU, MemoryDataset, hand_header, small_model

F, B = OpKind.FORWARD, OpKind.BACKWARD
MODEL = small_model(hidden_size=64, intermediate_size=176, head_dim=16)


def measure_bytes(model: Model, device: torch.device) -> Bytes:
    """Measure only the bytes of a model, as profiling does."""
    bench = Bench(model, device)
    with track_memory(device, ()) as memory:
        bench.warm_up()
        return Footprint(bench, memory).count()


def gpipe(step: Step, in_flight: int) -> Step:
    """Give the only stage a program that keeps `in_flight` chunks between their F and B."""
    (replica,) = step.replicas
    count = len(replica.chunks)
    forwards, backwards = [Op(F, c) for c in range(count)], [Op(B, c) for c in range(count)]
    program = forwards[:in_flight]
    for done in range(count):
        program += [backwards[done], *forwards[in_flight + done : in_flight + done + 1]]
    replica = msgspec.structs.replace(replica, programs=(tuple(program),))
    return msgspec.structs.replace(step, replicas=(replica,))


def predicted_and_measured(profile: Profile, step: Step) -> tuple[float, float]:
    """Return the peak bytes of the only stage by the cost model and by count."""
    header = hand_header(MODEL, (4,), batch_size=100)
    verify_step(header, step)
    (replica,) = step.replicas
    costs = CostModel(profile, header.layout, header.stages, header.logits_tokens)
    costed = costs.price(replica.chunks, step.sequences)
    ledger = costs.memory(0, costed, PackedProgram.pack(replica.programs[0]))
    recompute = Recompute(np.array(replica.recompute[0]), np.array(replica.keep_attention[0]))
    predicted = ledger.during(recompute).max()
    model = StageModel(MODEL, header.stages[0], CPU)
    model.init_random(0)
    optimizer = Optimizer(model.flat, None, lr=0.0)
    static = [model.flat.parameters, model.flat.gradients, *optimizer.state_tensors()]
    executor = Executor(header, 0, model, LoopbackTransport.connect(1)[0])
    data = StepData(MemoryDataset([s.length for s in step.sequences]), step, "token")
    with CpuMemory(static) as memory:
        executor.run(step, replica, data)
    return float(predicted), float(memory.peak_bytes)
