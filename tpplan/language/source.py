"""YAML text as a tree of nodes with positions, refusing everything a plan has no use for."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import yaml

from tpplan.language.diagnostics import Diagnostic, PlanError, Position, Reporter, quoted

MAX_DEPTH = 20
MAX_NODES = 20_000

_LINE_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")
_BRACKETS = r"(?:\{[^:{}]*\}|\[[^:\[\]]*\])"
_KEY_TO_QUOTE = re.compile(rf"\s*((?:[*&!%@`]|{_BRACKETS})[^\s:]*)\s*:")
_VALUE_TO_QUOTE = re.compile(rf"\s*[^\s:]+:\s+([*&!%@`][^\s,]*|{_BRACKETS}[^\s,#]\S*)")
# what to do about what PyYAML says
_HINTS = {
    "\\t": "indent with spaces, not with tabs",
    "mapping values are not allowed": "check the indentation, and quote a text that contains ': '",
    "could not find expected ':'": "every line reads 'key: value', with a space after the colon",
}
_TAG_PREFIX = "tag:yaml.org,2002:"


class ScalarKind(enum.Enum):
    """What YAML reads a scalar as."""

    TEXT = "text"
    INTEGER = "a number"
    FLOAT = "a fractional number"
    BOOLEAN = "true or false"
    NULL = "nothing"
    DATE = "a date"
    MERGE = "a merge key"


_KINDS = {
    "int": ScalarKind.INTEGER,
    "float": ScalarKind.FLOAT,
    "bool": ScalarKind.BOOLEAN,
    "null": ScalarKind.NULL,
    "timestamp": ScalarKind.DATE,
    "merge": ScalarKind.MERGE,
}


@dataclass(frozen=True)
class Scalar:
    """A scalar's text, and what YAML makes of it."""

    position: Position
    text: str
    kind: ScalarKind


@dataclass(frozen=True)
class SequenceNode:
    """A list."""

    position: Position
    items: tuple[Node, ...]


@dataclass(frozen=True)
class MappingNode:
    """A mapping whose keys are text and differ from each other."""

    position: Position
    entries: tuple[tuple[Scalar, Node], ...]


@dataclass(frozen=True)
class Broken:
    """Something already reported."""

    position: Position


Node = Scalar | SequenceNode | MappingNode | Broken


def read_tree(text: str, file: str, what: str = "plan") -> tuple[Node | None, list[Diagnostic]]:
    """The document's root node, None if it is empty, and everything that YAML has and plans don't.

    Args:
        what: what messages call the document.

    Raises:
        PlanError: where the text is not YAML at all.
    """
    reader = _Reader(text.removeprefix("\ufeff"), file, what)
    return reader.read(), reader.problems


@dataclass
class _Open:
    """A collection whose end was not seen yet."""

    start: yaml.Event
    broken: bool
    children: list[Node] = field(default_factory=list)


