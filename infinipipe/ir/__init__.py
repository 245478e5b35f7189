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
from infinipipe.ir.store import PlanReader, PlanWriter, open_plan
from infinipipe.ir.text import parse_op, parse_program, show_op, show_program
from infinipipe.ir.verify import Report, verify_header, verify_plan, verify_step

__all__ = [
    "FORMAT_VERSION",
    "Chunk",
    "DatasetInfo",
    "Header",
    "LossNorm",
    "Model",
    "Op",
    "OpKind",
    "PlanReader",
    "PlanWriter",
    "Replica",
    "Report",
    "Sequence",
    "Slice",
    "Stage",
    "StagePrediction",
    "Step",
    "chunk_chains",
    "loss_denominator",
    "open_plan",
    "parse_op",
    "parse_program",
    "show_op",
    "show_program",
    "verify_header",
    "verify_plan",
    "verify_step",
]
