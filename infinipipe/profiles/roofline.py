"""What the parts of a llama-like model take on a device, by a roofline, in bfloat16.

Every part takes the longer of what its arithmetic and its memory traffic need:

* matmuls: tiles of 128 x 128 in waves over the device's multiprocessors, at a share of the peak.
  The last wave is half idle on average and the first is never shorter than a tile: so efficiency
  falls for small chunks, to a half at half a wave.
* attention: flash attention's products at its own share of the peak, per pair.
* the rest (norms, rotary embedding, activation, residuals): memory traffic.
* and never less than it takes to launch its kernels.

I and W share what B does: I has the products that give gradients of inputs, attention and the
rest, W the products that give gradients of weights. Together they cost more than B, as what lies
between is not at hand any more: W reads the inputs of its products and the gradients of their
outputs, `weight_input_bytes`, once more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from infinipipe.ir import Model
from infinipipe.profiles.logits import logits_tokens
from infinipipe.profiles.profile import Curve, LayerTime
from infinipipe.profiles.sheets import Sheet

# Bytes of an element.
BF16 = 2
FP32 = 4

# Assumed, not measured: the order of magnitude of CUDA's launches and of attention's host code.
# It matters for small chunks only.
_LAUNCH_S = 4e-6
_SLICE_S = 3e-6
"""Of attention, which takes the slices one by one."""

# Kernels that are launched, counted from what each part computes.
_LAYER_KERNELS = 30
_WEIGHT_KERNELS = 14
"""Of W: each of a layer's products and the addition to the gradient."""
# Of the norm, the products, the loss and its gradients; and of scaling what F left.
_HEAD_KERNELS = 10
_HEAD_BACKWARD_KERNELS = 4
_MERGE_KERNELS = 6
"""Of merging attention to a context with attention within the slice."""

_TILE = 128
"""Rows and columns of the output that one multiprocessor computes at a time; common in cuBLAS."""

# Tokens at which curves bend: dense where efficiency still grows, far apart where it hardly does.
# Beyond the last a curve goes straight on.
_KNOTS = (
    *(64, 128, 256, 384, 512, 768),
    *(1024, 1536, 2048, 3072, 4096, 6144, 8192),
    *(12288, 16384, 32768, 65536),
)


def query_size(model: Model) -> int:
    """Return the width of Q, and of attention's output, for one token, in elements."""
    return model.num_heads * model.head_dim


def weight_input_bytes(model: Model) -> int:
    """Return the bytes per token of the inputs of a layer's products and their outputs' gradients.

    Q, K and V have one input, and so have the first two products of the MLP. The norms are no
    part of it: the gradients of their weights fall off where those of their inputs are computed.
    """
    hidden = model.hidden_size
    query = query_size(model)
    inner = model.intermediate_size
    inputs = hidden + query + hidden + inner
    outputs = query + 2 * model.kv_size + hidden + 2 * inner + hidden
    return BF16 * (inputs + outputs)


