"""A plan's file: its head, its rules in columns, comments for what is left whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import yaml

from tpplan.language import Plan, Rule
from tpplan.language.parse import parse
from tpplan.language.styles import VERSION
from tpplan.suggestion.draft import Decision
from tpplan.suggestion.patterns import Names, patterns_of

_NAME = "suggested.yaml"
_WIDEST, _LINE = 60, 100


def written(
    decisions: Mapping[str, Decision],
    names: Names,
    keys: Mapping[str, object],
    head: Sequence[str] = (),
) -> tuple[str, dict[int, tuple[str, ...]]]:
    """The text of a plan; and of each line that is a rule, which paths it is for.

    Args:
        keys: top-level entries beside the rules; head: comments to begin with.
    """
    lines = [f"# {line}".rstrip() for line in head]
    lines.append(f"tpplan: {VERSION}")
    lines += [f"{key}: {_scalar(value)}" for key, value in keys.items()]
    lines += ["", "rules:"]
    rules = patterns_of(decisions, names)
    texts = [_key(text) for text, _, _ in rules]
    column = max((len(text) for text in texts if len(text) <= _WIDEST), default=0) + 3
    where: dict[int, tuple[str, ...]] = {}
    said = ""
    for text, (_, decision, paths) in zip(texts, rules, strict=True):
        if decision.why and decision.why != said:
            lines += [f"  # {line}" for line in _wrapped(decision.why)]
        said = decision.why
        rule = [f"  {f'{text}: ':<{column}}{_rule(decision)}"]
        if len(rule[0]) > _LINE and decision.options:
            told = {"style": decision.style, **decision.options}
            rule = [f"  {text}:", *(line for item in told.items() for line in _entry(*item))]
        where.update(dict.fromkeys(range(len(lines) + 1, len(lines) + len(rule) + 1), paths))
        lines += rule
    return "\n".join(lines) + "\n", where


def plan_from(text: str) -> Plan:
    """The plan of a text."""
    return parse(text, _NAME)


def rule_text(pattern: str, decision: Decision) -> str:
    """A rule as a line of a plan."""
    return f"{_key(pattern)}: {_rule(decision)}"


def rules_from(lines: Iterable[tuple[str, Decision]]) -> tuple[Rule, ...]:
    """The rules of such lines."""
    told = "".join(f"  {rule_text(text, decision)}\n" for text, decision in lines)
    return plan_from(f"tpplan: {VERSION}\nrules:\n{told}").rules if told else ()


def _rule(decision: Decision) -> str:
    if not decision.options:
        return decision.style
    return _flow({"style": decision.style, **decision.options})


def _entry(key: str, value: object) -> list[str]:
    """An option on a line of its own, or on several where that is long."""
    line = f"    {key}: {_flow(value)}"
    if len(line) <= _LINE or not isinstance(value, Mapping):
        return [line]
    return [f"    {key}:", *(f"      {name}: {_flow(inner)}" for name, inner in value.items())]


def _flow(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {_flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_flow, value)) + "]"
    return _scalar(value)


def _scalar(value: object) -> str:
    dumped: str = yaml.safe_dump(value, default_flow_style=True, width=10**6)
    return dumped.removesuffix("\n").removesuffix("\n...")


def _key(pattern: str) -> str:
    """As YAML reads it: ``1`` and ``0.1``, of modules in a Sequential, are numbers to it."""
    if pattern[0] in "*{[?&!%@`" or pattern == ".":
        return f'"{pattern}"'
    return pattern if yaml.safe_load(pattern) == pattern else f'"{pattern}"'


def _wrapped(text: str) -> list[str]:
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + len(word) > _LINE - 6:
            lines.append(line)
            line = ""
        line = f"{line} {word}".strip()
    return [*lines, line]
