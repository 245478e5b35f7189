"""Build a real dataset without a download: this Python's own standard library, one file a line.

Source files have the heavy-tailed lengths of real documents: many short ones, a few of a hundred
times that.

    python examples/stdlib_dataset.py dataset.jsonl
"""

import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

INSTALLED_LATER = {"site-packages", "dist-packages"}
"""Folders inside the library that differ from machine to machine."""


def source_files(root: Path) -> list[Path]:
    """Return the library's `.py` files, sorted by their path inside the library."""
    inside = [path.relative_to(root) for path in root.rglob("*.py")]
    own = [path for path in inside if INSTALLED_LATER.isdisjoint(path.parts)]
    return [root / path for path in sorted(own, key=Path.as_posix)]


def documents(root: Path) -> Iterator[str]:
    """Yield the text of every file that has one.

    Bytes that are not UTF-8 become replacement characters.
    """
    for path in source_files(root):
        text = path.read_bytes().decode(errors="replace")
        if text:
            yield text


def main(output: Path) -> None:
    """Write the dataset and say how much it holds."""
    output.parent.mkdir(parents=True, exist_ok=True)
    num_documents = 0
    num_bytes = 0
    with output.open("w", encoding="utf-8") as file:
        for text in documents(Path(sysconfig.get_path("stdlib"))):
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            num_documents += 1
            num_bytes += len(text.encode())
    print(f"{output}: {num_documents} documents, {num_bytes / 1e6:.1f} MB of text")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
