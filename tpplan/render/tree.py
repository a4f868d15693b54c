"""The model's modules as a collapsible tree, equal elements of a list as one."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tpplan.compiled import CompiledPlan, ModulePlan, ParameterPlan
from tpplan.cost.memory import parameter_bytes
from tpplan.planner.match import folded
from tpplan.render.explain import inferences
from tpplan.render.markup import Html, breakable, details, join, tag, times
from tpplan.render.paths import folded_text
from tpplan.render.units import size

_COLUMNS = ("shape", "placement", "local shape", "bytes per rank", "rule", "gradient")
# beyond so many rows the deeper levels start closed
_ROWS_OPEN = 150


@dataclass
class Node:
    """A module: its children by name, its own parameters and those it shares with others.

    Attributes:
        count: how many equal elements of a list it stands for; label: their name.
        tied: own names of parameters that are another module's -> the name there.
    """

    path: str
    label: str
    plan: ModulePlan | None = None
    children: dict[str, Node] = field(default_factory=dict)
    parameters: list[ParameterPlan] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)
    count: int = 1
    notes: tuple[str, ...] = ()

    @property
    def bytes_per_rank(self) -> int:
        """Of all parameters in it, however often it is there."""
        own = sum(parameter_bytes(p, p.local_shape) for p in self.parameters)
        return self.count * (own + sum(c.bytes_per_rank for c in self.children.values()))

    @property
    def rows(self) -> int:
        """How many rows it is shown as."""
        own = len(self.parameters) + len(self.tied)
        return own + 1 + sum(child.rows for child in self.children.values())


def module_tree(compiled: CompiledPlan, name: str) -> Node:
    """The modules of a model of class ``name`` that have parameters or are rewritten."""
    root = Node("", name, compiled.modules.get(""))
    for path, plan in compiled.modules.items():
        _at(root, path).plan = plan
    for entry in compiled.parameters.values():
        _at(root, entry.name.rpartition(".")[0]).parameters.append(entry)
        for alias in entry.aliases:
            path, _, leaf = alias.rpartition(".")
            _at(root, path).tied[leaf] = entry.name
    _annotate(root, compiled)
    _fold(root, {})
    return root


def _at(root: Node, path: str) -> Node:
    node = root
    for part in path.split(".") if path else ():
        below = f"{node.path}.{part}" if node.path else part
        node = node.children.setdefault(part, Node(below, part))
    return node


def _annotate(node: Node, compiled: CompiledPlan) -> None:
    if node.plan is not None:
        prefix = f"{folded(node.path)}." if node.path else ""
        lines = map(folded_text, inferences(compiled, node.plan))
        node.notes = tuple(line.replace(prefix, "") if prefix else line for line in lines)
    for child in node.children.values():
        _annotate(child, compiled)


def _fold(node: Node, known: dict[Hashable, int]) -> int:
    """Make equal elements one; returns a number that equal modules have in common."""
    groups: dict[Hashable, list[Node]] = {}
    for name, child in node.children.items():
        kind = _fold(child, known)
        groups.setdefault((kind, None if name.isdigit() else name), []).append(child)
    numbered = sum(name.isdigit() for name in node.children)
    node.children = {group[0].label: _grouped(group, numbered) for group in groups.values()}
    plan = node.plan
    signature = (
        None if plan is None or plan.rule is None else (plan.rule.pattern.text, plan.style),
        node.notes,
        tuple(_alike(entry) for entry in node.parameters),
        tuple((leaf, folded(name)) for leaf, name in node.tied.items()),
        tuple(groups),
        tuple(len(group) for group in groups.values()),
    )
    return known.setdefault(signature, len(known))


def _alike(entry: ParameterPlan) -> Hashable:
    rule = None if entry.rule is None else entry.rule.pattern.text
    leaf = entry.name.rpartition(".")[2]
    aliases = tuple(map(folded, entry.aliases))
    shapes = (entry.shape, entry.local_shape, entry.dtype)
    return leaf, shapes, entry.placed, entry.summed, aliases, rule


def _grouped(group: Sequence[Node], numbered: int) -> Node:
    first = group[0]
    if len(group) > 1:
        first.count = len(group)
        first.label = "*" if len(group) == numbered else _ranges([int(n.label) for n in group])
    return first


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers in a few characters: 0–2, 5, 7–60."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = [str(a) if a == b else f"{a}–{b}" for a, b in runs[:4]]
    return ", ".join([*shown, "…"] if len(runs) > 4 else shown)


def render_tree(compiled: CompiledPlan, name: str) -> Html:
    """The tree of a model's modules, with a heading for its columns."""
    root = module_tree(compiled, name)
    head = tag(
        "div",
        tag("span", "module and parameter", class_="name"),
        *(tag("span", column, class_="cell") for column in _COLUMNS),
        class_="row head",
        aria_hidden="true",
    )
    content = tag("ul", _module(root, "", root.rows <= _ROWS_OPEN, 0), class_="tree")
    return join([head, content])


