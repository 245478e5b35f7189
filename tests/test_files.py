"""Files are whole or as they were."""

from __future__ import annotations

from pathlib import Path

import pytest

from infinipipe.errors import InputError
from infinipipe.files import check_output, write_output, write_whole


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    path.write_text("before")
    write_output(path, "--output", "line\r\n\u00e9")
    assert path.read_bytes() == b"line\r\n\xc3\xa9"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out"
    path.write_text("before")

    def fail(*_: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no room"):
        write_whole(path, b"after")
    with pytest.raises(InputError, match="out: no room; choose another file with --html"):
        write_output(path, "--html", "after")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["in", "in.tmp", "in.partial", "link"])
def test_no_name_of_an_output_is_an_input(tmp_path: Path, name: str) -> None:
    given = tmp_path / name
    (tmp_path / "in").write_text("")
    if name == "link":
        given.symlink_to("in")
    else:
        given.write_text("")
    with pytest.raises(InputError, match="would overwrite an input"):
        check_output(tmp_path / "in", "--output", given)
