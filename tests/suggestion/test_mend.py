"""What ``check`` says of wrong plans: the rules that would be right, proved with the rest."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

import tpplan
from benchmarks import zoo
from tests.models import hf
from tests.outside import nanogpt
from tests.suggestion.odd import Model, Sorted
from tpplan.cli import main

pytestmark = pytest.mark.turns(24)

ODD = """
tpplan: 1
rules:
  m0: vocab
  m1.*.a0: sequence_parallel
  m1.*: {style: attention, attributes: {y: heads * head_dim, z: heads}}
  m1.*.a1: {style: colwise, packed: [q, k, v]}
  m1.*.a2: rowwise
  m1.*.a3: {style: colwise, packed: [gate, up]}
  m1.*.a4: rowwise
  m2: sequence_parallel
  m3: vocab
"""
LLAMA = """
tpplan: 1
rules:
  model.embed_tokens: vocab
  model.layers.*.{input,post_attention}_layernorm: sequence_parallel
  model.layers.*.self_attn.{q,k,v}_proj: colwise
  model.layers.*.self_attn.o_proj: rowwise
  model.layers.*.mlp.{gate,up}_proj: colwise
  model.layers.*.mlp.down_proj: rowwise
  model.norm: sequence_parallel
  lm_head: vocab
"""
GPT2 = """
tpplan: 1
rules:
  transformer.wte: vocab
  transformer.wpe: sequence_parallel
  transformer.h.*.ln_{1,2}: sequence_parallel
  transformer.h.*.attn:
    style: attention
    attributes: {num_heads: heads, split_size: heads * head_dim}
  transformer.h.*.attn.c_attn: {style: colwise, packed: [q, k, v]}
  transformer.h.*.attn.c_proj: rowwise
  transformer.h.*.mlp.c_fc: colwise
  transformer.h.*.mlp.c_proj: rowwise
  transformer.ln_f: sequence_parallel
  lm_head: vocab
"""
NANO = """
tpplan: 1
rules:
  transformer.wte: vocab
  transformer.wpe: sequence_parallel
  transformer.h.*.ln_{1,2}: sequence_parallel
  transformer.h.*.attn: {style: attention, attributes: {n_head: heads, n_embd: heads * head_dim}}
  transformer.h.*.attn.c_attn: {style: colwise, packed: [q, k, v]}
  transformer.h.*.attn.c_proj: rowwise
  transformer.h.*.mlp.c_fc: colwise
  transformer.h.*.mlp.c_proj: rowwise
  transformer.ln_f: sequence_parallel
  lm_head: vocab
"""
NEOX = """
tpplan: 1
rules:
  gpt_neox.embed_in: vocab
  gpt_neox.layers.*.{input,post_attention}_layernorm: sequence_parallel
  gpt_neox.layers.*.attention.query_key_value:
    {style: colwise, packed: {parts: [q, k, v], repeat: 8}}
  gpt_neox.layers.*.attention.dense: rowwise
  gpt_neox.layers.*.mlp.dense_h_to_4h: colwise
  gpt_neox.layers.*.mlp.dense_4h_to_h: rowwise
  gpt_neox.final_layer_norm: sequence_parallel
  lm_head: vocab
