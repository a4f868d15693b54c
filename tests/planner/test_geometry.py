"""Heads, packed layouts, per-rank attributes: what a plan may state, and what is said if wrong."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.distributed.tensor import Shard

import tpplan
from tests.planner import layers
from tests.planner.layers import WIDTH
from tpplan.compiled import CompiledPlan
from tpplan.layout import Part, Rows, rows_of
from tpplan.planner import compile_plan

pytestmark = pytest.mark.turns(4)

INPUT = torch.zeros(2, 8, WIDTH)
HEADS, KV, DIM = 8, 2, 4


class Attention(nn.Module):
    """Grouped-query attention over one projection, laid out in one of several ways."""

    def __init__(self, layout: str, kv: int = KV) -> None:
        super().__init__()
        self.layout = layout
        self.n_head, self.n_kv, self.dim, self.groups = HEADS, kv, DIM, HEADS // kv
        self.config = SimpleNamespace(num_attention_heads=HEADS, inner=SimpleNamespace(n_kv=kv))
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * kv) * DIM)
        self.out = nn.Linear(HEADS * DIM, WIDTH, bias=False)

    def cut(self, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q, k and v of shape (batch, sequence, heads, dim)."""
        if self.layout == "blocks":
            sizes = [self.n_head * self.dim, self.n_kv * self.dim, self.n_kv * self.dim]
            return tuple(part.unflatten(-1, (-1, self.dim)) for part in y.split(sizes, -1))
        if self.layout == "config":
            heads, kv = self.config.num_attention_heads, self.config.inner.n_kv
            sizes = [heads * self.dim, kv * self.dim, kv * self.dim]
            return tuple(part.unflatten(-1, (-1, self.dim)) for part in y.split(sizes, -1))
        if self.layout == "heads":
            return y.unflatten(-1, (-1, 3 * self.dim)).split(self.dim, -1)
        if self.layout == "groups":
            y = y.unflatten(-1, (-1, self.groups + 2, self.dim))
            return y[..., :-2, :].flatten(2, 3), y[..., -2, :], y[..., -1, :]
        assert self.layout == "four"
        parts = y.unflatten(-1, (4, -1)).chunk(3, -1)
        q, v, k = (part.flatten(-2).unflatten(-1, (-1, self.dim)) for part in parts)
        return q, k, v

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.cut(self.qkv(x)))
        k, v = (t.repeat_interleave(q.size(1) // t.size(1), 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Grouped(nn.Module):
    """Separate projections, and a written number of query heads for each key-value head."""

    def __init__(self, exact: bool = True) -> None:
        super().__init__()
        self.groups, self.other = HEADS // KV, 3
        self.q, self.out = (nn.Linear(WIDTH, HEADS * DIM), nn.Linear(HEADS * DIM, WIDTH))
        self.k, self.v = (nn.Linear(WIDTH, KV * DIM) for _ in range(2))
        self.exact = exact

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, DIM)).transpose(1, 2) for p in (self.q, self.k, self.v))
        groups = self.groups if self.exact else HEADS // KV
        k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """x + attn(x)."""

    def __init__(self, attn: nn.Module) -> None:
        super().__init__()
        self.attn = attn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attn(x)


