"""Plans that are read, and every way in which one can be wrong."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest

from tests.language.helpers import FILE, marked, problem, problems, read
from tpplan.language import Pattern

LLAMA = """\
tpplan: 1
description: Llama-family decoders
models: [LlamaForCausalLM, MistralForCausalLM]
sequence_parallel: false
sequence_dim: 0
layers: model.layers.*
kernels: {rms_norm: triton, gelu: torch}
rules:
  model.embed_tokens:                     vocab
  model.layers.*.self_attn.{q,k,v}_proj:  colwise
  "*.o_proj":
    style: rowwise
    reduce: together
    transposed: true
optional:
  lm_head: {style: vocab, output: shard}
"""


def with_rule(rule: str) -> str:
    return f"tpplan: 1\nrules:\n  layer: {rule}\n"


def with_key(line: str) -> str:
    return f"tpplan: 1\nrules: {{a: vocab}}\n{line}\n"


def test_a_whole_plan() -> None:
    plan = read(LLAMA)
    assert (plan.name, plan.path, plan.text) == (FILE, None, LLAMA)
    assert plan.description == "Llama-family decoders"
    assert plan.models == ("LlamaForCausalLM", "MistralForCausalLM")
    assert plan.sequence_parallel is False
    assert plan.sequence_dim == 0
    assert plan.layers == Pattern("model.layers.*")
    assert plan.layers_position is not None
    assert (plan.layers_position.line, plan.layers_position.column) == (6, 9)
    assert plan.kernels == {"rms_norm": "triton", "gelu": "torch"}
    assert [(r.pattern.text, r.style, r.optional) for r in plan.rules] == [
        ("model.embed_tokens", "vocab", False),
        ("model.layers.*.self_attn.{q,k,v}_proj", "colwise", False),
        ("*.o_proj", "rowwise", False),
        ("lm_head", "vocab", True),
    ]
    rule = plan.rules[2]
    assert rule.options == {"reduce": "together", "transposed": True}
    assert (rule.position.line, rule.position.column, rule.position.length) == (11, 3, 10)
    assert rule.option_positions["reduce"].line == 13


def test_defaults() -> None:
    plan = read("tpplan: 1\nrules: {norm: replicate}")
    assert (plan.description, plan.models, plan.kernels) == ("", (), {})
    assert (plan.sequence_parallel, plan.sequence_dim, plan.layers) == (True, 1, None)


def test_a_plan_is_immutable_hashes_copies_and_pickles() -> None:
    plan = read(LLAMA)
    for other in (copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert other == plan
        assert hash(other) == hash(plan)
    with pytest.raises(TypeError):
        plan.rules[2].options["reduce"] = "separate"  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.name = "other"  # type: ignore[misc]


def test_a_byte_order_mark_and_windows_line_ends_change_nothing() -> None:
    plan = read("\ufeff" + LLAMA.replace("\n", "\r\n"))
    assert plan.rules == read(LLAMA).rules


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ("style: colwise, packed: [q, k, v]", {"packed": {"parts": ("q", "k", "v")}}),
        (
            "style: colwise, packed: {parts: [q, k], repeat: kv_heads}",
            {"packed": {"parts": ("q", "k"), "repeat": "kv_heads"}},
        ),
        (
            "style: colwise, packed: {parts: [q, v], repeat: 4}",
            {"packed": {"parts": ("q", "v"), "repeat": 4}},
        ),
        ("style: rowwise, reduce: separate", {"reduce": "separate"}),
        ("style: vocab, output: gather", {"output": "gather"}),
        ("style: attention, heads: 12, head_dim: '6 * 2'", {"heads": 12, "head_dim": 12}),
        ("style: attention, kv_heads: heads // 4", {"kv_heads": "heads // 4"}),
        (
            "style: attention, attributes: {num_heads: heads, size: heads * head_dim, one: 1}",
            {"attributes": {"num_heads": "heads", "size": "heads * head_dim", "one": 1}},
        ),
        (
            "style: attention, head_inputs: {alibi: 0, bias: -3}",
            {"head_inputs": {"alibi": 0, "bias": -3}},
        ),
        ("style: attention, gather: [hidden_states]", {"gather": ("hidden_states",)}),
    ],
)
def test_options(options: str, value: dict[str, Any]) -> None:
    assert read(with_rule(f"{{{options}}}")).rules[0].options == value


def test_one_kernel_choice_for_all_kinds() -> None:
    assert set(read(with_key("kernels: torch")).kernels.values()) == {"torch"}
    assert "sequence_transition" in read(with_key("kernels: torch")).kernels


@pytest.mark.parametrize(
    ("text", "where", "message", "hint"),
    [
        (
            with_rule("colwize"),
            (3, 10, "colwize"),
            "unknown style 'colwize'",
            "did you mean 'colwise'?",
        ),
        (with_rule("zzz"), (3, 10, "zzz"), "unknown style", "the styles are colwise"),
        (with_rule(""), (3, 9, " "), "has no value", "the styles are"),
        (with_rule("null"), (3, 10, "null"), "has no value", "the styles are"),
        (with_rule("[colwise]"), (3, 10, "[colwise]"), "this is a list", "the styles are"),
        (with_rule("12"), (3, 10, "12"), "YAML reads '12' as a number", "the styles are"),
        (with_rule("remove"), (3, 10, "remove"), "extends no other", "delete the line"),
        (with_rule("{}"), (3, 10, "{}"), "does not say its style", "add 'style:'"),
        (with_rule("{styl: vocab}"), (3, 10, "{styl: vocab}"), "does not say its style", "add"),
        (
            with_rule("{style: rowwise, reduced: together}"),
            (3, 27, "reduced"),
            "'rowwise' has no option 'reduced'",
            "did you mean 'reduce'?",
        ),
        (
            with_rule("{style: colwise, reduce: together}"),
            (3, 27, "reduce"),
            "'colwise' has no option 'reduce'",
            "it is an option of rowwise",
        ),
        (
            with_rule("{style: sequence_parallel, packing: x}"),
            (3, 37, "packing"),
            "'sequence_parallel' has no option",
            "it has none",
        ),
        (
            with_rule("{style: rowwise, reduce: togther}"),
            (3, 35, "togther"),
            "'reduce' cannot be 'togther'",
            "did you mean 'together'?",
        ),
        (
            with_rule("{style: rowwise, transposed: yes}"),
            (3, 39, "yes"),
            "'transposed' must be true or false",
            "write 'true'",
        ),
        (
            with_rule("{style: rowwise, transposed: 'true'}"),
            (3, 39, "'true'"),
            "must be true or false",
            "leave the quotes away",
        ),
        (
            with_rule("{style: colwise, packed: q}"),
            (3, 35, "q"),
            "'packed' must be a list of names",
            None,
        ),
        (
            with_rule("{style: colwise, packed: [q, q]}"),
            (3, 39, "q"),
            "'q' is listed twice",
            None,
        ),
        (with_rule("{style: colwise, packed: []}"), (3, 35, "[]"), "is an empty list", None),
        (
            with_rule("{style: colwise, packed: {part: [q]}}"),
            (3, 35, "{part: [q]}"),
            "does not say its parts",
            "add 'parts",
        ),
        (
            with_rule("{style: colwise, packed: {parts: [q], repeat: 0}}"),
            (3, 56, "0"),
            "'repeat' must be a whole number, at least 1, not 0",
            None,
        ),
        (
            with_rule("{style: colwise, packed: {parts: [q], repeat: a b}}"),
            (3, 56, "a b"),
            "'repeat' must be a positive whole number or a name",
            None,
        ),
        (with_rule("{style: attention, heads: 0}"), (3, 36, "0"), "at least 1", None),
        (with_rule("{style: attention, heads: '1 - 2'}"), (3, 36, "'1 - 2'"), "at least 1", None),
        (with_rule("{style: attention, heads: 1.5}"), (3, 36, "1.5"), "a fractional number", None),
        (with_rule("{style: attention, heads: a ** 2}"), (3, 39, "*"), "unexpected '*'", None),
        (
            with_rule("{style: attention, attributes: {2x: heads}}"),
            (3, 42, "2x"),
            "cannot be the name of an attribute",
            None,
        ),
        (
            with_rule("{style: attention, attributes: {n: 'heads // 0x'}}"),
            (3, 56, "x"),
            "'attributes': 'n': unexpected 'x'",
            None,
        ),
        (
            with_rule("{style: attention, head_inputs: {alibi: last}}"),
            (3, 50, "last"),
            "'head_inputs': 'alibi' must be a whole number",
            None,
        ),
        (with_rule("{style: attention, attributes: {}}"), (3, 41, "{}"), "empty mapping", None),
        (
            with_rule("{style: attention, gather: hidden}"),
            (3, 37, "hidden"),
            "'gather' must be a list of names",
            "write [hidden]",
        ),
        (
            with_key("sequence_parallel: off"),
            (3, 20, "off"),
            "must be true or false",
            "write 'false'",
        ),
        (with_key("sequence_parallel: 1"), (3, 20, "1"), "must be true or false", None),
        (with_key("sequence_dim: -1"), (3, 15, "-1"), "at least 0, not -1", None),
        (with_key("sequence_dim: 010"), (3, 15, "010"), "'010'", "without leading zeros"),
        (with_key("sequence_dim: '1'"), (3, 15, "'1'"), "this is the text '1'", "leave the quotes"),
        (with_key("description: 405"), (3, 14, "405"), "must be text", "quote it"),
        (with_key("description:"), (3, 13, ""), "it has no value", None),
        (with_key("models: Llama"), (3, 9, "Llama"), "must be a list of names", "write [Llama]"),
        (with_key("models: [A, 3]"), (3, 13, "3"), "must be text", "quote it"),
        (with_key("models: [A, '']"), (3, 13, "''"), "is empty", None),
        (with_key("layers: a..b"), (3, 11, "."), "'layers': a segment is empty", None),
        (with_key("kernels: fast"), (3, 10, "fast"), "'kernels' cannot be 'fast'", "one of auto"),
        (with_key("kernels: [torch]"), (3, 10, "[torch]"), "must be a mapping from kernel", None),
        (
            with_key("kernels: {rms_norn: torch}"),
            (3, 11, "rms_norn"),
            "unknown kernel kind 'rms_norn'",
            "did you mean 'rms_norm'?",
        ),
        (with_key("kernels: {gelu: on}"), (3, 17, "on"), "one of auto, triton, torch", None),
        (
            with_key("kernels: {gelu: tritn}"),
            (3, 17, "tritn"),
            "cannot be",
            "did you mean 'triton'?",
        ),
        (
            with_key("kernel: torch"),
            (3, 1, "kernel"),
            "unknown key 'kernel'",
            "did you mean 'kernels'?",
        ),
        (with_key("zzzzz: torch"), (3, 1, "zzzzz"), "unknown key", "the keys are tpplan"),
        (with_key("q_proj: colwise"), (3, 1, "q_proj"), "unknown key", "stands under 'rules:'"),
        (with_key("extends: other"), (3, 10, "other"), "cannot extend another", None),
        ("tpplan: 2\nfoo: bar", (1, 9, "2"), "written in version 2", "a newer one may read it"),
        ("tpplan: 0\nfoo: bar", (1, 9, "0"), "written in version 0", "this tpplan reads version 1"),
        ("tpplan: 1.0\nrules: {a: vocab}", (1, 9, "1.0"), "a fractional number", None),
        ("rules: {a: vocab}", (1, 1, "rules: {a: vocab}"), "which version", "tpplan: 1"),
        ("tpplan: 1", (1, 1, "tpplan: 1"), "the plan has no rules", "add some"),
        ("tpplan: 1\nrules: {}", (1, 1, "tpplan: 1"), "the plan has no rules", "add some"),
        ("tpplan: 1\nrules:", (2, 7, ""), "'rules' must be a mapping", None),
        ("tpplan: 1\nrules: [a]", (2, 8, "[a]"), "'rules' must be a mapping", None),
        ("tpplan: 1\nrules:\n  a:vocab", (3, 3, "a:vocab"), "this is the text", "put a space"),
        ("- tpplan: 1", (1, 1, "- tpplan: 1"), "a plan must be a mapping", "starts with"),
        ("colwise", (1, 1, "colwise"), "a plan must be a mapping", "starts with"),
        (
            "tpplan: 1\nrules:\n  a.{q,k: vocab\n",
            (3, 5, "{"),
            "'a.{q,k': '{' is never closed",
            None,
        ),
        (
            "tpplan: 1\nrules:\n  'a.**b': vocab\n",
            (3, 6, "*"),
            "'**' must be a whole segment",
            None,
        ),
        ('tpplan: 1\nrules:\n  "": vocab\n', (3, 4, '"'), "an empty pattern", None),
    ],
)
def test_what_is_wrong(
    text: str, where: tuple[int, int, str], message: str, hint: str | None
) -> None:
    found = [d for d in problems(text) if message in d.message]
    assert len(found) == 1, [d.message for d in problems(text)]
    line, column, marked_text = marked(found[0])
    assert (line, column, marked_text) == where
    assert (hint is None) == (found[0].hint is None), found[0].hint
    assert hint is None or hint in str(found[0].hint)


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n", "---\n", "---\n...\n"])
def test_an_empty_plan(text: str) -> None:
    assert problem(text).message == "the plan is empty"


def test_a_pattern_under_both_sections_shows_both_lines() -> None:
    found = problem("tpplan: 1\nrules:\n  a: vocab\noptional:\n  a: colwise\n")
    assert marked(found) == (5, 3, "a")
    assert found.related[0][1].line == 3


def test_everything_is_reported_at_once_and_in_order() -> None:
    found = problems(
        """\
        tpplan: 1
        sequence_parallel: yes
        rules:
          a: colwize
          b: {style: rowwise, reduce: no, output: 3}
          c: vocab
          c: rowwise
          d..e: vocab
        kernel: auto
        optional:
          1: vocab
        sequence_dim: x
        """
    )
    assert [marked(d)[:2] for d in found] == [
        (2, 20),
        (4, 6),
        (5, 31),
        (5, 43),
        (7, 3),
        (8, 5),
        (9, 1),
        (11, 3),
        (12, 15),
    ]


def test_a_flood_of_problems_is_cut() -> None:
    rules = "".join(f"  a{n}: colwize\n" for n in range(1000))
    found = problems(f"tpplan: 1\nrules:\n{rules}")
    assert len(found) == 51
    assert found[-1].message == "and 950 more problems"
