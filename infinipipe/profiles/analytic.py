"""Profiles from data sheets: a roofline for a llama-like layer in bfloat16. Nothing here was measured.

Every part of a layer takes the longer of what its arithmetic and its memory traffic need:

* matmuls: tiles of 128 x 128 in waves over the device's multiprocessors, at `_MATMUL_EFFICIENCY` of the
  peak. The last wave is half idle on average and the first is never shorter than a tile: so efficiency
  falls for small chunks, to a half at half a wave.
* attention: flash attention's products at `_ATTENTION_EFFICIENCY` of the peak, per pair.
* the rest (norms, rotary embedding, activation, residuals): memory traffic at `_COPY_EFFICIENCY` of the bandwidth.
* and never less than it takes to launch its kernels.

I and W share what B does: I has the products that give gradients of inputs, attention and the rest, W the products that
give gradients of weights. Together they cost more than B, as what lies between is not at hand any more: W reads the
inputs of its products and the gradients of their outputs, `layer_split_per_token` bytes, once more.

Bytes are those that the Hugging Face layer saves for its backward: the norms compute in float32 and the
products of the MLP are all kept. Static bytes: parameter 2, and in float32 gradient, two moments and master copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from infinipipe import __version__
from infinipipe.errors import InputError
from infinipipe.ir import Model
from infinipipe.profiles.models import logits_tokens
from infinipipe.profiles.profile import (
    PROFILE_FORMAT_VERSION,
    Bytes,
    Curve,
    Device,
    LayerTime,
    Line,
    Profile,
    Times,
)


@dataclass(frozen=True)
class _Sheet:
    """One device's data sheet."""

    flops: float
    """Dense bfloat16 per second."""
    bandwidth: float
    """Bytes per second of its memory."""
    link: float
    """Bytes per second to a neighbour, one way: half of what NVLink is sold as."""
    memory_gib: int
    """As the driver reports it, rounded down."""
    processors: int
    capability: str
    attention_efficiency: tuple[float, float]
    """Forward and backward: flash attention 2 suits the A100's generation better than the H100's."""


_AMPERE, _HOPPER = (0.60, 0.52), (0.42, 0.36)
_SHEETS = {
    "a800-80g": _Sheet(312e12, 2.0e12, 200e9, 79, 108, "sm_80", _AMPERE),
    "a100-80g": _Sheet(312e12, 2.0e12, 300e9, 79, 108, "sm_80", _AMPERE),
    "h100-80g": _Sheet(989e12, 3.35e12, 450e9, 79, 132, "sm_90", _HOPPER),
    "h200-141g": _Sheet(989e12, 4.8e12, 450e9, 139, 132, "sm_90", _HOPPER),
}
DEVICES = tuple(_SHEETS)
"""Names that `analytic_profile` knows."""

# One H200 was measured at 788 of 989 TFLOP/s for an 8192^3 product and 4.3 of 4.8 TB/s for a copy;
# the shapes of a layer are less regular than a cube, so a little less is assumed.
_MATMUL_EFFICIENCY = 0.78
_COPY_EFFICIENCY = 0.85
_LINK_EFFICIENCY = 0.75
_TILE = 128
_LAUNCH_S = 4e-6
_LAYER_KERNELS = 30
_WEIGHT_KERNELS = 14
"""Of W: each of a layer's products and the addition to the gradient."""
_HEAD_KERNELS = 10
_MERGE_KERNELS = 6
_CHUNK_FORWARD_S, _CHUNK_BACKWARD_S = 200e-6, 300e-6
"""Unpacking a chunk, building its tables and handing its transfers over."""
_SLICE_S = 3e-6
_TRANSFER_S = 20e-6
_OPTIMIZER_BYTES = 34
"""Read and written per parameter by AdamW: 18 resident bytes less what is only read or only written."""
_RESERVED_GIB = 2
"""The context of the driver and the buffers of its collectives."""
_DEVICES_PER_SERVER = 8
_KNOTS = (
    64,
    128,
    256,
    384,
    512,
    768,
    1024,
    1536,
    2048,
    3072,
    4096,
    6144,
    8192,
    12288,
    16384,
    32768,
    65536,
)
_BF16, _FP32, _INT64 = 2, 4, 8
_STATIC_BYTES = 18


def analytic_profile(model: Model, device: str) -> Profile:
    """Return the profile that a device's data sheet implies for a model in bfloat16.

    Raises:
        InputError: the device is not one of `DEVICES`.
    """
    if device not in _SHEETS:
        raise InputError(f"--analytic {device}: no such device; known are {', '.join(DEVICES)}")
    sheet = _SHEETS[device]
    return Profile(
        format_version=PROFILE_FORMAT_VERSION,
        infinipipe_version=__version__,
        source="analytic",
        created="2026-01-01T00:00:00Z",
        software={},
        device=Device(
            name=device,
            kind="cuda",
            memory_bytes=(sheet.memory_gib - _RESERVED_GIB) * 2**30,
            num_devices=_DEVICES_PER_SERVER,
            capability=sheet.capability,
        ),
        model=model,
        dtype="bfloat16",
        times=_times(model, sheet),
        bytes=_bytes(model),
        samples=(),
        accuracy=(),
        refinements=(),
    )