def _module(node: Node, prefix: str, opened: bool, depth: int) -> Html:
    label = f"{prefix}{node.label}"
    if not node.children:
        return join(_leaf(node, label))
    bare = not (node.parameters or node.tied or node.notes or _style(node) or node.count > 1)
    if bare and len(node.children) == 1 and depth:
        (only,) = node.children.values()
        return _module(only, f"{label}.", opened, depth)
    children = (_module(child, "", opened, depth + 1) for child in node.children.values())
    inner = [*_rows(node, "", node.path), *children]
    title = [
        tag("span", label, class_="path"),
        _count(node),
        tag("span", _style(node), class_="style") if _style(node) else "",
        tag("span", size(node.bytes_per_rank), class_="sum") if node.bytes_per_rank else "",
    ]
    content = [*_notes(node.notes), tag("ul", *inner)]
    shown = details(join(title), *content, open=opened or depth < 2)
    return tag("li", shown, data_path=folded(node.path))


def _leaf(node: Node, label: str) -> Iterator[Html]:
    """A module without modules: its parameters stand in its place."""
    notes, count = _notes(node.notes), _count(node)
    if node.parameters or node.tied:
        yield from _rows(node, f"{label}.", node.path, count, notes)
        return
    named = tag("span", label, count, class_="name path")
    cells = tag("span", _style(node) or "no parameters", class_="wide")
    row = tag("div", named, cells, class_="row")
    yield tag("li", row, *notes, data_path=folded(node.path))


def _count(node: Node) -> Html:
    return tag("span", f" ×{node.count}", class_="times") if node.count > 1 else Html()


def _notes(lines: Iterable[str]) -> list[Html]:
    return [tag("p", line, class_="note") for line in lines]


def _style(node: Node) -> str:
    plan = node.plan
    return "" if plan is None or plan.style is None else plan.style


def _rows(
    node: Node, prefix: str, path: str, count: object = "", notes: Sequence[Html] = ()
) -> Iterator[Html]:
    for leaf, cells, ties in _own(node):
        named = tag("span", f"{prefix}{leaf}", count, class_="name path")
        row = tag("div", named, *cells, class_="row")
        yield tag("li", row, *ties, *notes, data_path=folded(f"{path}.{leaf}".strip(".")))
        notes = ()


def _own(node: Node) -> Iterator[tuple[str, list[Html], list[Html]]]:
    """For each of a module's parameters its own name, its cells, and what else there is to say."""
    for entry in node.parameters:
        cells = (
            times(entry.shape),
            _placement(entry),
            times(entry.local_shape),
            size(parameter_bytes(entry, entry.local_shape)),
            _rule(entry),
            "summed" if entry.summed else "own",
        )
        shown = [
            tag("span", tag("span", f"{title}: ", class_="title"), cell, class_="cell")
            for title, cell in zip(_COLUMNS, cells, strict=True)
        ]
        ties = (f"tied: {folded(alias)} is the same parameter" for alias in entry.aliases)
        yield entry.name.rpartition(".")[2], shown, _notes(ties)
    for leaf, name in node.tied.items():
        yield leaf, [tag("span", f"tied to {folded(name)}", class_="wide")], []


def _placement(entry: ParameterPlan) -> Html:
    sharded = not entry.placement.is_replicate()
    dtype = str(entry.dtype).removeprefix("torch.")
    return tag("span", entry.placed, class_="shard" if sharded else "whole", title=dtype)


def _rule(entry: ParameterPlan) -> Html:
    if entry.rule is None:
        return tag("span", "none: small", class_="quiet")
    at = entry.rule.position
    pattern = f"{entry.rule.pattern.text}:{at.line}"
    return join([tag("b", entry.rule.style), " ", tag("code", breakable(pattern))])
