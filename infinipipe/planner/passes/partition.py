"""Layers to stages: equal time, embedding and head counted, within what memory can hold."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from infinipipe.aliases import Ints
from infinipipe.costs import CostModel
from infinipipe.errors import InfeasibleError
from infinipipe.ir import Layout, Stage
from infinipipe.profiles import Profile, logits_tokens
from infinipipe.units import show_bytes

# Layers are balanced for chunks of so many tokens, where the head's and the layers' efficiency
# have settled.
_TYPICAL_TOKENS = 4096


def balanced_costs(
    profile: Profile, layout: Layout, limits: SequenceOf[int], lengths: Ints
) -> CostModel:
    """Return the costs of the stages whose slowest is fastest for sequences like these.

    Among equals the later stage gets the layer, because the earlier ones keep more chunks in
    flight.

    Args:
        profile: of the model and the device.
        layout: says how many stages there are.
        limits: bytes per stage.
        lengths: (sequences,) tokens of the dataset's sequences.

    Raises:
        InfeasibleError: a stage cannot hold even one layer, or all stages together cannot hold the
            model.
    """
    counts = [1] * layout.num_stages
    logits = logits_tokens(profile.model.vocabulary_size)
    costs = CostModel(profile, layout, make_stages(counts), logits)
    layer_s = _layer_s(costs, lengths)
    others_s = _others_s(costs)
    room = [_most_layers(costs, stage, limit) for stage, limit in enumerate(limits)]
    num_layers = profile.model.num_layers

    def seconds_with_one_more(stage: int) -> tuple[float, int]:
        seconds = (counts[stage] + 1) * layer_s + others_s[stage]
        # Among equals the later stage.
        return (seconds, -stage)

    for _ in range(num_layers - layout.num_stages):
        open_stages = [stage for stage, most in enumerate(room) if counts[stage] < most]
        if not open_stages:
            raise InfeasibleError(
                f"{num_layers} layers of {profile.model.name} do not fit into {layout.num_stages} "
                f"stages of {show_bytes(min(limits))}: parameters, gradients and optimizer state "
                f"leave room for {sum(room)}; raise --stages or --memory"
            )
        chosen = min(open_stages, key=seconds_with_one_more)
        counts[chosen] += 1
    return costs.with_stages(make_stages(counts))


def make_stages(counts: SequenceOf[int]) -> tuple[Stage, ...]:
    """Return stages of so many layers each."""
    last = len(counts) - 1
    stages: list[Stage] = []
    first_layer = 0
    for number, count in enumerate(counts):
        stage = Stage(
            first_layer=first_layer,
            num_layers=count,
            embedding=number == 0,
            head=number == last,
        )
        stages.append(stage)
        first_layer += count
    return tuple(stages)


def _layer_s(costs: CostModel, lengths: Ints) -> float:
    """Return the seconds of F and B of one layer, for a chunk of sequences like these."""
    num_tokens = max(1, lengths.sum())
    # Float: the squares of many long sequences together would not fit into 64 bits.
    pairs = lengths * (lengths + 1.0) / 2
    pairs_per_token = float(pairs.sum() / num_tokens)
    slices_per_token = float(len(lengths) / num_tokens)
    num_pairs = round(_TYPICAL_TOKENS * pairs_per_token)
    num_slices = round(_TYPICAL_TOKENS * slices_per_token)
    return costs.layer_s(_TYPICAL_TOKENS, num_pairs, num_slices)


def _others_s(costs: CostModel) -> list[float]:
    """Return the seconds of F and B of what each stage has besides layers."""
    embedding_s, head_s = costs.ends_s(_TYPICAL_TOKENS)
    seconds = [0.0] * len(costs.stages)
    seconds[0] += embedding_s
    seconds[-1] += head_s
    return seconds


def _most_layers(costs: CostModel, stage_index: int, limit: int) -> int:
    """Return how many layers' parameters, gradients and optimizer state a stage can hold.

    Args:
        costs: of stages of one layer each.
        stage_index: of the stage.
        limit: its bytes.
    """
    stage = costs.stages[stage_index]
    least = costs.static_bytes(stage_index)
    if least > limit:
        embedding = " and the embedding" if stage.embedding else ""
        head = " and the head" if stage.head else ""
        raise InfeasibleError(
            f"stage {stage_index} needs {show_bytes(least)} for the parameters, gradients and "
            f"optimizer state of one layer{embedding}{head}, but its limit is "
            f"{show_bytes(limit)}; raise --memory"
        )
    num_more = (limit - least) // costs.static_bytes_per_layer
    return 1 + int(num_more)