class Transposed(nn.Module):
    """GPT-2's Conv1D: a weight that is stored (in, out)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / 4)
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


class Conv(nn.Module):
    """An MLP of such layers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = Transposed(WIDTH, 32), Transposed(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(self.fc(x).relu())


class Sides(nn.Module):
    """Two branches side by side: their outputs are added, and perhaps more."""

    def __init__(self, squashed: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32)
        self.a_out, self.b_out = nn.Linear(32, WIDTH), nn.Linear(32, WIDTH)
        self.squashed = squashed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.a_out(self.a(x).relu())
        return x + (first.tanh() if self.squashed else first) + self.b_out(self.b(x).relu())


class Biased(nn.Module):
    """Attention with a bias for every head as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(WIDTH, HEADS * DIM), nn.Linear(HEADS * DIM, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, HEADS * DIM) for _ in range(2))

    def forward(self, x: torch.Tensor, slopes: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, DIM)).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, slopes)
        return self.out(y.transpose(1, 2).flatten(2))


class WithSlopes(nn.Module):
    """Gives its attention a bias of shape (heads, 1, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Biased()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        distance = torch.arange(x.size(1)).float()
        return x + self.attn(x, slopes=distance * torch.arange(1.0, HEADS + 1).view(-1, 1, 1))


SEPARATE = "layers.*.attn.{q,k,v}: colwise\nlayers.*.attn.out: rowwise\n"


def compiled(
    model: nn.Module, rules: str, folder: Path, tp: int = 2, sequence_parallel: bool = False
) -> CompiledPlan:
    """Compile a plan of these rules, read from ``my.yaml``."""
    file = folder / "my.yaml"
    file.write_text("tpplan: 1\nrules:\n" + textwrap.indent(textwrap.dedent(rules), "  "))
    plan = tpplan.load_plan(file)
    return compile_plan(model, plan, tp, sequence_parallel, inputs=INPUT)


def refused(model: nn.Module, rules: str, folder: Path, tp: int = 2, **options: Any) -> str:
    with pytest.raises(tpplan.PlanError) as caught:
        compiled(model, rules, folder, tp, **options)
    assert all(d.position is not None for d in caught.value.diagnostics)
    return str(caught.value)


def attention(layout: str, kv: int = KV) -> nn.Module:
    return layers.Stack(lambda: Block(Attention(layout, kv)))


def packed(options: str, attn: str = "") -> str:
    rules = f"layers.*.attn.qkv: {{style: colwise, packed: {options}}}\n"
    rules += "layers.*.attn.out: rowwise\n"
    return rules + (f"layers.*.attn: {{style: attention, {attn}}}\n" if attn else "")


NUMBERS = "heads: n_head, kv_heads: n_kv, attributes: {n_head: heads, n_kv: kv_heads}"
LAYOUTS: dict[str, tuple[int, str, str, list[int], int, bool]] = {
    # kv heads, packed, attention, heads of each part, repeat, fixed
    "blocks": (KV, "[q, k, v]", NUMBERS, [8, 2, 2], 1, False),
    "heads": (8, "{parts: [q, k, v], repeat: heads}", "heads: n_head", [1, 1, 1], 8, False),
    "groups": (
        KV,
        "{parts: [q, k, v], repeat: kv_heads}",
        "heads: n_head, kv_heads: n_kv, attributes: {groups: heads // kv_heads}",
        [4, 1, 1],
        2,
        False,
    ),
    "four": (
        8,
        "{parts: [q, v, k], repeat: 4}",
        "heads: n_head, kv_heads: n_head",
        [2, 2, 2],
        4,
        True,
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.turns(12)
def test_packed_layouts(layout: str, tp: int, tmp_path: Path) -> None:
    kv, options, attn, units, repeat, fixed = LAYOUTS[layout]
    if fixed and tp > 2:
        text = refused(attention(layout, kv), packed(options, attn), tmp_path, tp)
        assert "tp 4 does not divide the 2 of 'q'" in text
        assert text.endswith("tp may be 1, 2")
        return
    plan = compiled(attention(layout, kv), packed(options, attn), tmp_path, tp)
    parts = [Part(str(i), n * DIM, n) for i, n in enumerate(units)]
    rows = rows_of(parts, repeat, tp, 0, fixed)
    even = [((r * rows.length(), (r + 1) * rows.length()),) for r in range(tp)]
    due = Shard(0) if list(rows.pieces) == even else rows
    for leaf in ("weight", "bias"):
        entry = plan.parameters[f"layers.1.attn.qkv.{leaf}"]
        assert entry.placement == due
        assert entry.local_shape[0] == rows.length()
        assert entry.summed == (kv < tp)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.turns(12)
def test_packed_layouts_that_are_another(layout: str, tmp_path: Path) -> None:
    """Whatever else is stated about a layout is refused, at the line that states it."""
    kv, own, attn, _, _, fixed = LAYOUTS[layout]
    others = {options for _, options, *_ in LAYOUTS.values()} - {own}
    if kv == 8:
        others -= {"{parts: [q, k, v], repeat: kv_heads}"}  # where every head has its own k and v
    else:
        others |= {"[k, q, v]", "[q, kv]"}
    for options in others:
        text = refused(attention(layout, kv), packed(options, attn), tmp_path, 2 if fixed else 4)
        assert "attn.qkv" in text, options


def test_a_layout_whose_parts_do_not_add_up(tmp_path: Path) -> None:
    text = refused(attention("blocks"), packed("[q, k, v]", "heads: n_head, kv_heads: 3"), tmp_path)
    message = "layers.*.attn.qkv: packed: q 24, k 9, v 9, 1 times, are not its 48 outputs"
    assert f"my.yaml:3:39: error: {message}" in text
    assert text.count("are not its 48 outputs") == 1
    assert "heads = 8" in text or "'heads': 8" in text


def test_gate_and_up_in_one(tmp_path: Path) -> None:
    model = layers.Stack(
        lambda: layers.Layer(lambda y: F.silu(y.chunk(2, -1)[0]) * y.chunk(2, -1)[1], 16)
    )
    rules = "layers.*.fc: {style: colwise, packed: [gate, up]}\nlayers.*.out: rowwise\n"
    plan = compiled(model, rules, tmp_path, 4, sequence_parallel=True)
    placement = plan.parameters["layers.0.fc.weight"].placement
    assert placement == Rows(0, [[(4 * r, 4 * r + 4), (16 + 4 * r, 20 + 4 * r)] for r in range(4)])
    text = refused(model, rules.replace("[gate, up]", "[gate, up, more]"), tmp_path)
    assert "packed: gate 10, up 10, more 10, 1 times, are not its 32 outputs" in text
    assert "my.yaml:3:33: error" in text


@pytest.mark.parametrize(
    "numbers",
    [
        "heads: 8, kv_heads: 2",
        "heads: n_head, kv_heads: n_kv",
        "heads: groups * n_kv, kv_heads: n_head // groups",
        "heads: num_attention_heads, kv_heads: num_attention_heads // 4, head_dim: dim",
    ],
)
def test_numbers_by_attributes_of_the_module_and_its_config(numbers: str, tmp_path: Path) -> None:
    model = attention("config")
    attn = (
        f"{numbers}, attributes: {{config.num_attention_heads: heads, config.inner.n_kv: kv_heads}}"
    )
    plan = compiled(model, packed("[q, k, v]", attn), tmp_path, 4)
    assert plan.modules["layers.0.attn"].attributes == {
        "config.num_attention_heads": (8, 2),
        "config.inner.n_kv": (2, 1),
    }
    first = model.get_submodule("layers.0.attn")
    assert vars(first.config.inner) == {"n_kv": 2}  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ("{n_head: heads * 2, n_kv: kv_heads}", "'heads * 2' is 16, but n_head is 8"),
        ("{n_head: heads, n_kv: heads}", "'heads' is 8, but n_kv is 2"),
        ("{n_heads: heads}", "has no integer attribute 'n_heads'"),
        ("{config.inner.heads: heads}", "has no integer attribute 'config.inner.heads'"),
        ("{layout: heads}", "has no integer attribute 'layout'"),
        ("{n_head: hedas, n_kv: kv_heads}", "n_head: unknown"),
        ("{n_head: heads // 0, n_kv: kv_heads}", "n_head: division"),
    ],
)
def test_wrong_attributes(attributes: str, message: str, tmp_path: Path) -> None:
    attn = f"heads: n_head, kv_heads: n_kv, attributes: {attributes}"
    text = refused(attention("blocks"), packed("[q, k, v]", attn), tmp_path)
    assert text.count(f"layers.*.attn: {message}") == 1
    assert "my.yaml:5:" in text


def test_an_optional_rule_with_an_attribute_of_another_kind_of_module(tmp_path: Path) -> None:
    model = attention("blocks")
    more = NUMBERS.replace("kv_heads}", "kv_heads, state: 1}")
    text = refused(model, packed("[q, k, v]", more), tmp_path)
    assert "has no integer attribute 'state'" in text
    plan = tpplan.load_plan(tmp_path / "my.yaml")
    plan = replace(plan, rules=tuple(replace(rule, optional=True) for rule in plan.rules))
    found = compile_plan(model, plan, 2, False, inputs=INPUT)
    stated = compiled(model, packed("[q, k, v]", NUMBERS), tmp_path)
    assert found.modules["layers.0.attn"].attributes == stated.modules["layers.0.attn"].attributes


@pytest.mark.parametrize("attributes", ["", ", attributes: {n_head: heads}"])
def test_attributes_that_no_plan_states_are_found(attributes: str, tmp_path: Path) -> None:
    attn = f"heads: n_head, kv_heads: n_kv{attributes}"
    found = compiled(attention("blocks"), packed("[q, k, v]", attn), tmp_path)
    stated = compiled(attention("blocks"), packed("[q, k, v]", NUMBERS), tmp_path)
    for path in ("layers.0.attn", "layers.1.attn"):
        assert found.modules[path].attributes == stated.modules[path].attributes
        assert len(found.modules[path].attributes) == 2


def test_an_attribute_that_the_plan_keeps_whole(tmp_path: Path) -> None:
    attn = "heads: n_head, kv_heads: n_kv, attributes: {n_head: heads, n_kv: n_kv}"
    text = refused(attention("blocks"), packed("[q, k, v]", attn), tmp_path)
    assert "layers.*.attn" in text
    assert "'attributes'" in text


def test_wrong_numbers_of_heads(tmp_path: Path) -> None:
    text = refused(attention("blocks"), packed("[q, k, v]", "heads: nheads"), tmp_path)
    assert text.count("layers.*.attn: heads: ") == 1
    assert "nheads" in text
    assert "my.yaml:5:" in text


def test_heads_that_do_not_fit_list_what_does(tmp_path: Path) -> None:
    kv, options, attn, *_ = LAYOUTS["blocks"]
    text = refused(attention("blocks", kv), packed(options, attn), tmp_path, 3)
    assert "my.yaml:3:3: error: layers.*.attn.qkv (2 of them): colwise:" in text
    assert "tp may be 1, 2, 4, 8\n" in text
    text = refused(attention("blocks", kv), packed(options, attn), tmp_path, 16)
    assert "tp 16 does not divide its 8 heads" in text


def grouped(**options: Any) -> nn.Module:
    return layers.Stack(lambda: Block(Grouped(**options)))


def test_the_query_heads_of_a_key_value_head_are_found_by_proof(tmp_path: Path) -> None:
    plan = compiled(grouped(), SEPARATE, tmp_path, 4)
    assert plan.modules["layers.1.attn"].attributes == {"groups": (4, 2)}
    assert plan.parameters["layers.0.attn.k.weight"].summed
    assert not plan.parameters["layers.0.attn.q.weight"].summed
    # as long as every rank has whole key-value heads it is the same on each
    plan = compiled(grouped(), SEPARATE, tmp_path, 2)
    assert "layers.1.attn" not in plan.modules or not plan.modules["layers.1.attn"].attributes
    # written in the code itself, it cannot become another
    text = refused(grouped(exact=False), SEPARATE, tmp_path, 4)
    assert "'attributes'" in text
    assert "layers.*.attn" in text


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_how_a_weight_is_stored(sequence_parallel: bool, tmp_path: Path) -> None:
    model = layers.Stack(Conv)
    rules = "layers.*.fc: {style: colwise%s}\nlayers.*.out: {style: rowwise%s}\n"
    for stated in ("", ", transposed: true"):
        plan = compiled(model, rules % (stated, stated), tmp_path, 2, sequence_parallel)
        found = {name: p.placement for name, p in plan.parameters.items() if "0." in name}
        assert found["layers.0.fc.weight"] == Shard(1)
        assert found["layers.0.fc.bias"] == Shard(0)
        assert found["layers.0.out.weight"] == Shard(0)
    wrong = ", transposed: false"
    text = refused(model, rules % (wrong, wrong), tmp_path)
    assert "layers.*.fc (2 of them): transposed: its weight is stored (in, out)" in text
    assert "layers.*.out (2 of them): transposed: its weight is stored (in, out)" in text
    linear = layers.Stack(lambda: layers.Layer(torch.relu, layers.INNER))
    text = refused(linear, rules % (", transposed: true", ""), tmp_path)
    assert "transposed: its weight is stored (out, in)" in text


SIDES = "layers.*.{a,b}: colwise\nlayers.*.{a,b}_out: {style: rowwise%s}\n"


def test_one_reduction_for_what_is_only_added(tmp_path: Path) -> None:
    model = layers.Stack(Sides)
    both = ("layers.0.a_out", "layers.0.b_out")
    for stated in ("", ", reduce: together"):
        plan = compiled(model, SIDES % stated, tmp_path)
        assert plan.modules["layers.0.a_out"].together == both
        assert plan.modules["layers.0.b_out"].together == both
    plan = compiled(model, SIDES % ", reduce: separate", tmp_path)
    assert plan.modules["layers.0.a_out"].together == ()


def test_one_reduction_where_the_model_does_more_than_add(tmp_path: Path) -> None:
    model = layers.Stack(lambda: Sides(squashed=True))
    assert compiled(model, SIDES % "", tmp_path).modules["layers.0.a_out"].together == ()
    text = refused(model, SIDES % ", reduce: together", tmp_path)
    message = "layers.*.a_out, layers.*.b_out: reduce: the model does more than add"
    assert text.count(message) == 1
    assert "my.yaml:4:" in text


def test_arguments_that_hold_something_for_every_head(tmp_path: Path) -> None:
    model = layers.Stack(WithSlopes)
    rule = "layers.*.attn: {style: attention, head_inputs: {%s: 0}}\n"
    plan = compiled(model, SEPARATE + rule % "slopes", tmp_path, 4)
    ((argument, dim),) = plan.modules["layers.0.attn"].head_inputs
    assert (argument.name, dim) == ("slopes", 0)
    assert plan.modules["layers.0.attn"].heads == HEADS
    text = refused(model, SEPARATE + rule % "slope", tmp_path)
    assert text.count("layers.*.attn: has no argument 'slope'") == 1
    assert "it takes x, slopes" in text
    assert "my.yaml:5:" in text
    # left out, its heads are those of the whole model
    assert "layers.*.attn" in refused(model, SEPARATE, tmp_path)


def test_head_inputs_of_a_module_whose_heads_nobody_knows(tmp_path: Path) -> None:
    model = layers.Stack(lambda: layers.Layer(torch.relu, layers.INNER))
    rules = (
        "layers.*.fc: colwise\nlayers.*.out: rowwise\n"
        "layers.[0-9]: {style: attention, head_inputs: {x: 0}}\n"
    )
    text = refused(model, rules, tmp_path)
    assert text.count("layers.*: its number of heads is not known") == 1


def test_where_the_gather_sits_may_be_stated(tmp_path: Path) -> None:
    """By itself it stays inside a module that also adds its input to the result."""
    model = layers.Stack(lambda: layers.Layer(torch.relu, layers.INNER))
    rules = "layers.*.fc: colwise\nlayers.*.out: rowwise\n"
    plan = compiled(model, rules, tmp_path)
    assert plan.modules["layers.0.fc"].boundaries

    inner = layers.Stack(lambda: Block(Biased()))
    plan = compiled(inner, SEPARATE, tmp_path)
    assert [p for p, m in plan.modules.items() if m.boundaries] == [
        "layers.0.attn",
        "layers.1.attn",
    ]
    stated = SEPARATE + "layers.*.attn: {style: attention, gather: [x]}\n"
    plan = compiled(inner, stated, tmp_path)
    (boundary,) = plan.modules["layers.0.attn"].boundaries
    assert [a.name for a in boundary.arguments] == ["x"]
    assert boundary.consumers == tuple(f"layers.0.attn.{n}" for n in "qkv")


def test_heads_of_what_no_call_came_to() -> None:
    """A decoder without an encoder: attention to its states has the heads of one alike."""
    config = transformers.BartConfig(decoder_layers=2)
    with torch.device("meta"):
        model = transformers.BartForCausalLM(config)
    plan = compile_plan(model, tpplan.load_plan("auto", model), 4, True)
    for layer in range(2):
        for name in ("self_attn", "encoder_attn"):
            own = plan.modules[f"model.decoder.layers.{layer}.{name}"].attributes
            assert own == {"num_heads": (16, 4), "embed_dim": (1024, 256)}


class Scaled(nn.Module):
    """Scales the columns by what is computed of all positions together, which is no head."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 64), nn.Linear(WIDTH, 64)
        self.down = nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.gate(x.mean(1))[:, None].sigmoid()
        out: torch.Tensor = self.down(scale * self.up(x))
        return out


def test_a_dimension_added_is_no_head() -> None:
    rules = {"gate": "colwise", "up": "colwise", "down": "rowwise"}
    plan = {"tpplan": 1, "sequence_parallel": False, "rules": rules}
    compiled = tpplan.check(Scaled(), plan, 4, inputs=INPUT)
    assert compiled.parameters["gate.weight"].placement == Shard(0)
    with pytest.raises(tpplan.PlanError, match="does not divide its 1 heads"):
        tpplan.check(Scaled(), {**plan, "rules": {".": "attention", **rules}}, 4, inputs=INPUT)
