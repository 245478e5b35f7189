"""The house keeps its order: a true map, words in use, reasons at constants, imports one way."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import networkx
import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "infinipipe"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")


def mapped_modules() -> set[str]:
    """Return the modules that the README's map names, as paths below the package."""
    text = (ROOT / "README.md").read_text()
    (block,) = re.findall(r"```\ninfinipipe/\n(.*?)```", text, re.DOTALL)
    modules = set()
    folder = ""
    for line in block.splitlines():
        entry = line.strip()
        # What an entry names ends where its description begins, after a gap.
        named = re.split(r"\s{2,}", entry)[0]
        if named.endswith("/"):
            folder = named
            continue
        # Modules at the top are indented once, those of a folder twice.
        inside = line.startswith("    ")
        for name in named.split(", "):
            modules.add(folder + name if inside else name)
    return modules


def test_the_map_names_every_module_and_no_other() -> None:
    assert mapped_modules() == {str(path.relative_to(PACKAGE)) for path in MODULES}


def test_every_word_is_used() -> None:
    words = re.findall(r"^\| ([a-z, ]+) \|", (ROOT / "docs" / "words.md").read_text(), re.MULTILINE)
    listed = {word for row in words for word in row.split(", ")} - {"word"}
    text = "\n".join(path.read_text() for path in MODULES).replace("_", " ").lower()
    assert len(listed) > 20
    assert [word for word in sorted(listed) if not is_used(word, text)] == []


def is_used(word: str, text: str) -> bool:
    """Return whether a text has a word, or its plural, as a whole word."""
    stem = word.removesuffix("y")
    plural = f"{stem}ies" if stem != word else f"{word}(s|es)"
    return re.search(rf"\b({word}|{plural})\b", text) is not None


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_constants_say_why(path: Path) -> None:
    """A number at the top of a module has a comment above or beside it, or a docstring below."""
    lines = path.read_text().splitlines()
    body = ast.parse(path.read_text()).body
    silent = []
    for place, node in enumerate(body):
        if not is_number(node):
            continue
        following = body[place + 1] if place + 1 < len(body) else None
        has_docstring = isinstance(following, ast.Expr) and isinstance(
            following.value, ast.Constant
        )
        # Constants that stand together share what is said above the first of them.
        above = node.lineno - 2
        while above >= 0 and any(
            n.lineno - 1 <= above < n.end_lineno for n in body if is_number(n)
        ):
            above -= 1
        has_comment = lines[above].startswith("#") or "  # " in lines[node.end_lineno - 1]
        if not (has_docstring or has_comment):
            silent.append(lines[node.lineno - 1])
    assert silent == []


def is_number(node: ast.stmt) -> bool:
    """Return whether a statement gives a name to a number or numbers."""
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return False
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    if not (isinstance(target, ast.Name) and target.id.isupper()):
        return False
    constants = [n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant)]
    numbers = [c for c in constants if isinstance(c, int | float) and not isinstance(c, bool)]
    calls = any(isinstance(n, ast.Call | ast.Dict) for n in ast.walk(node.value))
    return bool(numbers) and not calls


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_statement_holds_two_comprehensions(path: Path) -> None:
    """Neither side by side, nor one in the other, nor one with two `for`."""
    crowded = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.stmt):
            loops = [part for part in own_nodes(node) if isinstance(part, ast.comprehension)]
            if len(loops) > 1:
                crowded.append(f"line {node.lineno}")
    assert crowded == []


def own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what a statement consists of, without the statements in its body."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.stmt):
            yield child
            yield from own_nodes(child)


def test_no_module_needs_one_that_needs_it() -> None:
    graph = networkx.DiGraph()
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("infinipipe"):
                graph.add_edge(name.removesuffix(".__init__"), node.module)
    modules = graph.subgraph(set(graph) - {"infinipipe"})
    assert list(networkx.simple_cycles(modules)) == []