"""


def nano() -> nn.Module:
    return nanogpt.GPT(nanogpt.GPTConfig())


def of_zoo(name: str) -> nn.Module:
    return next(iter(zoo.makers([name]).values()))()


def said(model: nn.Module, text: str, tmp_path: Path, tp: int = 2) -> str:
    """What check says of a plan that it refuses."""
    file = tmp_path / "my.yaml"
    file.write_text(text.lstrip())
    with pytest.raises(tpplan.PlanError) as refused:
        tpplan.check(model, file, tp, propose=True)
    return str(refused.value)


WRONG: dict[str, tuple[Callable[[], nn.Module], str, str, str, str]] = {
    # the right line, what is written in its place, and what is proposed
    "packed is missing": (
        Model,
        ODD,
        "m1.*.a1: {style: colwise, packed: [q, k, v]}",
        "m1.*.a1: colwise",
        "did you mean `m1.*.a1: {style: colwise, packed: [q, k, v]}`?",
    ),
    "a repeat that is none": (
        Model,
        ODD,
        "packed: [q, k, v]",
        "packed: {parts: [q, k, v], repeat: 2}",
        "did you mean `m1.*.a1: {style: colwise, packed: [q, k, v]}`?",
    ),
    "a gated MLP in one": (
        Model,
        ODD,
        "{style: colwise, packed: [gate, up]}",
        "colwise",
        "did you mean `m1.*.a3: {style: colwise, packed: [gate, up]}`?",
    ),
    "norms without a rule": (
        lambda: hf(hidden_size=16, intermediate_size=16, vocab_size=32),
        LLAMA,
        "  model.layers.*.{input,post_attention}_layernorm: sequence_parallel\n",
        "",
        "to add `model.layers.*.{input,post_attention}_layernorm: sequence_parallel`",
    ),
    "positions without a rule": (
        nano,
        NANO,
        "  transformer.wpe: sequence_parallel\n",
        "",
        "to add `transformer.wpe: sequence_parallel`",
    ),
    "a norm that is cut": (
        hf,
        LLAMA,
        "model.norm: sequence_parallel",
        "model.norm: colwise",
        "did you mean `model.norm: sequence_parallel`?",
    ),
    "columns for rows": (
        hf,
        LLAMA,
        "model.layers.*.mlp.down_proj: rowwise",
        "model.layers.*.mlp.down_proj: colwise",
        "did you mean `model.layers.*.mlp.down_proj: rowwise`?",
    ),
    "one of three forgotten": (
        hf,
        LLAMA,
        "self_attn.{q,k,v}_proj: colwise",
        "self_attn.{q,k}_proj: colwise",
        "to add `model.layers.*.self_attn.v_proj: colwise`",
    ),
    "one pattern for two styles": (
        hf,
        LLAMA,
        "  model.layers.*.mlp.{gate,up}_proj: colwise\n  model.layers.*.mlp.down_proj: rowwise\n",
        "  model.layers.*.mlp.*: colwise\n",
        "did you mean `model.layers.*.mlp.{gate,up}_proj: colwise` and "
        "`model.layers.*.mlp.down_proj: rowwise`?",
    ),
    "GPT-2 without packed": (
        lambda: of_zoo("gpt2"),
        GPT2,
        "{style: colwise, packed: [q, k, v]}",
        "colwise",
        "did you mean `transformer.h.*.attn.c_attn: {style: colwise, packed: [q, k, v]}`?",
    ),
    "nanoGPT by heads": (
        nano,
        NANO,
        "packed: [q, k, v]",
        "packed: {parts: [q, k, v], repeat: n_head}",
        "did you mean `transformer.h.*.attn.c_attn: {style: colwise, packed: [q, k, v]}`?",
    ),
    "NeoX without heads": (
        lambda: of_zoo("gpt_neox"),
        NEOX,
        "packed: {parts: [q, k, v], repeat: 8}",
        "packed: [q, k, v]",
        "did you mean `gpt_neox.layers.*.attention.query_key_value: colwise`?",
    ),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake(mistake: str, tmp_path: Path) -> None:
    make, plan, right, wrong, proposed = WRONG[mistake]
    assert right in plan
    told = said(make(), plan.replace(right, wrong), tmp_path)
    assert proposed in told, told
    assert told.count("With that the plan holds") == 1


@pytest.mark.parametrize(
    ("make", "plan"),
    [
        (Model, ODD),
        # which attributes have to be a rank's own is found
        (Model, "".join(line for line in ODD.splitlines(True) if "attributes" not in line)),
        (hf, LLAMA),
        (lambda: of_zoo("gpt2"), GPT2),
        (nano, NANO),
    ],
)
def test_the_right_plans(make: Callable[[], nn.Module], plan: str, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(plan.lstrip())
    tpplan.check(make(), tmp_path / "my.yaml", 2)


def test_what_is_proposed_is_the_line_to_write(tmp_path: Path) -> None:
    wrong = ODD.replace("{style: colwise, packed: [q, k, v]}", "colwise")
    (line,) = re.findall(r"did you mean `(.*?)`", said(Model(), wrong, tmp_path))
    (tmp_path / "my.yaml").write_text(wrong.replace("m1.*.a1: colwise", line).lstrip())
    tpplan.check(Model(), tmp_path / "my.yaml", 2)


def test_two_mistakes_each_at_its_line(tmp_path: Path) -> None:
    wrong = LLAMA.replace("down_proj: rowwise", "down_proj: colwise")
    wrong = wrong.replace("self_attn.o_proj: rowwise", "self_attn.o_proj: replicate")
    told = said(hf(), wrong, tmp_path)
    assert "did you mean `model.layers.*.self_attn.o_proj: rowwise`?" in told
    assert "did you mean `model.layers.*.mlp.down_proj: rowwise`?" in told


def test_nothing_is_said_where_nothing_is_found(tmp_path: Path) -> None:
    plan = "tpplan: 1\nrules:\n  m0: vocab\n  m1.*.up: colwise\n  m1.*.down: rowwise\n"
    plan += "  m2: sequence_parallel\n  m3: vocab\n"
    assert "did you mean" not in said(Model(Sorted), plan, tmp_path)


def test_heads_that_tp_does_not_divide(tmp_path: Path) -> None:
    model = hf("Llama", hidden_size=48, num_attention_heads=6, num_key_value_heads=6)
    told = said(model, LLAMA, tmp_path, 4)
    assert "tp 4 does not divide" in told
    assert "did you mean" not in told


def test_names_that_do_not_exist_are_left_to_the_language(tmp_path: Path) -> None:
    told = said(hf(), LLAMA.replace("down_proj", "down_prog"), tmp_path)
    assert "did you mean 'model.layers.*.mlp.down_proj'?" in told
    assert "With that the plan holds" not in told


def test_a_plan_that_holds_is_not_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("tpplan.suggestion")]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "my.yaml").write_text(LLAMA.lstrip())
    tpplan.check(hf(), tmp_path / "my.yaml", 2, propose=True)
    assert "tpplan.suggestion" not in sys.modules


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(ODD.replace("a2: rowwise", "a2: replicate").lstrip())
    assert main(["check", str(file), "--model", "tests.suggestion.odd:made", "--tp", "2"]) == 1
    assert "did you mean `m1.*.a2: rowwise`?" in capsys.readouterr().err
