"""Nodes of a plan's source as typed values; what does not fit is collected, not raised."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from tpplan.language.diagnostics import Position, Reporter, TextError, did_you_mean, quoted
from tpplan.language.expressions import Expression
from tpplan.language.patterns import Pattern
from tpplan.language.plan import FrozenMap
from tpplan.language.source import Broken, MappingNode, Node, Scalar, ScalarKind, SequenceNode
from tpplan.language.styles import Kind, Option

_WHOLE_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,17}")
_FLAGS = {"true": True, "false": False}


class Values(Reporter):
    """Reads nodes. Every method returns None where it reported a problem."""

    def mismatch(self, node: Node, what: str, wanted: str, hint: str | None = None) -> None:
        """Note that ``node`` is not what is ``wanted``."""
        if isinstance(node, Broken):
            return
        if isinstance(node, SequenceNode):
            found = "this is a list"
        elif isinstance(node, MappingNode):
            found = "this is a mapping"
        elif node.kind is ScalarKind.NULL:
            found = "it has no value"
        elif node.kind is ScalarKind.TEXT:
            found = f"this is the text {quoted(node.text)}"
        else:
            found = f"YAML reads {quoted(node.text)} as {node.kind.value}"
        self.report(f"{what} must be {wanted}, but {found}", node.position, hint)

    # --- scalars

    def text(self, node: Node, what: str) -> str | None:
        """Any text, also an empty one."""
        if isinstance(node, Scalar) and node.kind is ScalarKind.TEXT:
            return node.text
        stated = isinstance(node, Scalar) and node.kind is not ScalarKind.NULL
        self.mismatch(node, what, "text", "quote it" if stated else None)
        return None

    def name(self, node: Node, what: str) -> str | None:
        """Text that is not blank."""
        text = self.text(node, what)
        if text is not None and not text.strip():
            self.report(f"{what} is empty", node.position)
            return None
        return text

    def flag(self, node: Node, what: str) -> bool | None:
        """True or false, and none of YAML's other words for it."""
        if not isinstance(node, Scalar) or node.kind is not ScalarKind.BOOLEAN:
            is_quoted = isinstance(node, Scalar) and node.text.lower() in _FLAGS
            hint = "leave the quotes away" if is_quoted else None
            self.mismatch(node, what, "true or false", hint)
            return None
        word = node.text.lower()
        if word not in _FLAGS:
            hint = f"write '{'true' if word in ('yes', 'on') else 'false'}'"
            self.report(f"{what} must be true or false", node.position, hint)
        return _FLAGS.get(word)

    def whole(self, node: Node, what: str, minimum: int | None = None) -> int | None:
        """A whole number in plain decimal digits."""
        wanted = "a whole number" if minimum is None else f"a whole number, at least {minimum}"
        if not isinstance(node, Scalar) or node.kind is not ScalarKind.INTEGER:
            is_quoted = isinstance(node, Scalar) and _WHOLE_NUMBER.fullmatch(node.text)
            self.mismatch(node, what, wanted, "leave the quotes away" if is_quoted else None)
            return None
        if not _WHOLE_NUMBER.fullmatch(node.text):
            hint = "write it in decimal digits, without leading zeros or other marks"
            message = f"{what} is {quoted(node.text)}, which programs read differently"
            self.report(message, node.position, hint)
            return None
        value = int(node.text)
        if minimum is not None and value < minimum:
            self.report(f"{what} must be {wanted}, not {value}", node.position)
            return None
        return value

    def choice(self, node: Node, what: str, choices: Iterable[str]) -> str | None:
        """One of a few words."""
        known = list(choices)
        listed = f"one of {', '.join(known)}"
        if not isinstance(node, Scalar) or node.kind is not ScalarKind.TEXT:
            self.mismatch(node, what, listed)
        elif node.text in known:
            return node.text
        else:
            hint = did_you_mean(node.text, known, listed)
            self.report(f"{what} cannot be {quoted(node.text)}", node.position, hint)
        return None

    def pattern(self, node: Node, what: str) -> Pattern | None:
        """A module pattern."""
        text = self.text(node, what)
        if text is None or not isinstance(node, Scalar):
            return None
        try:
            return Pattern(text)
        except TextError as error:
            self.report(f"{what}: {error}", within(node, error.offset))
            return None

    def expression(self, node: Node, what: str, minimum: int | None = None) -> str | int | None:
        """A whole number, or the text of an expression that uses names."""
        if isinstance(node, Scalar) and node.kind is ScalarKind.INTEGER:
            return self.whole(node, what, minimum)
        if not isinstance(node, Scalar) or node.kind is not ScalarKind.TEXT:
            self.mismatch(node, what, "a whole number or an expression such as 'heads * head_dim'")
            return None
        try:
            expression = Expression(node.text)
            value = None if expression.names else expression.evaluate({})
        except TextError as error:
            self.report(f"{what}: {error}", within(node, error.offset))
            return None
        if value is not None and minimum is not None and value < minimum:
            self.report(f"{what} must be at least {minimum}, not {value}", node.position)
            return None
        return node.text if value is None else value

    # --- collections

    def names(self, node: Node, what: str, may_be_empty: bool = False) -> tuple[str, ...] | None:
        """A list of different names."""
        if not isinstance(node, SequenceNode):
            single = isinstance(node, Scalar) and node.kind is ScalarKind.TEXT
            hint = f"write [{node.text}]" if single and isinstance(node, Scalar) else None
            self.mismatch(node, what, "a list of names", hint)
            return None
        if not node.items and not may_be_empty:
            self.report(f"{what} is an empty list", node.position)
            return None
        seen: dict[str, Position] = {}
        for item in node.items:
            name = self.name(item, f"an entry of {what}")
            if name in seen:
                first = [("it was given here first", seen[name])]
                self.report(f"{quoted(name)} is listed twice", item.position, related=first)
            elif name is not None:
                seen[name] = item.position
        return tuple(seen) if len(seen) == len(node.items) else None

    def mapping(self, node: Node, what: str, wanted: str) -> dict[str, tuple[Scalar, Node]] | None:
        """A mapping's entries by key, each key with its node."""
        if isinstance(node, MappingNode):
            return {key.text: (key, value) for key, value in node.entries}
        glued = isinstance(node, Scalar) and re.search(r":\S", node.text)
        self.mismatch(node, what, wanted, "put a space after the colon" if glued else None)
        return None

    def unknown(self, key: Scalar, what: str, choices: Iterable[str], otherwise: str) -> None:
        """Note a key that does not exist."""
        hint = did_you_mean(key.text, choices, otherwise)
        self.report(f"unknown {what} {quoted(key.text)}", key.position, hint)

    # --- options of styles

    def option(self, node: Node, name: str, option: Option) -> object | None:
        """An option's value."""
        what = f"'{name}'"
        readers: Mapping[Kind, Callable[[], object | None]] = {
            Kind.FLAG: lambda: self.flag(node, what),
            Kind.CHOICE: lambda: self.choice(node, what, option.choices),
            Kind.COUNT: lambda: self.expression(node, what, minimum=1),
            Kind.NAMES: lambda: self.names(node, what),
            Kind.PACKED: lambda: self.packed(node, what),
            Kind.EXPRESSIONS: lambda: self.by_identifier(node, what, option, self.expression),
            Kind.DIMENSION: lambda: self.whole(node, what),
            Kind.DIMENSIONS: lambda: self.by_identifier(node, what, option, self.whole),
        }
        return readers[option.kind]()

    def packed(self, node: Node, what: str) -> FrozenMap[object] | None:
        """``[q, k, v]``, ``{parts: [q, k, v], repeat: kv_heads}`` or ``{q: [heads, 64], ...}``.

        As a mapping with ``parts``, and ``repeat`` or ``sizes`` where they are said.
        """
        if isinstance(node, SequenceNode):
            listed = self.names(node, what)
            return None if listed is None else FrozenMap({"parts": listed})
        entries = self.mapping(node, what, Kind.PACKED.value)
        if entries is None:
            return None
        pairs = (isinstance(n, SequenceNode) and len(n.items) == 2 for _, n in entries.values())
        if len(entries) > 1 and any(pairs) and entries.keys().isdisjoint(("parts", "repeat")):
            return self.sized(entries)
        before = len(self.problems)
        found: dict[str, object] = {}
        for key, (key_node, value) in entries.items():
            if key == "parts":
                found[key] = self.names(value, "'parts'")
            elif key == "repeat":
                found[key] = self.repeat(value)
            else:
                self.unknown(key_node, f"key of {what}", ("parts", "repeat"), Kind.PACKED.value)
        if "parts" not in entries:
            self.report(f"{what} does not say its parts", node.position, "add 'parts: [q, k, v]'")
        return FrozenMap(found) if len(self.problems) == before else None

    def sized(self, entries: Mapping[str, tuple[Scalar, Node]]) -> FrozenMap[object] | None:
        """Parts by name with their sizes: how many units, and how wide each is."""
        before = len(self.problems)
        sizes = []
        for name, (key, value) in entries.items():
            what = f"the size of {quoted(name)}"
            if not name.isidentifier():
                self.report(f"{quoted(name)} cannot be the name of a part", key.position)
            if not isinstance(value, SequenceNode) or len(value.items) != 2:
                hint = "such as 'q: [heads, head_dim]'"
                self.mismatch(value, what, "a list of two: how many, and how wide each is", hint)
                continue
            sizes.append(tuple(self.expression(n, what, minimum=1) for n in value.items))
        found = FrozenMap({"parts": tuple(entries), "sizes": tuple(sizes)})
        return found if len(self.problems) == before else None

    def repeat(self, node: Node) -> int | str | None:
        """How often the parts come one after the other: a number, or a name for one."""
        if isinstance(node, Scalar) and node.kind is ScalarKind.TEXT and node.text.isidentifier():
            return node.text
        if isinstance(node, Scalar) and node.kind is ScalarKind.INTEGER:
            return self.whole(node, "'repeat'", minimum=1)
        self.mismatch(node, "'repeat'", "a positive whole number or a name such as 'kv_heads'")
        return None

    def by_identifier(
        self, node: Node, what: str, option: Option, read: Callable[[Node, str], int | str | None]
    ) -> FrozenMap[object] | None:
        """A mapping from the names of attributes or arguments."""
        entries = self.mapping(node, what, option.kind.value)
        if entries is None:
            return None
        if not entries:
            self.report(f"{what} is an empty mapping", node.position)
        before = len(self.problems)
        found: dict[str, object] = {}
        for key, (key_node, value) in entries.items():
            first, *rest = key.split(".")
            if not (first.isidentifier() and all(p.isidentifier() or p.isdigit() for p in rest)):
                message = f"{quoted(key)} cannot be the name of an attribute or argument"
                self.report(message, key_node.position)
            found[key] = read(value, f"{what}: {quoted(key)}")
        return FrozenMap(found) if len(self.problems) == before else None


def within(node: Scalar, offset: int) -> Position:
    """The place of one character of a scalar, where the source shows it as it is."""
    position = node.position
    start = position.column - 1
    start += position.text[start : start + 1] in ("'", '"')
    if not position.text.startswith(node.text, start):
        return position
    return Position(position.file, position.line, start + offset + 1, position.text)
