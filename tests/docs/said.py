"""The messages of the planner and the proof, as the source has them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.docs.pages import ROOT

PACKAGE = ROOT / "tpplan"
# where users are told what is wrong with a plan, a model, or a call of a sharded one
ROOMS = (
    "planner",
    "proof",
    "rewrite",
    "styles",
    "roles",
    "layout.py",
    "shipped.py",
    "trainers.py",
    "adapters.py",
    "resizing.py",
    "automatic.py",
)
# what says what to do needs no page: the place of the hint among a call's arguments, ...
_HINTS = {
    "Diagnostic": 2,
    "Misstep": 2,
    "say": 2,
    "about": 3,
    "by_rule": 1,
    "_say": 3,
    "_about": 2,
}
# ... functions and classes elsewhere that make hints, and those that write reports
_OTHERWISE = {"nearly", "_Cure", "looks_packed", "reasons", "describe", "_stack_within"}
_WORDS, _ENOUGH = 3, 10


@dataclass(frozen=True)
class Said:
    """A string in a function: its constant parts, the variable ones left out."""

    file: str
    line: int
    parts: tuple[str, ...]

    @property
    def words(self) -> str:
        """The longest constant part: its first clause, of a long one the beginning."""
        clause = max(self.parts, key=len, default="").partition(";")[0]
        return plain(" ".join(clause.split()[:_ENOUGH]))

    @property
    def is_prose(self) -> bool:
        """Whether it is long enough to be found by."""
        return len(re.findall(r"[A-Za-z]\w*", self.words)) >= _WORDS


def messages(rooms: tuple[str, ...] = ROOMS) -> list[Said]:
    """Every string in a function that is no docstring and no hint."""
    found = []
    for room in rooms:
        path = PACKAGE / room
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            found += _of(file)
    return found


def constants() -> list[str]:
    """Every string that a module of the package has under a name, which functions say."""
    assigned = (
        node.value
        for file in sorted(PACKAGE.rglob("*.py"))
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.Assign)
    )
    return [part for value in assigned for part in _parts(value)]


def _of(file: Path) -> Iterator[Said]:
    tree = ast.parse(file.read_text())
    hints = set(_hints(tree))
    for node in _strings(tree, within=False):
        if id(node) not in hints:
            yield Said(str(file.relative_to(PACKAGE)), node.lineno, _parts(node))


def _strings(node: ast.AST, within: bool) -> Iterator[ast.expr]:
    """Strings in functions, f-strings as one."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue  # a docstring
        if isinstance(child, ast.FunctionDef | ast.ClassDef) and child.name in _OTHERWISE:
            continue
        if isinstance(child, ast.JoinedStr):
            if within:
                yield child
            for piece in child.values:
                if isinstance(piece, ast.FormattedValue):
                    yield from _strings(piece, within)
        elif isinstance(child, ast.Constant) and isinstance(child.value, str):
            if within:
                yield child
        else:
            yield from _strings(child, within or isinstance(child, ast.FunctionDef))


def _parts(node: ast.expr) -> tuple[str, ...]:
    pieces = node.values if isinstance(node, ast.JoinedStr) else [node]
    texts = [p.value for p in pieces if isinstance(p, ast.Constant) and isinstance(p.value, str)]
    return tuple(plain(text) for text in texts)


def plain(text: str) -> str:
    """Without what a page writes otherwise: spaces, and the signs at both ends."""
    return " ".join(text.split()).strip(" :;,('\".)")


def _hints(tree: ast.AST) -> Iterator[int]:
    """The strings of hints, of the variables in them, and of the functions that make them."""
    given: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "hint":
            given.append(node.value)
        if isinstance(node, ast.Call):
            place = _HINTS.get(ast.unparse(node.func).rpartition(".")[2])
            given += [] if place is None else node.args[place : place + 1]
    inner = [name.id for value in given for name in ast.walk(value) if isinstance(name, ast.Name)]
    names = {"hint", *inner} - {"message", "said"}
    makers = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name in names]
    for value in (*given, *makers, *_assigned(tree, names)):
        yield from (id(part) for part in ast.walk(value))


def _assigned(tree: ast.AST, names: set[str]) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            # several in one statement are told apart
            pairs = [(target, node.value) for target in targets]
            for target, value in list(pairs):
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                    pairs += zip(target.elts, value.elts, strict=False)
            yield from (v for t, v in pairs if isinstance(t, ast.Name) and t.id in names)