def _times(model: Model, sheet: _Sheet) -> Times:
    copy = sheet.bandwidth * _COPY_EFFICIENCY
    embedding = model.hidden_size * _BF16
    gradient = model.embedding_parameters * (_BF16 + _BF16 + _FP32 + _FP32)
    forward = _layer_time(model, sheet, backward=False)
    return Times(
        layer_forward=forward,
        layer_backward=_layer_time(model, sheet, backward=True),
        layer_recompute=forward,
        chunk_forward_s=_CHUNK_FORWARD_S,
        chunk_backward_s=_CHUNK_BACKWARD_S,
        embedding_forward=_curve(lambda tokens: max(2 * embedding * tokens / copy, _LAUNCH_S)),
        embedding_backward=_curve(lambda tokens: (3 * embedding * tokens + gradient) / copy),
        head_forward=_curve(lambda tokens: _head_seconds(model, sheet, tokens)),
        head_backward=_curve(lambda tokens: max(6 * embedding * tokens / copy, 4 * _LAUNCH_S)),
        optimizer_s=Line(constant=100e-6, rate=_OPTIMIZER_BYTES / copy),
        transfer_s=Line(constant=_TRANSFER_S, rate=1 / (sheet.link * _LINK_EFFICIENCY)),
        # Each rank keeps its own share and sends the others over one link each way.
        all_to_all_s=Line(
            constant=_TRANSFER_S,
            rate=(_DEVICES_PER_SERVER - 1) / _DEVICES_PER_SERVER / (sheet.link * _LINK_EFFICIENCY),
        ),
        all_to_all_ranks=_DEVICES_PER_SERVER,
        layer_input_backward=_layer_input_time(model, sheet),
        layer_weight_backward=_layer_weight_time(model, sheet),
    )


def _curve(seconds: Callable[[int], float]) -> Curve:
    return Curve(tokens=_KNOTS, seconds=tuple(seconds(tokens) for tokens in _KNOTS))


def _layer_time(model: Model, sheet: _Sheet, *, backward: bool) -> LayerTime:
    """Backward does two products for each of forward's, attention's does five for two and all traffic doubles."""
    work = 2 if backward else 1
    flops_per_pair = (10 if backward else 4) * model.num_heads * model.head_dim
    attention = sheet.flops * sheet.attention_efficiency[backward]
    copy = sheet.bandwidth * _COPY_EFFICIENCY

    def seconds(tokens: int) -> float:
        traffic = tokens * _layer_traffic(model) / copy
        return work * max(
            _layer_matmul_seconds(model, sheet, tokens) + traffic, _LAYER_KERNELS * _LAUNCH_S
        )

    # The second call reads K and V of the context, and backward adds to their float32 gradients besides;
    # merging reads two outputs and writes one.
    context = (2 * _BF16 + backward * 2 * (_BF16 + 2 * _FP32)) * model.kv_size
    merged = 3 * _BF16 * model.num_heads * model.head_dim
    return LayerTime(
        curve=_curve(seconds),
        s_per_pair=flops_per_pair / attention,
        s_per_slice=work * _SLICE_S,
        s_per_context=_MERGE_KERNELS * _LAUNCH_S,
        s_per_context_token=context / copy,
        s_per_continued_token=merged / copy,
    )


def _layer_input_time(model: Model, sheet: _Sheet) -> LayerTime:
    """B without the products of W."""
    copy = sheet.bandwidth * _COPY_EFFICIENCY

    def seconds(tokens: int) -> float:
        matmuls, traffic = (
            _layer_matmul_seconds(model, sheet, tokens),
            tokens * _layer_traffic(model) / copy,
        )
        return max(matmuls + 2 * traffic, (2 * _LAYER_KERNELS - _WEIGHT_KERNELS) * _LAUNCH_S)

    return replace(_layer_time(model, sheet, backward=True), curve=_curve(seconds))


def _layer_weight_time(model: Model, sheet: _Sheet) -> LayerTime:
    """Products of a layer's inputs and output gradients, which it reads anew. Attention has no weights."""
    copy = sheet.bandwidth * _COPY_EFFICIENCY

    def seconds(tokens: int) -> float:
        read = tokens * _layer_split_bytes(model) / copy
        return max(_layer_matmul_seconds(model, sheet, tokens) + read, _WEIGHT_KERNELS * _LAUNCH_S)

    return LayerTime(
        curve=_curve(seconds),
        s_per_pair=0.0,
        s_per_slice=0.0,
        s_per_context=0.0,
        s_per_context_token=0.0,
        s_per_continued_token=0.0,
    )


def _layer_matmul_seconds(model: Model, sheet: _Sheet, tokens: int) -> float:
    return sum(
        _matmul_seconds(sheet, tokens, inputs, outputs) for inputs, outputs in _layer_matmuls(model)
    )


