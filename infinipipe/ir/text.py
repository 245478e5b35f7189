"""The exact text form of ops and programs: `2F0` is the forward of chunk 0 on stage 2.

Used in tests, errors, exports and profiler spans. `parse_op(show_op(s, op)) == (s, op)` and
`show_op(*parse_op(text)) == text`: one op has one spelling.
"""

from __future__ import annotations

import re
from collections.abc import Sequence as SequenceOf

from infinipipe.errors import InputError
from infinipipe.ir.plan import Op, OpKind

# Eighteen digits fit every integer that the plan file can hold without a sign.
_NUMBER = "(0|[1-9][0-9]{0,17})"
_OP = re.compile(f"{_NUMBER}([FBIW]){_NUMBER}")


def show_op(stage: int, op: Op) -> str:
    """Return an op's text form."""
    return f"{stage}{op.kind.value}{op.chunk}"


def parse_op(text: str) -> tuple[int, Op]:
    """Return the stage and the op that a text form names.

    Raises:
        InputError: the text is not exactly one op.
    """
    match = _OP.fullmatch(text)
    if match is None:
        raise InputError(
            f"not an op: {text[:40]!a}; write stage, kind (F, B, I or W) and chunk, as in 2F0"
        )
    stage, kind, chunk = match.groups()
    return int(stage), Op(OpKind(kind), int(chunk))


def show_program(stage: int, program: SequenceOf[Op]) -> str:
    """Return the text forms of a stage's ops, separated by single spaces."""
    return " ".join(show_op(stage, op) for op in program)


def parse_program(stage: int, text: str) -> tuple[Op, ...]:
    """Return the program that `show_program` showed.

    Raises:
        InputError: a word is not an op, or is an op of another stage.
    """
    program = []
    for word in text.split(" ") if text else ():
        found, op = parse_op(word)
        if found != stage:
            raise InputError(f"op {word} is of stage {found}, in the program of stage {stage}")
        program.append(op)
    return tuple(program)


def window(stage: int, program: SequenceOf[Op], position: int, radius: int = 3) -> str:
    """Return the ops around a position with a marker on it, as in `... 2F3 >>2B0<< 2F4 ...`.

    The position after the last op is marked as the end.
    """
    first, last = max(0, position - radius), min(len(program), position + radius + 1)
    words = [show_op(stage, op) for op in program[first:last]]
    if position == len(program):
        words.append("end")
    words[position - first] = f">>{words[position - first]}<<"
    return " ".join(["..."] * (first > 0) + words + ["..."] * (last < len(program)))