@dataclass(frozen=True)
class Roofline:
    """A model on a device."""

    model: Model
    sheet: Sheet

    def layer_forward(self) -> LayerTime:
        """Return F of a layer."""
        # Attention to the context reads its K and V.
        context = 2 * BF16 * self.model.kv_size
        return LayerTime(
            curve=_curve(self._layer_seconds),
            s_per_pair=self._pair_flops(products=2)
            / (self.sheet.flops * self.sheet.attention_forward),
            s_per_slice=_SLICE_S,
            s_per_context=_MERGE_KERNELS * _LAUNCH_S,
            s_per_context_token=self._copy_seconds(context),
            s_per_continued_token=self._merge_seconds(),
        )

    def layer_backward(self) -> LayerTime:
        """Return B of a layer.

        It does two products for each of forward's, attention's does five for two and all traffic
        doubles.
        """
        # K and V of the context are read, and their gradients added to accumulators in float32.
        context = (2 * BF16 + 2 * (BF16 + 2 * FP32)) * self.model.kv_size
        return LayerTime(
            curve=_curve(lambda tokens: 2 * self._layer_seconds(tokens)),
            s_per_pair=self._pair_flops(products=5)
            / (self.sheet.flops * self.sheet.attention_backward),
            s_per_slice=2 * _SLICE_S,
            s_per_context=_MERGE_KERNELS * _LAUNCH_S,
            s_per_context_token=self._copy_seconds(context),
            s_per_continued_token=self._merge_seconds(),
        )

    def layer_input_backward(self) -> LayerTime:
        """Return I of a layer: B without the products of W."""
        return replace(self.layer_backward(), curve=_curve(self._input_seconds))

    def layer_weight_backward(self) -> LayerTime:
        """Return W of a layer, which grows with tokens only: attention has no weights."""
        return LayerTime(
            curve=_curve(self._weight_seconds),
            s_per_pair=0.0,
            s_per_slice=0.0,
            s_per_context=0.0,
            s_per_context_token=0.0,
            s_per_continued_token=0.0,
        )

    def embedding_forward(self) -> Curve:
        """Return F of the embedding: rows of the table are read and written."""
        row = self.model.hidden_size * BF16
        return _curve(lambda tokens: max(self._copy_seconds(2 * row * tokens), _LAUNCH_S))

    def embedding_backward(self) -> Curve:
        """Return B of the embedding: a gradient as large as the table is made and added."""
        row = self.model.hidden_size * BF16
        gradient = self.model.embedding_parameters * (BF16 + BF16 + FP32 + FP32)
        return _curve(lambda tokens: self._copy_seconds(3 * row * tokens + gradient))

    def head_forward(self) -> Curve:
        """Return F of the head: logits, loss and both gradients."""
        return _curve(self._head_seconds)

    def head_backward(self) -> Curve:
        """Return B of the head: the final norm's, as the head's gradients are there since F."""
        row = self.model.hidden_size * BF16
        least = _HEAD_BACKWARD_KERNELS * _LAUNCH_S
        return _curve(lambda tokens: max(self._copy_seconds(6 * row * tokens), least))

    def _copy_seconds(self, num_bytes: int) -> float:
        return num_bytes / self.sheet.copy_bandwidth

    def _pair_flops(self, products: int) -> int:
        """Return the flops of a pair: each product multiplies and adds for every element of Q."""
        return 2 * products * query_size(self.model)

    def _merge_seconds(self) -> float:
        """Return the seconds a token takes where two outputs of attention are read, one written."""
        return self._copy_seconds(3 * BF16 * query_size(self.model))

    def _layer_seconds(self, tokens: int) -> float:
        """Return F of a layer without attention."""
        traffic_s = self._copy_seconds(tokens * self._layer_traffic())
        return max(self._matmuls_seconds(tokens) + traffic_s, _LAYER_KERNELS * _LAUNCH_S)

    def _input_seconds(self, tokens: int) -> float:
        traffic_s = self._copy_seconds(tokens * self._layer_traffic())
        kernels = 2 * _LAYER_KERNELS - _WEIGHT_KERNELS
        return max(self._matmuls_seconds(tokens) + 2 * traffic_s, kernels * _LAUNCH_S)

    def _weight_seconds(self, tokens: int) -> float:
        read_s = self._copy_seconds(tokens * weight_input_bytes(self.model))
        return max(self._matmuls_seconds(tokens) + read_s, _WEIGHT_KERNELS * _LAUNCH_S)

    def _layer_traffic(self) -> int:
        """Return the bytes per token that memory-bound parts of a layer's F read and write."""
        hidden = self.model.hidden_size
        norms = 2 * hidden * (5 * BF16 + 6 * FP32)
        rotary = 8 * BF16 * (query_size(self.model) + self.model.kv_size)
        activation = 5 * BF16 * self.model.intermediate_size
        residuals = 2 * 3 * BF16 * hidden
        return norms + rotary + activation + residuals

    def _matmuls_seconds(self, tokens: int) -> float:
        """Return the seconds of each of a layer's products once."""
        hidden = self.model.hidden_size
        query = query_size(self.model)
        kv = self.model.kv_size
        inner = self.model.intermediate_size
        # Widths in and out.
        attention = [(hidden, query), (hidden, kv), (hidden, kv), (query, hidden)]
        mlp = [(hidden, inner), (hidden, inner), (inner, hidden)]
        return sum(self._matmul_seconds(tokens, *widths) for widths in attention + mlp)

    def _matmul_seconds(self, rows: int, inputs: int, outputs: int) -> float:
        """Return the seconds of (rows, inputs) times (inputs, outputs)."""
        processors = self.sheet.processors
        tiles = math.ceil(rows / _TILE) * math.ceil(outputs / _TILE)
        waves = max(1.0, tiles / processors + 0.5)
        tile_s = 2 * _TILE**2 * inputs / (self.sheet.matmul_flops / processors)
        moved = BF16 * (rows * (inputs + outputs) + inputs * outputs)
        return max(waves * tile_s, self._copy_seconds(moved))

    def _head_seconds(self, tokens: int) -> float:
        """Return the seconds block by block; a part of a block costs its share of one."""
        hidden = self.model.hidden_size
        vocabulary = self.model.vocabulary_size
        block = min(tokens, logits_tokens(vocabulary))
        # Logits and the gradient of their input; then the gradient of the weight.
        products_s = 2 * self._matmul_seconds(block, hidden, vocabulary)
        products_s += self._matmul_seconds(hidden, block, vocabulary)
        logits = block * vocabulary * 5 * (BF16 + FP32)
        gradient = self.model.embedding_parameters * (BF16 + FP32 + FP32)
        block_s = products_s + self._copy_seconds(logits + gradient)
        return max(block_s, _HEAD_KERNELS * _LAUNCH_S) * tokens / block


def _curve(seconds: Callable[[int], float]) -> Curve:
    return Curve(tokens=_KNOTS, seconds=tuple(seconds(tokens) for tokens in _KNOTS))
