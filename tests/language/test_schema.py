"""The JSON Schema for editors."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from tpplan.language import PlanError, parse, schema
from tpplan.language.schema import SCHEMA_FILE
from tpplan.language.styles import KERNEL_KINDS, STYLES, Kind

PLANS = Path(__file__).parents[2] / "plans"
LINE = "# yaml-language-server: $schema="
VALIDATOR = jsonschema.Draft202012Validator(schema())

VALUES = {
    Kind.FLAG: ["true"],
    Kind.COUNT: ["8", "heads // 2"],
    Kind.NAMES: ["[a, b]"],
    Kind.PACKED: [
        "[q, k]",
        "{parts: [q, k]}",
        "{parts: [q], repeat: 2}",
        "{parts: [q], repeat: n}",
        "{q: [heads, 64], k: [2, head_dim // 2]}",
    ],
    Kind.EXPRESSIONS: ["{n: heads, m: 3, k: heads * (head_dim + 1), sizes.0: heads}"],
    Kind.DIMENSION: ["0", "-2"],
    Kind.DIMENSIONS: ["{alibi: 0, bias: -1}"],
}
RULES = [
    *STYLES,
    *(
        f"{{style: {style}, {name}: {value}}}"
        for style in STYLES
        for name, option in STYLES[style].options.items()
        for value in (option.choices or VALUES[option.kind])
    ),
]
KEYS = [
    "description: x",
    "models: []",
    "models: [A, B]",
    "sequence_parallel: false",
    "sequence_dim: 0",
    "layers: h.*",
    "kernels: torch",
    *(f"kernels: {{{kind}: triton}}" for kind in KERNEL_KINDS),
]
BAD_RULES = [
    "colwize",
    "",
    "3",
    "[vocab]",
    "{}",
    "{output: shard}",
    "{style: colwise, reduce: together}",
    "{style: rowwise, reduce: sometimes}",
    "{style: rowwise, transposed: 1}",
    "{style: colwise, packed: []}",
    "{style: colwise, packed: [q, q]}",
    "{style: colwise, packed: {repeat: 2}}",
    "{style: colwise, packed: {parts: [q], repeat: 0}}",
    "{style: attention, heads: 0}",
    "{style: attention, heads: [1]}",
    "{style: attention, attributes: {}}",
    "{style: attention, attributes: {2x: heads}}",
    "{style: attention, head_inputs: {alibi: x}}",
    "{style: attention, gather: x}",
]
BAD_KEYS = [
    "foo: 1",
    "description: 3",
    "models: A",
    "models: [A, A]",
    "sequence_parallel: 1",
    "sequence_dim: -1",
    "layers: 3",
    "kernels: fast",
    "kernels: {gelu: fast}",
    "kernels: {foo: auto}",
]


def plan_of(rule: str = "vocab", key: str = "") -> str:
    return f"tpplan: 1\nrules:\n  layer: {rule}\n{key}\n"


def test_the_file_is_what_the_tables_say() -> None:
    expected = json.dumps(schema(), indent=2) + "\n"
    hint = "write json.dumps(schema(), indent=2) and a newline to it"
    assert SCHEMA_FILE.read_text() == expected, hint


@pytest.mark.parametrize("plan", sorted(PLANS.glob("*.yaml")), ids=lambda plan: plan.name)
def test_shipped_plans_name_it_and_fit(plan: Path) -> None:
    first, _, rest = plan.read_text().partition("\n")
    assert (plan.parent / first.removeprefix(LINE)).samefile(SCHEMA_FILE)
    VALIDATOR.validate(yaml.safe_load(rest))


def test_it_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())


@pytest.mark.parametrize("text", [*map(plan_of, RULES), *(plan_of(key=key) for key in KEYS)])
def test_it_accepts_what_the_parser_accepts(text: str) -> None:
    parse(text, "a.yaml")
    VALIDATOR.validate(yaml.safe_load(text))


@pytest.mark.parametrize(
    "text", ["tpplan: 1\nextends: a\n", "tpplan: 1\nextends: a\nrules: {b: remove}"]
)
def test_it_accepts_extending_plans(text: str) -> None:
    VALIDATOR.validate(yaml.safe_load(text))


@pytest.mark.parametrize(
    "text",
    [
        *map(plan_of, BAD_RULES),
        *(plan_of(key=key) for key in BAD_KEYS),
        "tpplan: 2\nrules: {a: vocab}",
        "rules: {a: vocab}",
        "tpplan: 1",
        "tpplan: 1\nrules: {}",
        "- 1",
    ],
)
def test_it_rejects_what_the_parser_rejects(text: str) -> None:
    with pytest.raises(PlanError):
        parse(text, "a.yaml")
    assert not VALIDATOR.is_valid(yaml.safe_load(text))
