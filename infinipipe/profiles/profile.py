"""A profile: what one device needs, in time and in bytes, for the parts of a model."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from pathlib import Path
from typing import Literal, get_args

import msgspec

from infinipipe.errors import InputError
from infinipipe.ir import DType, Model

PROFILE_FORMAT_VERSION = 2
"""Raised when a reader would misread older files; a field that may be missing needs no raise."""

ELEMENT_BYTES: dict[DType, int] = {"float32": 4, "bfloat16": 2}
"""Of a parameter or an activation."""


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The device a profile speaks of."""

    name: str
    kind: Literal["cpu", "cuda"]
    memory_bytes: int
    """Usable by one rank."""
    num_devices: int
    """On one machine; on a CPU a device is one core."""
    capability: str
    """What its kernels are chosen by: a CPU's vector instructions, `sm_90` of a GPU."""


class Curve(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Seconds over a chunk's tokens, linear between the measured sizes and beyond the last."""

    tokens: tuple[int, ...]
    """Ascending, at least two."""
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        """Refuse a curve that has no slope."""
        ascending = all(smaller < larger for smaller, larger in pairwise(self.tokens))
        if len(self.tokens) < 2 or len(self.tokens) != len(self.seconds) or not ascending:
            raise ValueError("a curve needs at least two ascending sizes and as many seconds")


class LayerTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Seconds of one decoder layer for a chunk.

    `curve(tokens) + s_per_pair * pairs + s_per_slice * slices`, and for its slice that has a
    context `s_per_context + s_per_context_token * context + s_per_continued_token * length`
    besides: attention to the context is a second call, whose output is merged with the first's.
    """

    curve: Curve
    s_per_pair: float
    s_per_slice: float
    s_per_context: float
    s_per_context_token: float
    s_per_continued_token: float


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A constant plus a rate; the field that holds one names its units."""

    constant: float
    rate: float


class Links(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Seconds of moving bytes between ranks; exchanges are among `num_ranks` of them.

    What they take among other numbers of ranks is told by `infinipipe.costs.links`.
    """

    transfer_s: Line
    """Per byte, from one rank to another."""
    all_to_all_s: Line
    """Per byte that each rank holds, and of which it keeps its own part."""
    reduce_scatter_s: Line
    """Per byte of the buffer that each rank holds, and of whose sum it gets its part."""
    all_gather_s: Line
    """Per byte of the buffer that each rank gets, of which it held its part."""
    num_ranks: int
    """1 where there was nobody to exchange with, and then all lines are 0."""


class Times(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """Seconds on one device."""

    layer_forward: LayerTime
    layer_backward: LayerTime
    """Without recompute."""
    layer_recompute: LayerTime
    """What dropping a layer's activations adds to its forward and backward, all counted in B."""
    chunk_forward_s: float
    """Per chunk and stage, whatever its size."""
    chunk_backward_s: float
    embedding_forward: Curve
    embedding_backward: Curve
    head_forward: Curve
    """Final norm, head, loss and the head's gradients, which are all computed in F."""
    head_backward: Curve
    optimizer_s: Line
    """Per parameter of the stage."""
    links: Links
    """Between ranks of one node."""
    links_between: Links | None = None
    """Between ranks of different nodes.

    None where there was one node to measure: they are then taken to be as fast as those inside.
    """
    layer_input_backward: LayerTime | None = None
    """I, the gradients of a layer's inputs, without recompute.

    None where B has not been timed in parts.
    """
    layer_weight_backward: LayerTime | None = None
    """W, the gradients of its weights."""

    def __post_init__(self) -> None:
        """Refuse a price of I without one of W, or W without I."""
        if (self.layer_input_backward is None) != (self.layer_weight_backward is None):
            raise ValueError(
                "layer_input_backward and layer_weight_backward are both needed, or neither"
            )


class Bytes(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """Bytes on one device; `_per_token` is per token of the chunk unless it says otherwise.

    The fields named `_peak` are transient: needed only while an op runs.
    """

    static_per_parameter: int
    """On every rank that holds the parameter: itself and its gradient."""
    sharded_per_parameter: int
    """Optimizer state, of which each of the ranks that hold the parameter has an equal part."""
    activation_per_token: float
    """The tensor that travels between stages, and each layer's input."""
    layer_full_per_token: float
    """Kept by a layer that is not recomputed, its input included, without K and V."""
    layer_kv_per_token: float
    """K and V of one layer; kept with the chunk for whole sequences, in the slot for split ones."""
    layer_kv_grad_per_token: float
    """Gradients of K and V of one layer, per token of a split sequence before its last slice."""
    chunk_per_token: float
    """Kept once per chunk on every stage: positions and rotary tables."""
    embedding_per_token: float
    """Kept on the first stage besides."""
    head_per_token: float
    """Kept on the last stage besides."""
    layer_forward_peak: Line
    """Transient in a layer's F, above what it keeps, per token."""
    recompute_forward_peak: Line
    """Transient in the F of a layer that is recomputed, above its input, per token."""
    layer_backward_peak: Line
    """Transient in a layer's B, per token."""
    slice_backward_per_token: float
    """Transient in attention in the B of a split sequence's slice.

    Below 0 where the layer has freed more by then.
    """
    context_per_token: float
    """The same per token of the slice's context."""
    embedding_backward_peak: Line
    head_forward_peak: Line
    """Without logits, per token."""
    head_backward_peak: Line
    logits_per_token: float
    """Per token of the block of logits that exists at a time; see `logits_tokens`."""
    layer_split_per_token: float | None = None
    """Kept by a layer from I to W: the inputs of its products and the gradients of their outputs.

    None where B has not been timed in parts.
    """


SampleOp = Literal["forward", "backward", "recomputed"]
"""What was timed of a layer: F, B, or both together where the layer is recomputed."""
SAMPLE_OPS: tuple[SampleOp, ...] = get_args(SampleOp)


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One raw measurement of a layer and what the fitted model says of it."""

    op: SampleOp
    slices: tuple[tuple[int, int], ...]
    """(start, length) of each."""
    seconds: float
    """Median of the repeats."""
    spread_s: float
    """Between the quartiles of the repeats."""
    num_repeats: int
    fitted_s: float
    held_out: bool
    """Not used in the fit: its error tells what to expect of chunks that were never measured."""


class Accuracy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Relative errors `|fitted / measured - 1|` over samples of one kind."""

    op: SampleOp
    held_out: bool
    num_samples: int
    median_error: float
    p90_error: float
    worst_error: float


class Refinement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One correction of all times by what a run measured."""

    run_sha256: str
    """Of the run's `metrics.jsonl`."""
    num_steps: int
    scale: float
    """By which all times were multiplied."""
    error_before: float
    """Median over the steps of `|predicted / measured - 1|`."""
    error_after: float


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything the planner knows of a device and a model."""

    format_version: int
    infinipipe_version: str
    source: Literal["measured", "analytic"]
    created: str
    """ISO 8601, UTC."""
    software: dict[str, str]
    device: Device
    model: Model
    dtype: DType
    times: Times
    bytes: Bytes
    samples: tuple[Sample, ...]
    accuracy: tuple[Accuracy, ...]
    refinements: tuple[Refinement, ...]

    @property
    def prices_input_weight(self) -> bool:
        """Whether I and W have seconds and bytes."""
        return (
            self.times.layer_input_backward is not None
            and self.bytes.layer_split_per_token is not None
        )


def pack_profile(profile: Profile) -> bytes:
    """Return the profile as msgpack, as a plan holds it: maps have their keys sorted.

    A number that is whole and stands where fractions may is packed as it is when it was read.
    """
    as_read = msgspec.convert(msgspec.to_builtins(profile), Profile)
    return msgspec.msgpack.encode(as_read, order="sorted")


def profile_sha256(profile: Profile) -> str:
    """Return the digest that a plan records."""
    return hashlib.sha256(pack_profile(profile)).hexdigest()


def read_profile(path: Path) -> Profile:
    """Read a profile.

    Raises:
        InputError: there is no such file, or it is not a profile of this format.
    """
    data = _read_bytes(path)
    try:
        _check_version(data, path)
        return msgspec.json.decode(data, type=Profile)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(
            f"{path}: not a profile: {error}; make one with `infinipipe profile`"
        ) from None


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(
            f"{path}: {reason}; make a profile with `infinipipe profile`, "
            "or name one with --profile"
        ) from None


class _Version(msgspec.Struct):
    """The one field that every version of the format has."""

    format_version: int


def _check_version(data: bytes, path: Path) -> None:
    """Refuse another version by its number, not by fields that it may have more or fewer of."""
    version = msgspec.json.decode(data, type=_Version).format_version
    if version != PROFILE_FORMAT_VERSION:
        raise InputError(
            f"{path}: profile format {version}, this infinipipe reads {PROFILE_FORMAT_VERSION}; "
            "profile again"
        )


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile as indented JSON, complete or not at all.

    Raises:
        InputError: it cannot be written.
    """
    plain = msgspec.json.encode(profile, order="sorted")
    indented = msgspec.json.format(plain, indent=2) + b"\n"
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_bytes(indented)
        temporary.replace(path)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; choose another file with --output") from None
    finally:
        temporary.unlink(missing_ok=True)