class _Reader(Reporter):
    """Builds nodes from YAML's events with a stack of its own, so that no nesting overflows it."""

    def __init__(self, text: str, file: str, what: str) -> None:
        super().__init__()
        self.text, self.file, self.what = text, file, what
        self.lines = _LINE_BREAK.split(text)
        self.open: list[_Open] = []
        self.roots: list[Node] = []
        # Any: the methods that it inherits have no annotations.
        self.loader: Any = None

    def read(self) -> Node | None:
        documents = 0
        for count, event in enumerate(self.events()):
            if count == MAX_NODES:
                message = f"the {self.what} is far too large"
                raise PlanError([Diagnostic(message, self.between(event))])
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents == 2:
                    message = f"a {self.what} is one YAML document, but here a second one starts"
                    self.report(message, self.between(event))
            elif isinstance(event, yaml.NodeEvent):
                self.node(event)
            elif isinstance(event, yaml.CollectionEndEvent):
                self.close(event)
        root = self.roots[0] if self.roots else None
        # A document that holds only comments is an empty scalar to YAML.
        bare = isinstance(root, Scalar) and not root.text and root.kind is ScalarKind.NULL
        return None if bare else root

    def events(self) -> Iterator[yaml.Event]:
        try:
            self.loader = yaml.SafeLoader(self.text)
            while self.loader.check_event():
                yield self.loader.get_event()
        except yaml.reader.ReaderError as error:
            raise PlanError([self.unreadable(error)]) from None
        except yaml.MarkedYAMLError as error:
            raise PlanError([self.syntax_error(error)]) from None
        except (ValueError, OverflowError):
            # PyYAML lets through what chr() and int() make of an outlandish escape or version.
            mark = self.loader.get_mark()
            message = "YAML cannot read this escape or number"
            position = self.position(mark.line, mark.column)
            raise PlanError([Diagnostic(message, position)]) from None

    # --- nodes

    def node(self, event: yaml.NodeEvent) -> None:
        position = self.between(event)
        if isinstance(event, yaml.AliasEvent):
            hint = f'quote the pattern: "*{event.anchor}"'
            self.reads(f"*{event.anchor}", "alias", position, hint)
            self.attach(Broken(position))
            return
        if event.anchor is not None:
            hint = "write a value out wherever it is needed, and quote a text that starts with '&'"
            self.reads(f"&{event.anchor}", "anchor", position, hint)
        tag = getattr(event, "tag", None)
        if tag is not None:
            name = tag.replace(_TAG_PREFIX, "!!") if tag.startswith(_TAG_PREFIX) else tag
            hint = "leave the tag away, and quote a text that starts with '!'"
            message = f"the YAML tag {quoted(name)} is not allowed in a {self.what}"
            self.report(message, position, hint)
        if isinstance(event, yaml.ScalarEvent):
            nameless = event.anchor is not None and not event.value
            broken = tag is not None or nameless
            self.attach(Broken(position) if broken else self.scalar(event, position))
            return
        if len(self.open) == MAX_DEPTH:
            message = f"a {self.what} is nested at most {MAX_DEPTH} levels deep"
            raise PlanError([*self.problems, Diagnostic(message, position)])
        self.open.append(_Open(event, broken=tag is not None))

    def reads(self, text: str, kind: str, position: Position, hint: str) -> None:
        message = f"YAML reads {quoted(text)} as an {kind}, which a {self.what} has not"
        self.report(message, position, hint)

    def scalar(self, event: yaml.ScalarEvent, position: Position) -> Node:
        if _UNPRINTABLE.search(event.value):
            self.report("the text holds a character that cannot be printed", position)
            return Broken(position)
        resolved = self.loader.resolve(yaml.ScalarNode, event.value, event.implicit)
        kind = _KINDS.get(str(resolved).removeprefix(_TAG_PREFIX), ScalarKind.TEXT)
        return Scalar(position, event.value, kind)

    def close(self, end: yaml.Event) -> None:
        done = self.open.pop()
        position = self.between(done.start, end)
        if done.broken:
            self.attach(Broken(position))
        elif isinstance(done.start, yaml.MappingStartEvent):
            self.attach(MappingNode(position, tuple(self.entries(done.children))))
        else:
            self.attach(SequenceNode(position, tuple(done.children)))

    def attach(self, node: Node) -> None:
        (self.open[-1].children if self.open else self.roots).append(node)

    def entries(self, children: list[Node]) -> Iterator[tuple[Scalar, Node]]:
        """A mapping's entries without those whose keys cannot be used."""
        seen: dict[str, Scalar] = {}
        for key, value in zip(children[::2], children[1::2], strict=True):
            if isinstance(key, Broken) or not self.is_key(key):
                continue
            if key.text in seen:
                first = ("it was given here first", seen[key.text].position)
                message = f"the key {quoted(key.text)} is given twice"
                self.report(message, key.position, related=(first,))
                continue
            seen[key.text] = key
            yield key, value

    def is_key(self, node: Scalar | SequenceNode | MappingNode) -> TypeGuard[Scalar]:
        if not isinstance(node, Scalar):
            what = "a list" if isinstance(node, SequenceNode) else "a mapping"
            start = node.position.column - 1
            written = node.position.text[start : start + node.position.length]
            hint = f'quote the pattern: "{written}"' if written[0] in "{[" else None
            self.report(f"a key is text, but this is {what}", node.position, hint)
            return False
        if node.kind is ScalarKind.MERGE:
            hint = "a plan inherits from another with 'extends:'"
            self.report("merge keys are not part of the plan language", node.position, hint)
            return False
        if node.kind is not ScalarKind.TEXT:
            advice = f'quote it: "{node.text}"' if node.text else None
            message = f"a key is text, but YAML reads this as {node.kind.value}"
            self.report(message, node.position, advice)
            return bool(node.text)
        return True

    # --- positions and messages

    def position(self, line: int, column: int, length: int = 1) -> Position:
        text = self.lines[line] if line < len(self.lines) else ""
        return Position(self.file, line + 1, column + 1, text, max(1, length))

    def between(self, first: yaml.Event, last: yaml.Event | None = None) -> Position:
        """From an event's start to its own or another's end, within the first line."""
        start, end = first.start_mark, (last or first).end_mark
        assert start is not None
        assert end is not None
        stop = end.column
        if end.line != start.line:
            stop = len(self.lines[start.line].rstrip())
        return self.position(start.line, start.column, stop - start.column)

    def unreadable(self, error: yaml.reader.ReaderError) -> Diagnostic:
        before = _LINE_BREAK.split(self.text[: error.position])
        message = f"the character U+{int(error.character):04X} is not allowed in YAML"
        return Diagnostic(message, self.position(len(before) - 1, len(before[-1])))

    def syntax_error(self, error: yaml.MarkedYAMLError) -> Diagnostic:
        problem = error.problem or "not YAML"
        mark = error.problem_mark or error.context_mark
        if mark is None:
            return Diagnostic(problem)
        position = self.position(mark.line, mark.column)
        found = _KEY_TO_QUOTE.match(position.text) or _VALUE_TO_QUOTE.match(position.text)
        if found is not None:
            text = found[1]
            message = f"to YAML, '{text[0]}' at the start of a text has a meaning of its own"
            position = self.position(mark.line, found.start(1), len(text))
            return Diagnostic(message, position, f'quote the pattern: "{text}"')
        start = error.context_mark
        related: tuple[tuple[str, Position], ...] = ()
        if error.context and start is not None and start.line != mark.line:
            related = ((error.context, self.position(start.line, start.column)),)
        return Diagnostic(problem, position, self.syntax_hint(error), related)

    def syntax_hint(self, error: yaml.MarkedYAMLError) -> str | None:
        if "\\t" not in (error.problem or "") and "flow" in (error.context or ""):
            return "close every '{' and '[', and quote patterns that stand within them"
        return next((hint for said, hint in _HINTS.items() if said in (error.problem or "")), None)
