"""Whatever it is given, the reader answers with a plan or a PlanError that can be shown."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tpplan.language import Plan, PlanError, load, parse, parse_mapping

WORDS = [
    *("tpplan: 1\n", "rules:", "optional:", "extends: a", "layers", "kernels", "style", "packed"),
    *("colwise", "vocab", "remove", "attention", "heads", "attributes", "a.*.b", "{q,k}", "**"),
    *(": ", "\n", "\n  ", "\n    ", "- ", "? ", "[", "]", "{", "}", ", ", "'", '"', "#", "|", ">"),
    *("&x ", "*x ", "!!str ", "!a", "%YAML 1.1\n", "---\n", "...\n", "<<", "~", "yes", "1", "0.5"),
    *("\t", "\\", "\\U", "\\x", "\r\n", "\x85", "\u2028", "\ufeff", "\ud800", "\0", "=", "\x1b"),
]
DATA = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner),
    max_leaves=10,
)


def accept(text: str) -> None:
    try:
        assert isinstance(parse(text, "a.yaml"), Plan)
    except PlanError as error:
        assert error.diagnostics
        assert str(error).encode()


@given(st.text(max_size=200))
def test_any_text(text: str) -> None:
    accept(text)


@settings(max_examples=300)
@given(st.lists(st.sampled_from(WORDS), max_size=30).map("".join))
def test_any_words(text: str) -> None:
    accept(text)


@given(st.lists(st.sampled_from(WORDS), max_size=12).map("".join))
def test_any_words_as_a_rule(text: str) -> None:
    accept(f"tpplan: 1\nrules:\n  a: {text}\n  b: vocab\n")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_any_bytes(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "a.yaml"
    file.write_bytes(content)
    with contextlib.suppress(PlanError):
        load(file)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=20))
def test_any_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(PlanError) as caught:
        load(str(tmp_path / "none") + name, search=[tmp_path])
    assert str(caught.value).encode()


@given(DATA)
def test_any_data(data: Any) -> None:
    with contextlib.suppress(PlanError):
        parse_mapping(data)
    with contextlib.suppress(PlanError):
        parse_mapping({"tpplan": 1, "rules": data})


@given(st.dictionaries(st.text(min_size=1, max_size=10), st.just("vocab"), min_size=1))
def test_patterns_survive_the_way_through_yaml(rules: dict[str, str]) -> None:
    try:
        plan = parse_mapping({"tpplan": 1, "rules": rules})
    except PlanError:
        return
    assert [rule.pattern.text for rule in plan.rules] == list(rules)
