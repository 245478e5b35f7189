"""Measures a model's parts on this machine, through the very code that will train it.

Memory is counted while time is taken, and on a CPU the other cores work meanwhile, as in a run.
Nothing of this belongs to the planner: only the command line imports it.
"""

from __future__ import annotations

import datetime
import time
from dataclasses import dataclass

import torch

from infinipipe import __version__
from infinipipe.aliases import Progress
from infinipipe.errors import InputError
from infinipipe.ir import Model
from infinipipe.measure.background_load import start_background_load
from infinipipe.measure.bench import Bench
from infinipipe.measure.footprint import Footprint
from infinipipe.measure.machine import (
    choose_device,
    count_devices,
    describe_device,
    describe_software,
    limit_memory,
)
from infinipipe.measure.samples import fit_survey, make_samples, measure_accuracy
from infinipipe.measure.survey import FULL, QUICK, Effort, OutOfMemory, Survey
from infinipipe.profiles import Bytes, Curve, Line, Links, Profile, Times
from infinipipe.profiles.profile import PROFILE_FORMAT_VERSION
from infinipipe.runtime.memory import track_memory

_MOST_RANKS = 8
"""As many as a server has GPUs. Of a CPU's cores more would only take longer to start."""

# What the parts besides a layer's times take about, for the progress.
_START_S = 5.0
_ENDS_S = 0.5
_BYTES_S = 0.5
_LINKS_S = 1.0

# The median of an odd number is one of them. The shorter what is timed, the more repeats.
_END_REPEATS = 5
_OPTIMIZER_REPEATS = 15
_OVERHEAD_REPEATS = 51


@dataclass(frozen=True)
class _Parts:
    """What was measured besides the layer."""

    ends: dict[str, Curve]
    chunk_s: tuple[float, float]
    optimizer_s: Line
    bytes: Bytes


def measure_profile(model: Model, *, device: str, quick: bool, progress: Progress) -> Profile:
    """Measure a model on this machine.

    Args:
        model: its shape; one decoder layer of it is built, and its embedding and head.
        device: `auto`, `cpu` or `cuda`.
        quick: measure fewer chunks, less often.
        progress: called with how much is done and how much there is.

    Raises:
        InputError: there is no such device, or a layer does not fit into its memory.
        RunError: a process that works beside the measurement has failed.
    """
    chosen = choose_device(device)
    if chosen.type == "cpu":
        # A CPU device is one core.
        torch.set_num_threads(1)
    effort = QUICK if quick else FULL
    clock = _Clock(progress, effort)
    num_ranks = min(count_devices(chosen), _MOST_RANKS)
    with start_background_load(model, chosen.type, num_ranks) as background_load:
        background_load.wait_until_busy()
        try:
            with limit_memory(chosen):
                survey, parts = _measure(model, chosen, effort, clock)
        except OutOfMemory:
            raise InputError(
                f"{model.name}: a layer with embedding, head and a chunk of 1,024 tokens does not "
                "fit into the memory of this device; profile on a larger one, or give "
                "--analytic DEVICE"
            ) from None
        if chosen.type == "cuda":
            # Another process measures links with this device now.
            torch.cuda.empty_cache()
        links = background_load.measure_links()
        clock.done(_LINKS_S)
    return _assemble(model, chosen, survey, parts, links)


class _Clock:
    """Turns what is done into per cent of the time."""

    def __init__(self, progress: Progress, effort: Effort) -> None:
        self._progress = progress
        self._total_s = _START_S + effort.seconds + _ENDS_S + _BYTES_S + _LINKS_S
        self._passed_s = 0.0
        self._shown = 0

    def show(self, seconds: float) -> None:
        """Show that so many seconds of the part that runs have passed."""
        percent = round(100 * (self._passed_s + seconds) / self._total_s)
        # A survey may correct its share downwards; what is shown never falls.
        self._shown = max(self._shown, percent)
        self._progress(self._shown, 100)

    def done(self, seconds: float) -> None:
        """Show that a part is done, which takes so many seconds."""
        self._passed_s += seconds
        self.show(0.0)


def _measure(
    model: Model, device: torch.device, effort: Effort, clock: _Clock
) -> tuple[Survey, _Parts]:
    bench = Bench(model, device)
    with track_memory(device, ()) as memory:
        bench.warm_up()
        clock.done(_START_S)
        survey = Survey(
            bench.time_layer,
            effort,
            time.perf_counter,
            lambda share: clock.show(share * effort.seconds),
        )
        survey.run()
        clock.done(effort.seconds)
        ends = bench.end_curves(survey.whole_sizes, _END_REPEATS)
        chunk_s = bench.chunk_overheads(_OVERHEAD_REPEATS)
        optimizer_s = bench.optimizer_line(_OPTIMIZER_REPEATS)
        clock.done(_ENDS_S)
        num_bytes = Footprint(bench, memory).count()
        clock.done(_BYTES_S)
    return survey, _Parts(ends, chunk_s, optimizer_s, num_bytes)


def _assemble(
    model: Model, device: torch.device, survey: Survey, parts: _Parts, links: Links
) -> Profile:
    layer = fit_survey(survey)
    samples = make_samples(survey, layer)
    forward, backward, recompute = layer
    chunk_forward_s, chunk_backward_s = parts.chunk_s
    return Profile(
        format_version=PROFILE_FORMAT_VERSION,
        infinipipe_version=__version__,
        source="measured",
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        software=describe_software(device),
        device=describe_device(device),
        model=model,
        dtype="float32",
        times=Times(
            layer_forward=forward,
            layer_backward=backward,
            layer_recompute=recompute,
            chunk_forward_s=chunk_forward_s,
            chunk_backward_s=chunk_backward_s,
            embedding_forward=parts.ends["embedding_forward"],
            embedding_backward=parts.ends["embedding_backward"],
            head_forward=parts.ends["head_forward"],
            head_backward=parts.ends["head_backward"],
            optimizer_s=parts.optimizer_s,
            links=links,
        ),
        bytes=parts.bytes,
        samples=samples,
        accuracy=measure_accuracy(samples),
        refinements=(),
    )
