"""The schedule IR: what a plan says, its rules, its file and its text form."""

from infinipipe.ir.file.check import Report, verify_plan
from infinipipe.ir.file.store import PlanReader, PlanWriter, open_plan
from infinipipe.ir.ops import TRAITS, Direction, Held, Traits
from infinipipe.ir.plan import (
    FORMAT_VERSION,
    ONE_NODE,
    Chunk,
    DatasetInfo,
    DType,
    Header,
    Layout,
    LossNorm,
    Model,
    Op,
    OpKind,
    Replica,
    Search,
    Sequence,
    Slice,
    Stage,
    StagePrediction,
    Step,
    Totals,
    chunk_chains,
    loss_denominator,
)
from infinipipe.ir.profile_summary import profile_origin, profile_subject
from infinipipe.ir.text import show_op, show_program, show_recompute
from infinipipe.ir.time_shares import TimeShares
from infinipipe.ir.verify import verify_header, verify_step

__all__ = [
    "FORMAT_VERSION",
    "ONE_NODE",
    "TRAITS",
    "Chunk",
    "DType",
    "DatasetInfo",
    "Direction",
    "Header",
    "Held",
    "Layout",
    "LossNorm",
    "Model",
    "Op",
    "OpKind",
    "PlanReader",
    "PlanWriter",
    "Replica",
    "Report",
    "Search",
    "Sequence",
    "Slice",
    "Stage",
    "StagePrediction",
    "Step",
    "TimeShares",
    "Totals",
    "Traits",
    "chunk_chains",
    "loss_denominator",
    "open_plan",
    "profile_origin",
    "profile_subject",
    "show_op",
    "show_program",
    "show_recompute",
    "verify_header",
    "verify_plan",
    "verify_step",
]
