"""Tokenizers of text: the bytes of UTF-8, or a `tokenizer.json`, which is known by its digest."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol

import numpy as np

from infinipipe.aliases import Ints
from infinipipe.errors import InputError

IDS = "ids"
"""Stands for the tokenizer of a dataset that holds tokens already, so that none is needed."""
LENGTHS = "lengths"
"""Stands for the tokenizer of a dataset that holds only lengths: it can be planned but not run."""
BYTES = "bytes"
"""Names the tokenizer whose tokens are the bytes of UTF-8, without any special ones."""

_TOKENIZER_FILE = "tokenizer.json"


class Tokenizer(Protocol):
    """Turns texts into tokens."""

    def encode(self, texts: list[str]) -> list[Ints]:
        """Return the token ids of each text."""


def open_tokenizer(name: str) -> Tokenizer:
    """Return a tokenizer by name: `BYTES`, or a directory with a `tokenizer.json`.

    Raises:
        InputError: the directory holds no such file, or one that is no tokenizer.
    """
    if name == BYTES:
        return _ByteTokenizer()
    return _FileTokenizer(Path(name))


def tokenizer_sha256(tokenizer: str) -> str:
    """Return the digest of a tokenizer's file, by which a run recognises it.

    It is empty where there is no file: for `IDS`, `BYTES` and `LENGTHS`.

    Raises:
        InputError: the directory holds no such file.
    """
    if tokenizer in (IDS, BYTES, LENGTHS):
        return ""
    path = Path(tokenizer) / _TOKENIZER_FILE
    try:
        data = path.read_bytes()
    except OSError as error:
        reason = error.strerror or error
        raise InputError(
            f"{path}: {reason}; text needs the tokenizer of the profile's model"
        ) from None
    return hashlib.sha256(data).hexdigest()


class _ByteTokenizer:
    def encode(self, texts: list[str]) -> list[Ints]:
        return [_byte_values(text) for text in texts]


def _byte_values(text: str) -> Ints:
    return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)


class _FileTokenizer:
    """A Hugging Face `tokenizer.json`."""

    def __init__(self, directory: Path) -> None:
        from tokenizers import Tokenizer  # a heavy import that only text needs

        path = directory / _TOKENIZER_FILE
        if not path.is_file():
            raise InputError(
                f"{directory}: has no {_TOKENIZER_FILE}, which a dataset with text needs"
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more precise
            raise InputError(f"{path}: not a tokenizer: {error}") from None
        # Sequences are cut by --max-length alone, and never padded.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, texts: list[str]) -> list[Ints]:
        encodings = self._tokenizer.encode_batch_fast(texts)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]
