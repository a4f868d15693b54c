"""A plan's text as a ``Plan``, with everything that is wrong in it reported at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from tpplan.language.diagnostics import (
    Diagnostic,
    PlanError,
    Position,
    did_you_mean,
    quoted,
    suggest,
)
from tpplan.language.plan import FrozenMap, Plan, Rule
from tpplan.language.source import Broken, MappingNode, Node, Scalar, ScalarKind, read_tree
from tpplan.language.styles import (
    KERNEL_CHOICES,
    KERNEL_KINDS,
    KEYS,
    OVERLAP_CHOICES,
    RECOMPUTE_CHOICES,
    REMOVE,
    SAVE_CHOICES,
    STYLES,
    VERSION,
)
from tpplan.language.values import Values

MAX_EXTENDS = 8
MAX_REPORTED = 50

_EXAMPLE = "a plan starts with 'tpplan: 1' and gives module patterns their styles under 'rules:'"
_RULES = "a mapping from module patterns to styles"
_RULE = "a style's name, or a mapping with 'style' and its options"
_DEFAULTS = Plan("", None, "", (), True, (), None, None, 1, FrozenMap(), "")

_Value = TypeVar("_Value")


class Source(NamedTuple):
    """A plan's text, what to call it, and its file where there is one."""

    text: str
    name: str
    path: str | None = None

    @property
    def file(self) -> str:
        """How diagnostics name it."""
        return self.name if self.path is None else self.path

    @property
    def identity(self) -> str:
        """The same for one plan under different paths."""
        return self.name if self.path is None else os.path.realpath(self.path)


Resolve = Callable[[str, Position], tuple[str, str, str | None]]


def parse(text: str, name: str, *, path: str | None = None, resolve: Resolve | None = None) -> Plan:
    """Read a plan.

    Args:
        name: what the plan is called, also in diagnostics where there is no path.
        path: the file that the text came from.
        resolve: finds the plan that another one extends, from the value of ``extends`` and its
            position (whose file is the extending one), as (text, name, path).

    Raises:
        PlanError: with all problems, in the order of the source.
    """
    return _read(Source(text, name, path), resolve, ())


def _read(source: Source, resolve: Resolve | None, chain: tuple[Source, ...]) -> Plan:
    reader = _PlanReader(source, resolve, chain)
    plan = reader.plan()
    if reader.problems:
        raise PlanError(_in_order(reader.problems, source.file))
    return plan


def _in_order(problems: Iterable[Diagnostic], file: str) -> list[Diagnostic]:
    def place(problem: Diagnostic) -> tuple[bool, str, int, int]:
        position = problem.position
        if position is None:
            return False, "", 0, 0
        return position.file != file, position.file, position.line, position.column

    ordered = sorted(problems, key=place)
    if len(ordered) > MAX_REPORTED:
        more = len(ordered) - MAX_REPORTED
        ordered[MAX_REPORTED:] = [Diagnostic(f"and {more} more problems")]
    return ordered


