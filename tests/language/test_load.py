"""Plans from files, shipped names, other plans and Python data."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from tpplan.language import Diagnostic, PlanError, load, parse_mapping

BASE = """\
tpplan: 1
description: the base
models: [Base]
layers: h.*
kernels: {gelu: torch, rms_norm: triton}
sequence_dim: 0
rules:
  embed: vocab
  h.*.q: colwise
  h.*.o: rowwise
optional:
  head: vocab
"""


@pytest.fixture
def shipped(tmp_path: Path) -> Path:
    directory = tmp_path / "plans"
    directory.mkdir()
    (directory / "base.yaml").write_text(BASE)
    (directory / "other.yaml").write_text(BASE)
    return directory


def wrong(source: str | Path, *search: Path) -> tuple[Diagnostic, ...]:
    with pytest.raises(PlanError) as caught:
        load(source, search=search)
    return caught.value.diagnostics


def write(directory: Path, text: str, name: str = "mine.yaml") -> Path:
    file = directory / name
    file.write_text(text)
    return file


# --- finding and reading


def test_a_path_and_a_shipped_name(shipped: Path) -> None:
    by_path = load(shipped / "base.yaml", search=[])
    assert by_path.name == "base.yaml"
    assert by_path.path == str(shipped / "base.yaml")
    assert load(str(shipped / "base.yaml"), search=[]) == by_path
    assert load("base.yaml", search=[shipped]) == by_path
    assert load("base", search=[shipped]) == by_path


def test_a_directory_does_not_hide_a_shipped_plan(
    shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load("base", search=[shipped]).name == "base.yaml"
    (found,) = wrong("base")
    assert "is a directory" in found.message


def test_a_missing_plan_says_where_it_was_looked_for(shipped: Path) -> None:
    (found,) = wrong("bsae", shipped)
    assert found.message == "there is no plan 'bsae'"
    assert str(found.hint).startswith("did you mean 'base.yaml'?")
    assert str(shipped) in str(found.hint)
    (found,) = wrong("zzzzz", shipped)
    assert "shipped plans are base.yaml, other.yaml" in str(found.hint)


@pytest.mark.parametrize("source", ["", "a\0b", "x" * 5000, "tpplan: 1\nrules: {}\n"])
def test_what_cannot_be_a_name(source: str, shipped: Path) -> None:
    (found,) = wrong(source, shipped)
    assert len(found.message) < 200


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b" \n", "the file is empty"),
        (b"\x89PNG\0\0", "a binary file"),
        (b"tpplan: 1\n# caf\xe9\n", "not UTF-8 text (line 2)"),
        (b"#" * (2**20 + 1), "larger than 1024 KiB"),
    ],
)
def test_files_that_are_no_plans(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_bytes(content)
    (found,) = wrong(file)
    assert message in found.message
    assert str(file) in found.message


def test_an_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, BASE)

    def refuse(*args: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    (found,) = wrong(file)
    assert found.message == f"{file}: cannot be read: Permission denied"


# --- extends


def test_a_plan_inherits_everything(shipped: Path, tmp_path: Path) -> None:
    base = load("base", search=[shipped])
    plan = load(write(tmp_path, "tpplan: 1\nextends: base\n"), search=[shipped])
    assert plan.rules == base.rules
    assert plan.rules[0].position.file == str(shipped / "base.yaml")
    assert (plan.description, plan.models) == (base.description, base.models)
    assert (plan.layers, plan.layers_position) == (base.layers, base.layers_position)
    assert (plan.kernels, plan.sequence_dim) == (base.kernels, 0)
    assert (plan.name, plan.text) == ("mine.yaml", "tpplan: 1\nextends: base\n")


def test_a_plan_overrides_replaces_in_place_and_removes(shipped: Path, tmp_path: Path) -> None:
    text = """\
tpplan: 1
extends: base.yaml
description: mine
models: []
layers: blocks.*
sequence_parallel: false
sequence_dim: 1
kernels: {gelu: auto}
rules:
  norm: sequence_parallel
  h.*.q: {style: colwise, packed: [q, k]}
  head: remove
optional:
  h.*.o: rowwise
