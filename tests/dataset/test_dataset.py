"""Datasets: what is read, and every way in which a line can be wrong."""

import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infinipipe.dataset import (
    BYTES,
    IDS,
    LENGTHS,
    Dataset,
    RowReader,
    check_same_dataset,
    open_dataset,
    tokenizer_sha256,
)
from infinipipe.errors import InputError, PlanFileError


def write(tmp_path: Path, *lines: Any, name: str = "dataset.jsonl") -> Path:
    path = tmp_path / name
    path.write_bytes(
        b"".join(
            (line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n"
            for line in lines
        )
    )
    return path


def opened(
    path: Path, vocabulary_size: int = 300, max_length: int | None = None, tokenizer: str = BYTES
) -> Dataset:
    return open_dataset(path, tokenizer, vocabulary_size, max_length)


def reader(
    path: Path, vocabulary_size: int = 300, max_length: int | None = None, tokenizer: str = BYTES
) -> RowReader:
    return RowReader(path, tokenizer, vocabulary_size, max_length)


def test_ids_and_labels(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"input_ids": [1, 2, 3, 4]},
        {"input_ids": [5, 6, 7], "labels": [5, -100, 7]},
        {"input_ids": [8]},
    )
    dataset = opened(path)
    assert (dataset.rows.lengths.tolist(), dataset.rows.targets.tolist()) == ([4, 3, 1], [3, 1, 0])
    assert dataset.rows.lengths.dtype == np.int64
    # At random, and labels stay unshifted.
    rows = reader(path)
    assert rows.read(2).input_ids.tolist() == rows.read(2).labels.tolist() == [8]
    assert (rows.read(1).input_ids.tolist(), rows.read(1).labels.tolist()) == (
        [5, 6, 7],
        [5, -100, 7],
    )
    assert rows.read(0).labels.tolist() == [1, 2, 3, 4]
    assert rows.read(0).input_ids.dtype == np.int64
    with pytest.raises(InputError, match="has 3 lines, none for row 3"):
        rows.read(3)
    assert dataset.info.tokenizer == "ids"
    assert dataset.info.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (dataset.info.num_sequences, dataset.info.num_tokens, dataset.info.num_truncated) == (
        3,
        8,
        0,
    )


def test_truncation_counts_targets_within_the_cut(tmp_path: Path) -> None:
    path = write(
        tmp_path, {"input_ids": [1] * 6, "labels": [-100, 2, -100, 4, 5, 6]}, {"input_ids": [1, 2]}
    )
    dataset = opened(path, max_length=4)
    assert (dataset.rows.lengths.tolist(), dataset.rows.targets.tolist()) == ([4, 2], [2, 1])
    assert reader(path, max_length=4).read(0).labels.tolist() == [-100, 2, -100, 4]
    assert (dataset.info.num_truncated, dataset.num_cut_tokens, dataset.info.num_tokens) == (
        1,
        2,
        6,
    )


def test_text_is_bytes(tmp_path: Path) -> None:
    path = write(tmp_path, {"text": "h\u00e9", "source": "x"}, {"text": "a" * 9})
    dataset = opened(path, 256, max_length=5)
    assert dataset.rows.lengths.tolist() == [3, 5]
    assert reader(path, 256, max_length=5).read(0).input_ids.tolist() == list("h\u00e9".encode())
    assert dataset.info.tokenizer == "bytes"


