"""The schedule IR: what a plan says, its rules, its file and its text form."""

from infinipipe.ir.plan import (
    FORMAT_VERSION,
    Chunk,
    DatasetInfo,
    Header,
    LossNorm,
    Model,
    Op,
    OpKind,
    Replica,
    Sequence,
    Slice,
    Stage,
    StagePrediction,
    Step,
    chunk_chains,
    loss_denominator,
)

__all__ = [
    "FORMAT_VERSION",
    "Chunk",
    "DatasetInfo",
    "Header",
    "LossNorm",
    "Model",
    "Op",
    "OpKind",
    "Replica",
    "Sequence",
    "Slice",
    "Stage",
    "StagePrediction",
    "Step",
    "chunk_chains",
    "loss_denominator",
]