"""
    file = write(tmp_path, text)
    plan = load(file, search=[shipped])
    assert [(r.pattern.text, r.style, r.optional) for r in plan.rules] == [
        ("embed", "vocab", False),
        ("h.*.q", "colwise", False),
        ("h.*.o", "rowwise", True),
        ("norm", "sequence_parallel", False),
    ]
    assert plan.rules[1].position.file == str(file)
    assert (plan.description, plan.models, plan.sequence_dim) == ("mine", (), 1)
    assert plan.layers is not None
    assert plan.layers.text == "blocks.*"
    assert plan.sequence_parallel is False
    assert plan.kernels == {"gelu": "auto", "rms_norm": "triton"}


def test_removing_what_is_not_there(shipped: Path, tmp_path: Path) -> None:
    file = write(tmp_path, "tpplan: 1\nextends: base\nrules:\n  h.*.k: remove\n")
    (found,) = wrong(file, shipped)
    assert found.position is not None
    assert (found.position.line, found.position.column) == (4, 3)
    assert found.hint == "did you mean 'h.*.q'?"


def test_removing_everything(shipped: Path, tmp_path: Path) -> None:
    removals = "".join(f"  {name}: remove\n" for name in ("embed", "h.*.q", "h.*.o", "head"))
    (found,) = wrong(write(tmp_path, f"tpplan: 1\nextends: base\nrules:\n{removals}"), shipped)
    assert found.message == "the plan has no rules"


def test_problems_of_both_files_are_reported(shipped: Path, tmp_path: Path) -> None:
    write(shipped, "tpplan: 1\nrules: {a: colwize}\n", "bad.yaml")
    file = write(tmp_path, "tpplan: 1\nextends: bad\nrules:\n  b: rowwize\n  c: remove\n")
    mine, inherited = wrong(file, shipped)
    assert mine.position is not None
    assert inherited.position is not None
    assert (mine.position.file, mine.position.line) == (str(file), 4)
    assert (inherited.position.file, inherited.position.line) == (str(shipped / "bad.yaml"), 2)


def test_a_missing_base_is_reported_where_it_is_named(shipped: Path, tmp_path: Path) -> None:
    (found,) = wrong(write(tmp_path, "tpplan: 1\nextends: bsae\n"), shipped)
    assert found.position is not None
    assert (found.position.line, found.position.column) == (2, 10)
    assert str(found.hint).startswith("did you mean 'base.yaml'?")
    (found,) = wrong(write(tmp_path, "tpplan: 1\nextends: plans\n"))
    assert found.message == "there is no plan 'plans'"


def test_the_extending_file_s_directory_comes_first(shipped: Path, tmp_path: Path) -> None:
    write(tmp_path, BASE.replace("the base", "the near one"), "base.yaml")
    plan = load(write(tmp_path, "tpplan: 1\nextends: base\n"), search=[shipped])
    assert plan.description == "the near one"


def test_a_plan_may_bear_the_name_of_the_one_it_extends(shipped: Path, tmp_path: Path) -> None:
    file = write(tmp_path, "tpplan: 1\nextends: base\nmodels: [Mine]\n", "base.yaml")
    assert load(file, search=[shipped]).description == "the base"


def test_a_circle_shows_its_chain(tmp_path: Path) -> None:
    write(tmp_path, "tpplan: 1\nextends: b\n", "a.yaml")
    write(tmp_path, "tpplan: 1\nextends: c\n", "b.yaml")
    c = write(tmp_path, "tpplan: 1\nextends: b.yaml\n", "c.yaml")
    (found,) = wrong(tmp_path / "a.yaml")
    b = tmp_path / "b.yaml"
    assert found.message == f"plans extend each other in a circle: {b} -> {c} -> {b}"
    assert found.position is not None
    assert found.position.file == str(c)
    (found,) = wrong(write(tmp_path, "tpplan: 1\nextends: mine\n"))
    assert "in a circle" in found.message


def test_a_long_chain_is_refused(tmp_path: Path) -> None:
    for n in range(20):
        write(tmp_path, f"tpplan: 1\nextends: p{n + 1}\n", f"p{n}.yaml")
    (found,) = wrong(tmp_path / "p0.yaml")
    assert found.message == "plans extend each other more than 8 times"


# --- Python data


class Word(StrEnum):
    VOCAB = "vocab"


def test_a_mapping_is_a_plan(shipped: Path) -> None:
    rules: dict[str, Any] = {
        "*.q": "colwise",
        "{a,b}": {"style": "colwise", "packed": ("q", "k")},
        "0": Word.VOCAB,
        "no": "replicate",
        "x" * 300: "replicate",
    }
    plan = parse_mapping({"tpplan": 1, "description": "a: *b\n\nc", "rules": rules}, "mine")
    assert [r.pattern.text for r in plan.rules] == list(rules)
    assert (plan.name, plan.path, plan.description) == ("mine", None, "a: *b\n\nc")
    assert plan.rules[2].style == "vocab"
    shared = {"style": "vocab"}
    assert len(parse_mapping({"tpplan": 1, "rules": {"a": shared, "b": shared}}).rules) == 2
    plan = parse_mapping({"tpplan": 1, "extends": "base"}, search=[shipped])
    assert plan.description == "the base"


def test_problems_of_a_mapping_quote_its_yaml() -> None:
    with pytest.raises(PlanError) as caught:
        parse_mapping({"tpplan": 1, "rules": {"*.q": "colwize"}})
    assert "did you mean 'colwise'?" in str(caught.value)
    assert "colwize" in caught.value.diagnostics[0].render().splitlines()[1]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"tpplan": 1, "rules": {"a": object()}}, "rules -> a: a object has no place in a plan"),
        ({"tpplan": 1, "rules": {"a": {1, 2}}}, "a set has no place"),
        ({"tpplan": 1, "rules": {0: "vocab"}}, "a key is text"),
        ({}, "which version"),
        ([1], "a plan must be a mapping"),
        (None, "a plan must be a mapping"),
    ],
)
def test_data_that_is_no_plan(data: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        parse_mapping(data)


def test_data_that_holds_itself() -> None:
    rules: dict[str, Any] = {}
    rules["a"] = rules
    with pytest.raises(PlanError, match="20 levels deep"):
        parse_mapping({"tpplan": 1, "rules": rules})