def _layer_matmuls(model: Model) -> list[tuple[int, int]]:
    """Widths in and out of a layer's products."""
    hidden, query, inner = (
        model.hidden_size,
        model.num_heads * model.head_dim,
        model.intermediate_size,
    )
    attention = [(hidden, query), (hidden, model.kv_size), (hidden, model.kv_size), (query, hidden)]
    return [*attention, (hidden, inner), (hidden, inner), (inner, hidden)]


def _matmul_seconds(sheet: _Sheet, tokens: int, inputs: int, outputs: int) -> float:
    tiles = math.ceil(tokens / _TILE) * math.ceil(outputs / _TILE)
    waves = max(1.0, tiles / sheet.processors + 0.5)
    tile = 2 * _TILE**2 * inputs / (sheet.flops * _MATMUL_EFFICIENCY / sheet.processors)
    moved = _BF16 * (tokens * (inputs + outputs) + inputs * outputs)
    return max(waves * tile, moved / (sheet.bandwidth * _COPY_EFFICIENCY))


def _layer_traffic(model: Model) -> int:
    """Bytes per token that the memory-bound parts of a layer's forward read and write."""
    norms = 2 * model.hidden_size * (5 * _BF16 + 6 * _FP32)
    rotary = 8 * _BF16 * (model.num_heads * model.head_dim + model.kv_size)
    activation = 5 * _BF16 * model.intermediate_size
    residuals = 2 * 3 * _BF16 * model.hidden_size
    return norms + rotary + activation + residuals


def _layer_split_bytes(model: Model) -> int:
    """Bytes per token of the inputs of a layer's products and of their outputs' gradients.

    Q, K and V have one input, and so have the first two products of the MLP. The norms are no part of it: the gradients
    of their weights fall off where those of their inputs are computed.
    """
    hidden, query, inner = (
        model.hidden_size,
        model.num_heads * model.head_dim,
        model.intermediate_size,
    )
    inputs = hidden + query + hidden + inner
    outputs = query + 2 * model.kv_size + hidden + 2 * inner + hidden
    return _BF16 * (inputs + outputs)


def _head_seconds(model: Model, sheet: _Sheet, tokens: int) -> float:
    """Logits, loss and both gradients, a piece at a time; a part of a piece costs its share of one."""
    piece = min(tokens, logits_tokens(model.vocabulary_size))
    hidden, vocabulary = model.hidden_size, model.vocabulary_size
    products = 2 * _matmul_seconds(sheet, piece, hidden, vocabulary) + _matmul_seconds(
        sheet, hidden, piece, vocabulary
    )
    logits = piece * vocabulary * 5 * (_BF16 + _FP32)
    gradient = model.embedding_parameters * (_BF16 + _FP32 + _FP32)
    one = max(
        products + (logits + gradient) / (sheet.bandwidth * _COPY_EFFICIENCY),
        _HEAD_KERNELS * _LAUNCH_S,
    )
    return one * tokens / piece


def _bytes(model: Model) -> Bytes:
    hidden, inner, query = (
        model.hidden_size,
        model.intermediate_size,
        model.num_heads * model.head_dim,
    )
    norms = 2 * (hidden * (_FP32 + _BF16 + _BF16) + _FP32)
    attention = 2 * _BF16 * query + _FP32 * model.num_heads
    largest = hidden * max(inner, query)
    return Bytes(
        static_per_parameter=_STATIC_BYTES,
        activation_per_token=_BF16 * hidden,
        layer_full_per_token=norms + attention + 4 * _BF16 * inner,
        layer_kv_per_token=2 * _BF16 * model.kv_size,
        layer_kv_grad_per_token=2 * _FP32 * model.kv_size,
        chunk_per_token=2 * _INT64 + 2 * _BF16 * model.head_dim,
        embedding_per_token=_INT64,
        head_per_token=_INT64 + _BF16 * hidden,
        layer_forward_peak=Line(constant=0.0, rate=_BF16 * 3 * inner + _FP32 * hidden),
        recompute_forward_peak=Line(
            constant=0.0, rate=_BF16 * (3 * inner + 2 * hidden) + _FP32 * hidden
        ),
        layer_backward_peak=Line(
            constant=_BF16 * largest, rate=_BF16 * (3 * inner + 2 * hidden) + _FP32 * hidden
        ),
        slice_backward_per_token=2 * _BF16 * query,
        context_per_token=2 * _BF16 * model.kv_size,
        embedding_backward_peak=Line(
            constant=_BF16 * model.embedding_parameters, rate=_FP32 * hidden
        ),
        head_forward_peak=Line(
            constant=_BF16 * model.embedding_parameters, rate=2 * _FP32 * hidden
        ),
        head_backward_peak=Line(constant=0.0, rate=(_BF16 + 2 * _FP32) * hidden),
        logits_per_token=model.vocabulary_size * (_BF16 + 2 * _FP32),
        layer_split_per_token=_layer_split_bytes(model),
    )
