"""Profiles from data sheets: nothing here was measured.

Times are those of a roofline (`infinipipe.profiles.roofline`). Bytes are those that the Hugging
Face layer saves for its backward: the norms compute in float32 and the products of the MLP are
all kept.
"""

from __future__ import annotations

from infinipipe import __version__
from infinipipe.errors import InputError
from infinipipe.ir import Model
from infinipipe.profiles.profile import (
    PROFILE_FORMAT_VERSION,
    Bytes,
    Device,
    Line,
    Links,
    Profile,
    Times,
)
from infinipipe.profiles.roofline import BF16, FP32, Roofline, query_size, weight_input_bytes
from infinipipe.profiles.sheets import SHEETS, Sheet

DEVICES = tuple(SHEETS)
"""Names that `analytic_profile` knows."""

_CREATED = "2026-01-01T00:00:00Z"
"""The same for all, so that a model and a device always give the same file."""
_DEVICES_PER_SERVER = 8
"""As in the servers that these devices are sold in."""
_RESERVED_GIB = 2
"""The context of the driver and the buffers of its collectives."""
_STATIC_BYTES = 6
"""Per parameter: itself in bfloat16, and its gradient in float32."""
_SHARDED_BYTES = 12
"""Per parameter, in float32: two moments and the master copy."""
_OPTIMIZER_BYTES = 34
"""Read and written per parameter by AdamW: 18 bytes twice, less what is only read."""
_INT64 = 8
"""Bytes of a token's id, target or position."""

# Assumed, not measured: the order of magnitude of what PyTorch's host code takes.
_CHUNK_FORWARD_S = 200e-6
"""Unpacking a chunk, building its tables and handing its transfers over."""
_CHUNK_BACKWARD_S = 300e-6
"""The same on the way back, and starting autograd; assumed, not measured."""
_OPTIMIZER_S = 100e-6
"""Launches of the norm, clipping and the update, whatever the size; assumed, not measured."""
_TRANSFER_S = 20e-6
"""Of latency within a node, whatever the size."""
_TRANSFER_BETWEEN_S = 30e-6
"""The same between two nodes, through an adapter at each end."""


def analytic_profile(model: Model, device: str) -> Profile:
    """Return the profile that a device's data sheet implies for a model in bfloat16.

    Raises:
        InputError: the device is not one of `DEVICES`.
    """
    if device not in SHEETS:
        raise InputError(f"--analytic {device}: no such device; known are {', '.join(DEVICES)}")
    sheet = SHEETS[device]
    return Profile(
        format_version=PROFILE_FORMAT_VERSION,
        infinipipe_version=__version__,
        source="analytic",
        created=_CREATED,
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


def _times(model: Model, sheet: Sheet) -> Times:
    roofline = Roofline(model, sheet)
    forward = roofline.layer_forward()
    return Times(
        layer_forward=forward,
        layer_backward=roofline.layer_backward(),
        # It runs F again.
        layer_recompute=forward,
        chunk_forward_s=_CHUNK_FORWARD_S,
        chunk_backward_s=_CHUNK_BACKWARD_S,
        embedding_forward=roofline.embedding_forward(),
        embedding_backward=roofline.embedding_backward(),
        head_forward=roofline.head_forward(),
        head_backward=roofline.head_backward(),
        optimizer_s=Line(constant=_OPTIMIZER_S, rate=_OPTIMIZER_BYTES / sheet.copy_bandwidth),
        links=_links(_TRANSFER_S, sheet.link_bandwidth, _DEVICES_PER_SERVER, sheet),
        links_between=_links(
            _TRANSFER_BETWEEN_S, sheet.link_between_bandwidth, _DEVICES_PER_SERVER, sheet
        ),
        layer_input_backward=roofline.layer_input_backward(),
        layer_weight_backward=roofline.layer_weight_backward(),
    )


def _links(latency_s: float, bandwidth: float, num_ranks: int, sheet: Sheet) -> Links:
    """Return what links of such a latency and of so many bytes per second each way take."""
    # Each rank keeps its own part and sends the others. In an exchange all go at once; in a ring
    # each part goes hop by hop to where it belongs, and no hop starts before the one before it.
    hops = num_ranks - 1
    sent_s = hops / num_ranks / bandwidth
    ring = Line(constant=hops * latency_s, rate=sent_s)
    # Attention brings what it exchanges into the order of the ranks first, or last.
    copied_s = 2 / sheet.copy_bandwidth
    return Links(
        transfer_s=Line(constant=latency_s, rate=1 / bandwidth),
        all_to_all_s=Line(constant=latency_s, rate=sent_s + copied_s),
        reduce_scatter_s=ring,
        all_gather_s=ring,
        num_ranks=num_ranks,
    )


def _bytes(model: Model) -> Bytes:
    hidden = model.hidden_size
    inner = model.intermediate_size
    query = query_size(model)
    # Of each norm its input in float32, normalised and weighted in bfloat16, and its scale.
    norms = 2 * (hidden * (FP32 + BF16 + BF16) + FP32)
    # Q and the output, and the log-sum-exp of each head.
    attention = 2 * BF16 * query + FP32 * model.num_heads
    # Three inner tensors of the MLP and a hidden one in float32; two more hidden ones in B, and
    # in F where the layer keeps nothing that they would be part of.
    mlp_peak = BF16 * 3 * inner + FP32 * hidden
    whole_peak = mlp_peak + BF16 * 2 * hidden
    largest_weight = BF16 * hidden * max(inner, query)
    embedding = BF16 * model.embedding_parameters
    return Bytes(
        static_per_parameter=_STATIC_BYTES,
        sharded_per_parameter=_SHARDED_BYTES,
        activation_per_token=BF16 * hidden,
        layer_full_per_token=norms + attention + 4 * BF16 * inner,
        layer_kv_per_token=2 * BF16 * model.kv_size,
        layer_kv_grad_per_token=2 * FP32 * model.kv_size,
        chunk_per_token=2 * _INT64 + 2 * BF16 * model.head_dim,
        embedding_per_token=_INT64,
        head_per_token=_INT64 + BF16 * hidden,
        layer_forward_peak=Line(constant=0.0, rate=mlp_peak),
        recompute_forward_peak=Line(constant=0.0, rate=whole_peak),
        layer_backward_peak=Line(constant=largest_weight, rate=whole_peak),
        slice_backward_per_token=2 * BF16 * query,
        context_per_token=2 * BF16 * model.kv_size,
        embedding_backward_peak=Line(constant=embedding, rate=FP32 * hidden),
        head_forward_peak=Line(constant=embedding, rate=2 * FP32 * hidden),
        head_backward_peak=Line(constant=0.0, rate=(BF16 + 2 * FP32) * hidden),
        logits_per_token=model.vocabulary_size * (BF16 + 2 * FP32),
        layer_split_per_token=weight_input_bytes(model),
    )
