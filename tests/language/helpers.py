"""What several tests of the plan language need."""

from __future__ import annotations

from textwrap import dedent

import pytest

from tpplan.language import Diagnostic, Plan, PlanError, parse

FILE = "my.yaml"


def read(text: str) -> Plan:
    """A plan from indented text."""
    return parse(dedent(text), FILE)


def problems(text: str) -> tuple[Diagnostic, ...]:
    """What is wrong with a plan."""
    with pytest.raises(PlanError) as caught:
        read(text)
    return caught.value.diagnostics


def problem(text: str) -> Diagnostic:
    """The only thing that is wrong with a plan."""
    found = problems(text)
    assert len(found) == 1, [d.message for d in found]
    return found[0]


def marked(diagnostic: Diagnostic) -> tuple[int, int, str]:
    """Line, column and the marked text."""
    position = diagnostic.position
    assert position is not None
    start = position.column - 1
    return position.line, position.column, position.text[start : start + position.length]
