"""Lines of a dataset: decoded, checked and turned into token ids."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from infinipipe.aliases import Ints
from infinipipe.dataset.rows import IGNORED
from infinipipe.dataset.tokenizer import Tokenizer, open_tokenizer
from infinipipe.errors import InputError

MAX_LENGTH = 2**31 - 1
"""Tokens of the longest sequence that a plan can hold: kernels count with 32 bits."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Line(msgspec.Struct):
    """The fields of a line that mean something here."""

    input_ids: list[int] | None = None
    labels: list[int] | None = None
    text: str | None = None
    length: int | None = None


class LineParser:
    """Decodes and checks the lines of one dataset; their numbers count from 1, for messages."""

    def __init__(self, path: Path, tokenizer: str, vocabulary_size: int) -> None:
        self.path = path
        self.tokenizer = tokenizer
        self.vocabulary_size = vocabulary_size
        self._decoder = msgspec.json.Decoder(Line)
        self._opened_tokenizer: Tokenizer | None = None

    def error(self, number: int, what: str) -> InputError:
        """Return the error that says what is wrong with a line."""
        return InputError(f"{self.path}:{number}: {what}")

    def parse(self, data: bytes, number: int) -> Line:
        """Decode one line and check what can be checked without tokens.

        Raises:
            InputError: the line is no sequence.
        """
        try:
            line = self._decoder.decode(data)
        # RecursionError: brackets nested too deeply, also in a field that is ignored.
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise self.error(number, _undecodable(data, number, error)) from None
        if line.input_ids is not None:
            self._check_ids(line.input_ids, line.labels, number)
        elif line.labels is not None:
            raise self.error(number, "labels without input_ids")
        elif line.text is not None:
            if not line.text:
                raise self.error(number, "text is empty")
        elif line.length is None:
            raise self.error(number, "has none of input_ids, text and length")
        elif not 1 <= line.length <= MAX_LENGTH:
            raise self.error(number, f"length {line.length} is not between 1 and {MAX_LENGTH}")
        return line

    def token_ids(self, line: Line, number: int) -> Ints:
        """Return the token ids of a line with `input_ids` or `text`.

        Raises:
            InputError: it has a text that cannot be tokenized for this model.
        """
        if line.input_ids is not None:
            return np.array(line.input_ids, dtype=np.int64)
        assert line.text is not None
        (ids,) = self.tokenize([line.text], [number])
        return ids

    def tokenize(self, texts: list[str], numbers: list[int]) -> list[Ints]:
        """Return the token ids of each text; `numbers` are the lines that they stand in.

        Raises:
            InputError: a text has no token or one outside the vocabulary, or there is no tokenizer.
        """
        # Opened by the first text: a dataset without any may have no tokenizer.
        if self._opened_tokenizer is None:
            self._opened_tokenizer = open_tokenizer(self.tokenizer)
        tokenized = self._opened_tokenizer.encode(texts)
        for ids, number in zip(tokenized, numbers, strict=True):
            self._check_tokens(ids, number)
        return tokenized

    def _check_tokens(self, ids: Ints, number: int) -> None:
        if len(ids) == 0:
            raise self.error(number, "text has no token")
        largest = int(ids.max())
        if largest >= self.vocabulary_size:
            raise self.error(
                number,
                f"text has token {largest}, but the model's vocabulary has only "
                f"{self.vocabulary_size}; profile the model that the tokenizer {self.tokenizer} "
                "belongs to",
            )

    def _check_ids(self, ids: list[int], labels: list[int] | None, number: int) -> None:
        if not ids:
            raise self.error(number, "input_ids is empty")
        self._check_vocabulary("input_ids", ids, number)
        if labels is None:
            return
        if len(labels) != len(ids):
            raise self.error(number, f"{len(labels)} labels for {len(ids)} input_ids")
        self._check_vocabulary("labels", labels, number, allowed=IGNORED)

    def _check_vocabulary(
        self, field: str, values: list[int], number: int, allowed: int | None = None
    ) -> None:
        """Check that all values are tokens, or the one value that is allowed besides."""
        # Much faster than the loop below, which finds the first value that is wrong. Labels that
        # are ignored come to the loop as well.
        if min(values) >= 0 and max(values) < self.vocabulary_size:
            return
        expected = f"not between 0 and {self.vocabulary_size - 1} (the model's vocabulary)"
        if allowed is not None:
            expected += f" nor {allowed}"
        for position, value in enumerate(values):
            inside = 0 <= value < self.vocabulary_size
            if not inside and value != allowed:
                raise self.error(number, f"{field}[{position}] is {value}, {expected}")


def _undecodable(data: bytes, number: int, error: Exception) -> str:
    """Say why a line does not decode."""
    if number == 1 and data.startswith(_BYTE_ORDER_MARK):
        return "starts with a byte order mark; save the file as UTF-8 without one"
    if not data.strip():
        return "is empty; every line must be a JSON object"
    try:
        data.decode()
    except UnicodeDecodeError as bad:
        return f"is not UTF-8 (byte {bad.start} of the line)"
    return f"is not a usable JSON object: {error}"
