"""The rooms of the code import in one direction, and the walks through them are those there are."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tpplan.styles import STYLES

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tpplan"
ARCHITECTURE = ROOT / "docs" / "architecture.md"

# what each room may import: docs/architecture.md has the picture
PERMITTED: Mapping[str, str] = {
    "version": "",
    "compat": "",
    "layout": "",
    "wrapping": "",
    "language": "",
    "models": "",
    "kernels": "compat",
    "places": "",
    "compiled": "compat layout language kernels places",
    "comm": "compat layout kernels",
    "roles": "compat kernels places compiled comm",
    "styles": "layout language compiled roles",
    "observe": "compat layout language kernels places compiled styles",
    "planner": "compat layout language kernels places compiled roles styles observe wrapping",
    "rewrite": "compat language kernels compiled comm roles styles observe planner",
    "simulate": "compat language kernels compiled comm roles observe planner rewrite",
    "cost": "layout language comm compiled observe planner simulate",
    "checkpoint": "compat comm progress wrapping",
    "shipped": "language",
    "progress": "",
    "completion": "",
    "render": "version layout language kernels compiled planner simulate cost shipped",
    "proof": "compat layout language places compiled comm styles observe planner rewrite simulate",
    "suggestion": "version language models compat observe planner styles simulate cost proof",
    "options": "language",
    "resizing": "",
    "trainers": "checkpoint rewrite resizing",
    "pipelines": "comm roles",
    "adapters": "comm roles checkpoint",
    "hf": "language styles planner shipped",
    "automatic": "language wrapping shipped planner suggestion",
    "api": "observe compat language wrapping kernels comm compiled planner rewrite trainers "
    "adapters simulate cost shipped automatic render proof suggestion",
    "pretrained": "models wrapping checkpoint observe rewrite shipped api",
    "cli": "observe version language models options planner progress completion shipped render "
    "proof suggestion api",
    "__main__": "cli",
    "": "version",  # the package itself: it finds its rooms by their names
}
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}


def imported(name: str) -> set[str]:
    """The modules of tpplan that one imports at run time, in its functions too."""
    return set(_imports(ast.parse(MODULES[name].read_text())))


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield from (m for m in [inner if inner in MODULES else node.module] if m in MODULES)
        yield from _imports(node)


def room(module: str) -> str:
    """The room that a module is in; "" is the package itself."""
    return module.partition(".")[2].partition(".")[0]


def test_no_circle() -> None:
    graphlib.TopologicalSorter({name: imported(name) for name in MODULES}).prepare()
    graphlib.TopologicalSorter({name: found.split() for name, found in PERMITTED.items()}).prepare()


@pytest.mark.parametrize("name", sorted({room(module) for module in MODULES}))
def test_directions(name: str) -> None:
    inside = [module for module in MODULES if room(module) == name]
    met = {room(other): (module, other) for module in inside for other in imported(module)}
    met.pop(name, None)
    assert {r: found for r, found in met.items() if r not in PERMITTED[name].split()} == {}


def test_the_paths_of_the_walks() -> None:
    paths = re.findall(
        r"`((?:tpplan|tests|benchmarks|plans|docs)/[\w./*-]*)`", ARCHITECTURE.read_text()
    )
    assert len(paths) > 20
    assert [path for path in paths if not any(ROOT.glob(path.rstrip("/")))] == []


def test_every_room_is_in_the_picture() -> None:
    text = ARCHITECTURE.read_text()
    rooms = {room(module) for module in MODULES if (PACKAGE / room(module)).is_dir()} - {""}
    assert [name for name in sorted(rooms) if f"`tpplan/{name}/`" not in text] == []


STYLED = [module for module in MODULES if room(module) not in ("language", "styles")]


WORDS = {name: re.compile(rf"\b{name}\b") for name in STYLES}
PLAIN = {"attention", "experts", "sequence_parallel"}  # also English words, and the mode


@functools.cache
def _words(module: str) -> tuple[list[str], list[str], list[object]]:
    """Strings of a module but its docstrings; all of its strings; what it compares with."""
    nodes = [*ast.walk(ast.parse(MODULES[module].read_text()))]
    told = {id(n.value) for n in nodes if isinstance(n, ast.Expr)}
    constants = [n for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    compared = [m for n in nodes if isinstance(n, ast.Compare) for m in ast.walk(n)]
    return (
        [str(n.value) for n in constants if id(n) not in told],
        [str(n.value) for n in constants],
        [n.value for n in compared if isinstance(n, ast.Constant)],
    )


@pytest.mark.parametrize("name", [*STYLES])
def test_a_style_is_named_in_its_file_alone(name: str) -> None:
    for module in STYLED:
        code, strings, compared = _words(module)
        if name == "sequence_parallel":
            assert name not in compared, module
        elif name in PLAIN:
            assert name not in strings, module
        else:
            assert not any(WORDS[name].search(word) for word in code), module


@pytest.mark.parametrize("module", sorted(MODULES))
def test_sizes(module: str) -> None:
    text = MODULES[module].read_text()
    assert text.count("\n") <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 60, node.name
