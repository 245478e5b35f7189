"""The exact text form of ops and programs: `2F0` is the forward of chunk 0 on stage 2.

Used in errors, exports and profiler spans. One op has one spelling, and no two ops share one.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from infinipipe.ir.plan import Op, OpKind

# A letter is read by its name: "an F", but "a B".
_LETTERS_WITH_AN = frozenset("AEFHILMNORSX")

# Ops on either side of a marked one: enough to find the spot in a program by, few enough to
# keep an error on one line.
_EXCERPT_RADIUS = 3


def show_op(stage: int, op: Op) -> str:
    """Return an op's text form."""
    return f"{stage}{op.kind.value}{op.chunk}"


def show_kind(kind: OpKind) -> str:
    """Return a kind's letter with its article, as in `an F`."""
    article = "an" if kind.value in _LETTERS_WITH_AN else "a"
    return f"{article} {kind.value}"


def show_program(stage: int, program: SequenceOf[Op]) -> str:
    """Return the text forms of a stage's ops, separated by single spaces."""
    return " ".join(show_op(stage, op) for op in program)


def show_recompute(recompute: int, keep_attention: int) -> str:
    """Return how many layers are recomputed: `3`, or `3+2` where two more keep attention's output.

    It is `0+2` where no layer is recomputed in whole.
    """
    return f"{recompute}+{keep_attention}" if keep_attention else str(recompute)


def excerpt(stage: int, program: SequenceOf[Op], position: int) -> str:
    """Return the ops around a position with a marker on it, as in `... 2F3 >>2B0<< 2F4 ...`.

    The position after the last op is marked as the end.
    """
    words = [show_op(stage, op) for op in program]
    if position == len(program):
        words.append("end")
    return marked(words, position, _EXCERPT_RADIUS)


def marked(words: SequenceOf[str], position: int, radius: int) -> str:
    """Return the words around a position with a marker on it, as in `... 7 >>8<< 9 ...`."""
    first = max(0, position - radius)
    end = position + radius + 1
    shown = [*words[first:position], f">>{words[position]}<<", *words[position + 1 : end]]
    if first > 0:
        shown.insert(0, "...")
    if end < len(words):
        shown.append("...")
    return " ".join(shown)
