"""Megatron-LM: context parallelism by a ring, stages of 1F1B, and replicas."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import cached_property

import msgspec
import numpy as np

from infinipipe.aliases import Floats
from infinipipe.costs import CostedChunks, CostModel
from infinipipe.costs.links import sequence_group
from infinipipe.costs.sharded import sharded_profile
from infinipipe.ir import Chunk, Sequence
from infinipipe.planner.problem import Pipeline
from infinipipe.profiles import Line, Links, Profile

_FREE = Line(constant=0.0, rate=0.0)
# B sends the gradients of K and V around beside them.
_BACKWARD_TENSORS = 2


def ring_pipeline(pipeline: Pipeline) -> Pipeline:
    """Return the same stages, with ranks that share sequences as in Megatron-LM.

    Its schedule is `1f1b` on whole sequences packed by tokens; this is what it costs. Left out:
    tensor parallelism, whose collectives of activations in every layer are dearer than a ring
    inside a node; that each rank has two parts of every sequence, however short, and so calls
    attention on ever smaller ones; that sequences are padded to whole parts (the latter two would
    be slower); interleaved stages, which fill and drain sooner for more transfers; and selective
    recompute of attention alone.
    """
    costs = pipeline.costs
    ring = RingCosts(costs.profile, costs.layout, costs.stages, costs.logits_tokens)
    return replace(pipeline, costs=ring)


class RingCosts(CostModel):
    """Costs where each rank keeps its tokens in attention too, and K and V go around in a ring.

    Causal attention is shared out evenly. While a rank attends to one part of K and V, the next one
    comes: only what takes longer than that is seen.
    """

    @cached_property
    def rank_profile(self) -> Profile:
        """The profile as one rank sees it, without any exchange."""
        profile = self.profile
        model = profile.model
        ranks = self.layout.sequence_parallel
        links_between = profile.times.links_between
        times = msgspec.structs.replace(
            profile.times,
            links=_without_exchange(profile.times.links),
            links_between=links_between and _without_exchange(links_between),
        )
        # No rank repeats a head of K and V, however few there are.
        many_heads = msgspec.structs.replace(model, num_kv_heads=max(model.num_kv_heads, ranks))
        free = msgspec.structs.replace(profile, times=times, model=many_heads)
        # It has all heads, of its own tokens. What they give is kept by no layer of `1f1b`.
        return msgspec.structs.replace(sharded_profile(free, self.layout), model=model)

    def price(self, chunks: SequenceOf[Chunk], sequences: SequenceOf[Sequence]) -> CostedChunks:
        """Price chunks of a step's sequences on every stage, with what is seen of the ring."""
        costed = super().price(chunks, sequences)
        times = self.rank_profile.times
        forward_s = self._seen_s(costed, times.layer_forward.s_per_pair, num_tensors=1)
        backward_s = self._seen_s(costed, times.layer_backward.s_per_pair, _BACKWARD_TENSORS)
        layers = np.array([stage.num_layers for stage in self.stages])[:, None]
        return replace(
            costed,
            forward_s=costed.forward_s + layers * forward_s,
            backward_s=costed.backward_s + layers * backward_s,
            # It runs F again; who keeps attention's output needs no ring.
            recompute_s=costed.recompute_s + forward_s,
            attention_s=costed.attention_s + forward_s,
        )

    def _seen_s(self, costed: CostedChunks, s_per_pair: float, num_tensors: int) -> Floats:
        """(C,) seconds of a layer's ring that attention does not hide.

        Args:
            costed: the chunks.
            s_per_pair: of attention on one rank.
            num_tensors: how often as many bytes as K and V have are sent.
        """
        num_ranks = self.layout.sequence_parallel
        part_bytes = num_tensors * self.rank_profile.bytes.layer_kv_per_token * costed.sizes.tokens
        hop_s = self._hop.constant + self._hop.rate * part_bytes
        attention_s = s_per_pair * costed.sizes.pairs / num_ranks
        seen_s = np.maximum(0.0, hop_s - attention_s)
        return np.asarray((num_ranks - 1) * seen_s)

    @cached_property
    def _hop(self) -> Line:
        """Seconds of sending a part to the next rank of the ring, over its slowest link."""
        times = self.profile.times
        if sequence_group(self.layout).is_inside or times.links_between is None:
            return times.links.transfer_s
        return times.links_between.transfer_s


def _without_exchange(links: Links) -> Links:
    return msgspec.structs.replace(links, all_to_all_s=_FREE)
