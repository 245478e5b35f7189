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
_LETTERS = "".join(OpKind)
_OP = re.compile(f"{_NUMBER}([{_LETTERS}]){_NUMBER}")

# Enough to recognise a wrong text by, few enough to keep the error on one line.
_QUOTED_CHARACTERS = 40

# A letter is read by its name: "an F", but "a B".
_LETTERS_WITH_AN = frozenset("AEFHILMNORSX")


def show_op(stage: int, op: Op) -> str:
    """Return an op's text form."""
    return f"{stage}{op.kind.value}{op.chunk}"


def parse_op(text: str) -> tuple[int, Op]:
    """Return the stage and the op that a text form names, for tools that read exports and spans.

    Raises:
        InputError: the text is not exactly one op.
    """
    match = _OP.fullmatch(text)
    if match is None:
        quoted = ascii(text[:_QUOTED_CHARACTERS])
        letters = f"{', '.join(_LETTERS[:-1])} or {_LETTERS[-1]}"
        raise InputError(f"not an op: {quoted}; write stage, kind ({letters}) and chunk, as in 2F0")
    stage, kind, chunk = match.groups()
    return int(stage), Op(OpKind(kind), int(chunk))


def show_kind(kind: OpKind) -> str:
    """Return a kind's letter with its article, as in `an F`."""
    article = "an" if kind.value in _LETTERS_WITH_AN else "a"
    return f"{article} {kind.value}"


def show_program(stage: int, program: SequenceOf[Op]) -> str:
    """Return the text forms of a stage's ops, separated by single spaces."""
    return " ".join(show_op(stage, op) for op in program)


def window(stage: int, program: SequenceOf[Op], position: int, radius: int = 3) -> str:
    """Return the ops around a position with a marker on it, as in `... 2F3 >>2B0<< 2F4 ...`.

    The position after the last op is marked as the end.
    """
    words = [show_op(stage, op) for op in program]
    if position == len(program):
        words.append("end")
    return marked(words, position, radius)


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
