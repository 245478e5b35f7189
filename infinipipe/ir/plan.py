"""The schedule IR: typed, frozen structs that say exactly what every stage does in every step.

A plan is one `Header`, one `Step` per optimizer step, and the `Totals` of the steps. Nothing here
knows costs, devices or file formats; `infinipipe.ir.file.store` writes a plan and
`infinipipe.ir.verify` proves it.
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Sequence as SequenceOf
from typing import Literal

import msgspec

FORMAT_VERSION = 2
"""Of the plan file; a change of any struct of this page, or of `file.encoding`, makes another."""

ONE_NODE = 2**31 - 1
"""Devices of a node that no job is too large for: the most that a plan can count."""

LossNorm = Literal["token", "sequence"]
DType = Literal["float32", "bfloat16"]


class OpKind(enum.StrEnum):
    """What an op does, by the letters of torch.distributed.pipelining."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The shape of a decoder-only model, and the Hugging Face config it comes from."""

    name: str
    config: str
    """The Hugging Face `config.json` as canonical JSON (sorted keys, no spaces)."""
    tokenizer: str
    """The folder whose `tokenizer.json` turns text into tokens, or `bytes`."""
    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocabulary_size: int
    tied: bool
    """Whether the head shares the embedding's weight."""
    layer_parameters: int
    """Parameters of one decoder layer."""

    @property
    def kv_size(self) -> int:
        """Width of K (and of V) for one token of one layer, in elements."""
        return self.num_kv_heads * self.head_dim

    def shares_heads(self, num_ranks: int) -> bool:
        """Return whether so many ranks can share the attention heads evenly.

        Where there are fewer K/V heads than ranks, several ranks have the same one.
        """
        kv_heads = self.num_kv_heads
        kv_even = kv_heads % num_ranks == 0 or num_ranks % kv_heads == 0
        return self.num_heads % num_ranks == 0 and kv_even

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding; the head has as many."""
        return self.vocabulary_size * self.hidden_size

    @property
    def sha256(self) -> str:
        """Digest of the config, by which a run recognises the model it was planned for."""
        return hashlib.sha256(self.config.encode()).hexdigest()


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A contiguous range of layers on one pipeline rank."""

    first_layer: int
    num_layers: int
    embedding: bool
    """Whether this stage also embeds the tokens (the first one does)."""
    head: bool
    """Whether this stage also holds the final norm, the head and the loss (the last one does)."""


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a job's devices are used: replicas of pipelines of stages of ranks that share sequences.

    Axes are those of `infinipipe.runtime.ranks`; a rank's number grows fastest along
    `sequence_parallel`, then along the stages, then along the replicas.
    """

    num_stages: int
    sequence_parallel: int = 1
    """Ranks of a stage that share every sequence; 1 for none."""
    num_replicas: int = 1
    """Data-parallel copies of the pipeline."""
    devices_per_node: int = ONE_NODE
    """Ranks fill node after node with so many; links within a node are faster than between two."""

    @property
    def num_ranks(self) -> int:
        """Devices that the job needs."""
        return self.num_stages * self.num_copies

    @property
    def num_copies(self) -> int:
        """Ranks that hold the weights of one stage, and add up their gradients."""
        return self.sequence_parallel * self.num_replicas


class DatasetInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the plan was compiled from."""

    path: str
    """As given to `compile`."""
    sha256: str
    """Of the file's bytes."""
    tokenizer: str
    """What made the tokens: `ids` (the file holds them), `bytes`, or the tokenizer's directory.

    `lengths` says that the file has no tokens: such a plan cannot run.
    """
    tokenizer_sha256: str
    """Of the directory's `tokenizer.json`; empty where no such file is used."""
    num_sequences: int
    num_tokens: int
    """After truncation to `max_length`."""
    num_truncated: int
    """Sequences cut to `max_length`."""


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything that holds for the whole plan."""

    format_version: int
    infinipipe_version: str
    model: Model
    model_sha256: str
    """Of the model's config."""
    dtype: DType
    """Of parameters and activations, for which times and bytes were predicted."""
    stages: tuple[Stage, ...]
    num_replicas: int
    sequence_parallel: int
    """Ranks of a stage that share every sequence; 1 for none."""
    devices_per_node: int
    """Ranks that stand together, with faster links than to those of other nodes."""
    memory_limit_bytes: tuple[int, ...]
    """Per stage."""
    batch_size: int
    num_steps: int
    seed: int
    max_length: int | None
    loss_norm: LossNorm
    logits_tokens: int
    """The head computes logits for at most this many tokens at a time."""
    dataset: DatasetInfo
    policy: str
    profile_sha256: str
    """Of the bytes of `profile`."""
    profile: msgspec.Raw
    """The whole profile (see `infinipipe.profiles.profile`), so that the plan explains itself."""

    @property
    def layout(self) -> Layout:
        """How the job's devices are used."""
        return Layout(
            num_stages=len(self.stages),
            sequence_parallel=self.sequence_parallel,
            num_replicas=self.num_replicas,
            devices_per_node=self.devices_per_node,
        )


class Slice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Tokens `[start, start + length)` of one of the step's sequences; `start` is its context."""

    sequence: int
    """Index into `Step.sequences`."""
    start: int
    length: int

    @property
    def stop(self) -> int:
        """One past the last token."""
        return self.start + self.length

    @property
    def num_pairs(self) -> int:
        """Query-key pairs of causal attention: every token sees its context and itself."""
        return self.length * self.start + self.length * (self.length + 1) // 2


class Chunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One micro-batch: slices laid end to end without padding."""

    slices: tuple[Slice, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all slices."""
        return sum(s.length for s in self.slices)

    @property
    def num_pairs(self) -> int:
        """Attention pairs of all slices."""
        return sum(s.num_pairs for s in self.slices)

    def split_slice(self, sequences: SequenceOf[Sequence]) -> Slice | None:
        """Return the slice that is only a part of its sequence, if there is one."""
        for slice_ in self.slices:
            if slice_.length != sequences[slice_.sequence].length:
                return slice_
        return None


class Op(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One entry of a stage's program."""

    kind: OpKind
    chunk: int


class Sequence(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One sequence of a step's global batch."""

    row: int
    """Row of the dataset, from 0."""
    length: int
    num_targets: int


class StagePrediction(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What the simulator expects of one stage in one step."""

    busy_s: float
    """Seconds in ops, recompute included."""
    recompute_s: float
    bubble_s: float
    """Seconds of the replica's makespan in which the stage waits."""
    peak_bytes: int


class Search(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    # One line of the schema that `infinipipe inspect --schema` prints.
    """How a replica's schedule was found. It is the same wherever the plan is compiled, so it \
holds no seconds."""

    winner: str
    """What made the schedule: a policy, and the settings it chose."""
    solver: str | None = None
    """`HiGHS` or `SCIP` where one chose the recompute counts, None where none was needed."""
    status: str | None = None
    """How the solver ended, in its own words."""
    gap: float | None = None
    """How far the solver's own objective may be from the best, relative to its bound.

    None without a bound.
    """


class Replica(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one data-parallel copy of the pipeline does in one step."""

    chunks: tuple[Chunk, ...]
    recompute: tuple[tuple[int, ...], ...]
    """`recompute[stage][chunk]`: how many of the stage's layers, its first ones, keep only their
    input in F and compute the rest again in B."""
    keep_attention: tuple[tuple[int, ...], ...]
    """`keep_attention[stage][chunk]`: how many of the layers after those keep attention's output,
    with its log-sum-exp, besides their input. All further ones keep everything."""
    programs: tuple[tuple[Op, ...], ...]
    """One program per stage."""
    predicted: tuple[StagePrediction, ...]
    """One prediction per stage."""
    search: Search | None = None
    """None where nothing was searched: in a replica without work, or in a plan made by hand."""


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One optimizer step over one global batch."""

    index: int
    sequences: tuple[Sequence, ...]
    denominator: int
    """Divides the summed loss; see `loss_denominator`."""
    replicas: tuple[Replica, ...]
    makespan_s: float
    """Simulated seconds from the first F to the last B over all replicas."""
    bound_s: float
    """No schedule of this batch on these stages can be faster."""
    step_s: float
    """`makespan_s` plus the optimizer."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the global batch."""
        return sum(s.length for s in self.sequences)

    @property
    def num_targets(self) -> int:
        """Targets of the global batch."""
        return sum(s.num_targets for s in self.sequences)


class Totals(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sums over all steps."""

    num_steps: int = 0
    num_sequences: int = 0
    num_tokens: int = 0
    num_targets: int = 0
    num_chunks: int = 0
    num_ops: int = 0
    makespan_s: float = 0.0
    bound_s: float = 0.0
    step_s: float = 0.0

    @property
    def finite(self) -> bool:
        """Whether the times are numbers."""
        times = (self.makespan_s, self.bound_s, self.step_s)
        return all(map(math.isfinite, times))

    def plus(self, step: Step) -> Totals:
        """Return the sums with one more step."""
        num_chunks = 0
        num_ops = 0
        for replica in step.replicas:
            num_chunks += len(replica.chunks)
            num_ops += sum(len(program) for program in replica.programs)
        return Totals(
            num_steps=self.num_steps + 1,
            num_sequences=self.num_sequences + len(step.sequences),
            num_tokens=self.num_tokens + step.num_tokens,
            num_targets=self.num_targets + step.num_targets,
            num_chunks=self.num_chunks + num_chunks,
            num_ops=self.num_ops + num_ops,
            makespan_s=self.makespan_s + step.makespan_s,
            bound_s=self.bound_s + step.bound_s,
            step_s=self.step_s + step.step_s,
        )


def loss_denominator(sequences: SequenceOf[Sequence], loss_norm: LossNorm) -> int:
    """Return what the summed loss of a global batch is divided by; 0 if it has no target at all.

    `token`: the targets of the batch. `sequence`: its sequences that have a target.
    """
    if loss_norm == "token":
        return sum(s.num_targets for s in sequences)
    return sum(1 for s in sequences if s.num_targets > 0)


def chunk_chains(
    chunks: SequenceOf[Chunk], sequences: SequenceOf[Sequence]
) -> list[tuple[int, ...]]:
    """Group chunk indices into chains: the chunks of one split sequence by context.

    Every other chunk is a chain alone. Chains come in the order of their first chunk.
    """
    chains: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for index, chunk in enumerate(chunks):
        slice_ = chunk.split_slice(sequences)
        if slice_ is None:
            chains["chunk", index] = [(0, index)]
        else:
            chain = chains.setdefault(("sequence", slice_.sequence), [])
            chain.append((slice_.start, index))
    return [_in_order(chain) for chain in chains.values()]


def _in_order(chain: list[tuple[int, int]]) -> tuple[int, ...]:
    """Return the indices of pairs of context and index."""
    return tuple(index for _, index in sorted(chain))