@pytest.fixture
def tokenizer_directory(tmp_path: Path) -> str:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing

    tokenizer = Tokenizer(WordLevel({"<s>": 0, "a": 1, "b": 2, "c": 9}, unk_token="<s>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(2)
    directory = tmp_path / "model"
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    return str(directory)


def test_text_through_a_tokenizer_with_its_specials_and_without_its_truncation(
    tmp_path: Path, tokenizer_directory: str
) -> None:
    path = write(tmp_path, {"text": "a b a b"}, {"text": "b"})
    dataset = opened(path, 3, tokenizer=tokenizer_directory)
    assert dataset.rows.lengths.tolist() == [5, 2]
    assert reader(path, 3, tokenizer=tokenizer_directory).read(0).input_ids.tolist() == [
        0,
        1,
        2,
        1,
        2,
    ]
    assert dataset.info.tokenizer == tokenizer_directory
    file = Path(tokenizer_directory) / "tokenizer.json"
    assert dataset.info.tokenizer_sha256 == hashlib.sha256(file.read_bytes()).hexdigest()


def test_many_texts_keep_their_order(tmp_path: Path) -> None:
    lengths = [1 + (i * 7919) % 4001 for i in range(1000)]
    path = write(tmp_path, *({"text": "x" * n} for n in lengths))
    assert opened(path).rows.lengths.tolist() == lengths
    rows = reader(path)
    assert all(len(rows.read(row).input_ids) == lengths[row] for row in (0, 523, 999))


def test_text_beyond_the_vocabulary(tmp_path: Path, tokenizer_directory: str) -> None:
    path = write(tmp_path, {"text": "a"}, {"text": "c"})
    with pytest.raises(
        InputError,
        match=r"dataset.jsonl:2: text has token 9, but the model's vocabulary has only 3",
    ):
        opened(path, 3, tokenizer=tokenizer_directory)
    with pytest.raises(InputError, match=r"dataset.jsonl:1: text has token 97"):
        opened(path, 50)
    with pytest.raises(InputError, match=r"has no tokenizer.json"):
        opened(path, 50, tokenizer=str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"tokenizer.json: not a tokenizer"):
        opened(path, 50, tokenizer=str(tmp_path))


def test_lengths_plan_but_cannot_be_read(tmp_path: Path) -> None:
    path = write(tmp_path, {"length": 1}, {"length": 70})
    dataset = opened(path, max_length=50)
    assert (dataset.rows.lengths.tolist(), dataset.rows.targets.tolist()) == ([1, 50], [0, 49])
    assert dataset.info.tokenizer == "lengths"
    with pytest.raises(InputError, match=r"dataset.jsonl:2: holds only a length"):
        reader(path).read(1)


def test_gzip_reads_the_same(tmp_path: Path) -> None:
    lines = [{"input_ids": [i, i + 1]} for i in range(50)]
    path = write(tmp_path, *lines)
    packed = tmp_path / "dataset.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    plain, dataset = opened(path), opened(packed)
    assert dataset.rows.lengths.tolist() == plain.rows.lengths.tolist()
    rows = reader(packed)
    assert [rows.read(row).input_ids.tolist() for row in (49, 0, 7)] == [[49, 50], [0, 1], [7, 8]]
    assert dataset.info.sha256 == hashlib.sha256(packed.read_bytes()).hexdigest()


def test_damaged_gzip(tmp_path: Path) -> None:
    packed = tmp_path / "dataset.jsonl.gz"
    data = gzip.compress(b"".join(b'{"length": %d}\n' % n for n in range(1, 9999)))
    for damaged in (data[:-20], data[:100] + b"xxxx" + data[104:]):
        packed.write_bytes(damaged)
        with pytest.raises(InputError, match=r"dataset.jsonl.gz:\d+: (damaged gzip data|is )"):
            opened(packed)


def test_line_ends_are_free(tmp_path: Path) -> None:
    path = tmp_path / "dataset.jsonl"
    path.write_bytes(b'{"length": 4}\r\n{"length": 5}\r\n {"length":6} ')
    assert opened(path).rows.lengths.tolist() == [4, 5, 6]


BAD_LINES = {
    b'{"input_ids":[1,2': "is not a usable JSON object: .*truncated",
    b"": "is empty; every line must be a JSON object",
    b"  \r": "is empty; every line must be a JSON object",
    b'{"length": 1}{"length": 2}': "is not a usable JSON object: .*trailing",
    b"[1, 2]": "is not a usable JSON object: Expected `object`, got `array`",
    b'\xef\xbb\xbf{"length": 1}': "is not a usable JSON object",
    b'{"text": "\xff"}': r"is not UTF-8 \(byte 10 of the line\)",
    b'{"text": ""}': "text is empty",
    b'{"text": 5}': "is not a usable JSON object: Expected `str",
    b'{"input_ids": []}': "input_ids is empty",
    b'{"length": 0}': "length 0 is not between 1 and 2147483647",
    b'{"length": -3}': "length -3 is not between",
    b'{"length": 99999999999}': "length 99999999999 is not between",
    b'{"length": 2.5}': "is not a usable JSON object: Expected `int",
    b'{"length": true}': "is not a usable JSON object: Expected `int",
    b'{"other": 1}': "has none of input_ids, text and length",
    b"{}": "has none of input_ids, text and length",
    b'{"text": "x", "labels": [1]}': "labels without input_ids",
    b'{"input_ids": [1, 300]}': (
        r"input_ids\[1\] is 300, not between 0 and 299 \(the model's vocabulary\)"
    ),
    b'{"input_ids": [1, 2, -1]}': r"input_ids\[2\] is -1, not between",
    b'{"input_ids": [99999999999999999999999]}': (
        r"input_ids\[0\] is 99999999999999999999999, not between"
    ),
    b'{"input_ids": [true]}': "Expected `int`, got `bool`",
    b'{"input_ids": [1.0]}': "Expected `int`, got `float`",
    b'{"input_ids": "12"}': "Expected `array",
    b'{"input_ids": [1, 2], "labels": [1]}': "1 labels for 2 input_ids",
    b'{"input_ids": [1, 2], "labels": [-100, 300]}': (
        r"labels\[1\] is 300, not between 0 and 299 .* nor -100"
    ),
    b'{"input_ids": [1, 2], "labels": [-1, 2]}': r"labels\[0\] is -1",
    b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}": "is not a usable JSON object",
}


@pytest.mark.parametrize("bad", BAD_LINES)
def test_a_bad_line_is_named(tmp_path: Path, bad: bytes) -> None:
    path = write(tmp_path, {"input_ids": [1, 2]}, bad, {"input_ids": [1, 2]})
    with pytest.raises(InputError, match=BAD_LINES[bad]) as caught:
        opened(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert "\n" not in str(caught.value)


def test_byte_order_mark_on_the_first_line(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"dataset.jsonl:1: starts with a byte order mark; save the file as UTF-8"
    ):
        opened(write(tmp_path, b'\xef\xbb\xbf{"length": 1}'))


@pytest.mark.parametrize("first", [{"length": 5}, {"input_ids": [1]}, {"text": "x"}])
def test_lengths_do_not_mix(tmp_path: Path, first: dict[str, Any]) -> None:
    second = {"text": "y"} if "length" in first else {"length": 2}
    with pytest.raises(
        InputError, match=r"dataset.jsonl:2: lines with only a length cannot stand next to others"
    ):
        opened(write(tmp_path, first, second))


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere.jsonl: No such file or directory"):
        opened(tmp_path / "nowhere.jsonl")
    with pytest.raises(InputError, match="Is a directory"):
        opened(tmp_path)
    with pytest.raises(InputError, match=r"empty.jsonl: holds no sequence: the file is empty"):
        opened(write(tmp_path, name="empty.jsonl"))


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    path, calls = write(tmp_path, *({"length": 7} for _ in range(9000))), []
    open_dataset(path, BYTES, 256, progress=lambda done, total: calls.append((done, total)))
    size = path.stat().st_size
    assert calls == sorted(calls)
    assert calls[-1] == (size, size)
    assert len(calls) == 3


def test_a_dataset_is_known_by_its_bytes(tmp_path: Path) -> None:
    path = write(tmp_path, {"length": 7})
    info = opened(path).info
    check_same_dataset(path, info)
    check_same_dataset(path.rename(tmp_path / "moved.jsonl"), info)
    write(tmp_path, {"length": 8})
    with pytest.raises(
        PlanFileError, match=r"dataset.jsonl: is not the dataset .*, the plan says "
    ):
        check_same_dataset(path, info)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere.jsonl", "'nowhere.jsonl': No such file or directory; name the plan's dataset"),
        ("/dev/zero", "/dev/zero: is not a file; name the plan's dataset with --data"),
        ("a\0b", r"'a\\x00b': embedded null byte; name the plan's dataset with --data"),
    ],
)
def test_a_dataset_that_is_not_there_is_named(tmp_path: Path, path: str, message: str) -> None:
    info = opened(write(tmp_path, {"length": 7})).info
    with pytest.raises(InputError, match=message):
        check_same_dataset(Path(path), info)


def test_digests_of_tokenizers(tmp_path: Path) -> None:
    assert [tokenizer_sha256(name) for name in (BYTES, IDS, LENGTHS)] == ["", "", ""]
    with pytest.raises(
        InputError, match=r"tokenizer.json: No such file .*; text needs the tokenizer of the"
    ):
        tokenizer_sha256(str(tmp_path))
