"""Sizes of chunks: what bounds them, and what one more of them costs."""

from __future__ import annotations

from infinipipe.planner.problem import Pipeline


def chunk_overhead_s(pipeline: Pipeline) -> float:
    """Return the seconds that one more chunk costs an average stage, attention and tokens apart."""
    times = pipeline.profile.times
    share = pipeline.profile.model.num_layers / pipeline.num_stages
    overhead = times.chunk_forward_s + times.chunk_backward_s
    for layer in (times.layer_forward, times.layer_backward):
        (x0, x1), (y0, y1) = (
            column[:: len(column) - 1] for column in (layer.curve.tokens, layer.curve.seconds)
        )
        overhead += share * max(0.0, y0 - x0 * (y1 - y0) / (x1 - x0))
    return max(overhead, 1e-9)


def most_chunk_tokens(pipeline: Pipeline) -> int:
    """Return how many tokens a chunk can have: its activations must be indexable with 32 bits."""
    model = pipeline.profile.model
    return int(
        (2**31 - 1)
        // max(model.hidden_size, model.num_heads * model.head_dim, model.intermediate_size, 1)
    )