class _PlanReader(Values):
    """Reads one plan file; the plan it extends is read by another."""

    def __init__(self, source: Source, resolve: Resolve | None, chain: tuple[Source, ...]) -> None:
        super().__init__()
        self.source = source
        self.resolve = resolve
        self.chain = (*chain, source)
        self.entries: dict[str, tuple[Scalar, Node]] = {}

    def plan(self) -> Plan:
        """The plan; of use only where no problem was found."""
        root = self.root()
        self.entries = {key.text: (key, value) for key, value in root.entries}
        self.check_version(root.position)
        self.check_keys()
        base = self.entry("extends", self.base) or _DEFAULTS
        rules = self.rules(root.position, base)
        readers: dict[str, Callable[[Node, str], Any]] = {
            "description": lambda node, what: (self.text(node, what) or "").strip(),
            "models": lambda node, what: self.names(node, what, may_be_empty=True),
            "sequence_parallel": self.flag,
            "layers": self.pattern,
            "sequence_dim": lambda node, what: self.whole(node, what, 0),
            "recompute": self.recomputed,
            "save": lambda node, what: self.choice(node, what, SAVE_CHOICES),
            "overlap": lambda node, what: self.choice(node, what, OVERLAP_CHOICES),
        }
        found = {key: self.entry(key, read) for key, read in readers.items()}
        stated = {key: value for key, value in found.items() if value is not None}
        if "layers" in stated:
            stated["layers_position"] = self.entries["layers"][1].position
        kernels = FrozenMap({**base.kernels, **(self.entry("kernels", self.kernels) or {})})
        name, path, text = self.source.name, self.source.path, self.source.text
        return replace(
            base, name=name, path=path, rules=rules, kernels=kernels, text=text, **stated
        )

    def root(self) -> MappingNode:
        root, self.problems = read_tree(self.source.text, self.source.file)
        if isinstance(root, MappingNode):
            return root
        if root is None:
            self.report("the plan is empty", Position(self.source.file, 1, 1, ""), _EXAMPLE)
        else:
            self.mismatch(root, "a plan", "a mapping", _EXAMPLE)
        raise PlanError(_in_order(self.problems, self.source.file))

    def entry(self, key: str, read: Callable[[Node, str], _Value | None]) -> _Value | None:
        """A top-level key's value, None where it is absent or wrong."""
        if key not in self.entries:
            return None
        return read(self.entries[key][1], f"'{key}'")

    def check_version(self, start: Position) -> None:
        if "tpplan" not in self.entries:
            message = "the plan does not say which version of the plan language it is written in"
            self.report(message, start, f"start it with 'tpplan: {VERSION}'")
            return
        version = self.entry("tpplan", self.whole)
        if version is None or version == VERSION:
            return
        message = f"the plan is written in version {version} of the plan language"
        newer = "; a newer one may read it" if version > VERSION else ""
        hint = f"this tpplan reads version {VERSION}{newer}"
        # What follows may be written in a grammar that is not known here.
        raise PlanError([Diagnostic(message, self.entries["tpplan"][1].position, hint)])

    def check_keys(self) -> None:
        for text, (key, value) in self.entries.items():
            if text in KEYS:
                continue
            is_rule = isinstance(value, Scalar) and value.text in STYLES
            if is_rule and suggest(text, KEYS) is None:
                hint = "a rule stands under 'rules:'"
                self.report(f"unknown key {quoted(text)}", key.position, hint)
            else:
                self.unknown(key, "key", KEYS, f"the keys are {', '.join(KEYS)}")

    def recomputed(self, node: Node, what: str) -> tuple[str, ...] | None:
        """Kinds of what is computed again."""
        words = self.names(node, what, may_be_empty=True)
        wrong = [word for word in words or () if word not in RECOMPUTE_CHOICES]
        for word in wrong:
            known = f"there is {' and '.join(RECOMPUTE_CHOICES)}"
            hint = did_you_mean(word, RECOMPUTE_CHOICES, known)
            self.report(f"recompute: there is no {quoted(word)}", node.position, hint)
        return None if wrong else words

    # --- extends

    def base(self, node: Node, what: str) -> Plan | None:
        """The plan that this one inherits from."""
        name = self.name(node, what)
        if name is None:
            return None
        if self.resolve is None:
            self.report("this plan cannot extend another: it came without a place", node.position)
            return None
        try:
            source = Source(*self.resolve(name, node.position))
            identities = [link.identity for link in self.chain]
            if source.identity in identities:
                circle = [*self.chain[identities.index(source.identity) :], source]
                names = " -> ".join(link.file for link in circle)
                self.report(f"plans extend each other in a circle: {names}", node.position)
                return None
            if len(self.chain) > MAX_EXTENDS:
                message = f"plans extend each other more than {MAX_EXTENDS} times"
                self.report(message, node.position)
                return None
            return _read(source, self.resolve, self.chain)
        except PlanError as error:
            self.problems += error.diagnostics
            return None

    # --- rules

    def rules(self, start: Position, base: Plan) -> tuple[Rule, ...]:
        """The inherited rules with this plan's own, in place where both have a pattern."""
        merged = {rule.pattern.text: rule for rule in base.rules}
        seen: dict[str, Scalar] = {}
        for section in ("rules", "optional"):
            entries = self.entry(section, lambda node, what: self.mapping(node, what, _RULES))
            for text, (key, value) in (entries or {}).items():
                if text in seen:
                    first = [("it is here first", seen[text].position)]
                    message = f"{quoted(text)} stands under both 'rules' and 'optional'"
                    self.report(message, key.position, related=first)
                    continue
                seen[text] = key
                if isinstance(value, Scalar) and value.text == REMOVE:
                    self.remove(key, value, merged, base)
                    continue
                rule = self.rule(key, value, optional=section == "optional")
                if rule is not None:
                    merged[text] = rule
        # Beside other problems, rules may well have been meant and only not understood.
        absent = not {"rules", "optional", "extends"} & set(self.entries) <= set(KEYS)
        if not merged and (absent or not self.problems):
            self.report("the plan has no rules", start, "add some under 'rules:'")
        return tuple(merged.values())

    def remove(self, key: Scalar, value: Scalar, merged: dict[str, Rule], base: Plan) -> None:
        """Drop an inherited rule."""
        if "extends" not in self.entries:
            message = f"'{REMOVE}' drops an inherited rule, but this plan extends no other"
            self.report(message, value.position, "delete the line, or add 'extends:'")
        elif key.text in merged:
            del merged[key.text]
        elif base is not _DEFAULTS:
            message = f"there is no inherited rule for {quoted(key.text)} to remove"
            hint = did_you_mean(key.text, (rule.pattern.text for rule in base.rules))
            self.report(message, key.position, hint)

    def rule(self, key: Scalar, value: Node, optional: bool) -> Rule | None:
        before = len(self.problems)
        pattern = self.pattern(Scalar(key.position, key.text, ScalarKind.TEXT), quoted(key.text))
        pairs = value.entries if isinstance(value, MappingNode) else ()
        entries = {k.text: (k, v) for k, v in pairs}
        style, options = None, FrozenMap[object]()
        if "style" in entries or not isinstance(value, MappingNode):
            style = self.style(entries.pop("style", (key, value))[1])
        else:
            self.report("the rule does not say its style", value.position, "add 'style:'")
        if style is not None:
            options = FrozenMap(self.options(style, entries))
        if pattern is None or style is None or len(self.problems) > before:
            return None
        positions = FrozenMap({name: key.position for name, (key, _) in entries.items()})
        return Rule(pattern, style, options, optional, key.position, positions)

    def style(self, node: Node) -> str | None:
        if isinstance(node, Broken):
            return None
        known = f"the styles are {', '.join(STYLES)}"
        if not isinstance(node, Scalar) or node.kind is not ScalarKind.TEXT:
            self.mismatch(node, "a rule", _RULE, known)
            return None
        if node.text in STYLES:
            return node.text
        hint = did_you_mean(node.text, STYLES, known)
        self.report(f"unknown style {quoted(node.text)}", node.position, hint)
        return None

    def options(self, style: str, entries: dict[str, tuple[Scalar, Node]]) -> dict[str, object]:
        known, options = STYLES[style].options, dict[str, object]()
        for name, (key, value) in entries.items():
            if name in known:
                options[name] = self.option(value, name, known[name])
                continue
            others = [other for other in STYLES if name in STYLES[other].options]
            listed = f"its options are {', '.join(known)}" if known else "it has none"
            hint = did_you_mean(name, known, listed)
            if others:
                hint = f"it is an option of {' and '.join(others)}"
            self.report(f"'{style}' has no option {quoted(name)}", key.position, hint)
        return options

    # --- kernels

    def kernels(self, node: Node, what: str) -> dict[str, str] | None:
        """Implementations by kind; one word stands for all kinds."""
        if isinstance(node, Scalar) and node.kind is ScalarKind.TEXT:
            chosen = self.choice(node, what, KERNEL_CHOICES)
            return None if chosen is None else dict.fromkeys(KERNEL_KINDS, chosen)
        choices = ", ".join(KERNEL_CHOICES)
        wanted = f"a mapping from kernel kinds to one of {choices}, or one of these for all"
        found: dict[str, str] = {}
        for kind, (key, value) in (self.mapping(node, what, wanted) or {}).items():
            if kind not in KERNEL_KINDS:
                listed = f"the kinds are {', '.join(KERNEL_KINDS)}"
                self.unknown(key, "kernel kind", KERNEL_KINDS, listed)
                continue
            chosen = self.choice(value, f"the kernel for '{kind}'", KERNEL_CHOICES)
            if chosen is not None:
                found[kind] = chosen
        return found
