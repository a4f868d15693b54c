"""Which modules fused kernels stand for, found by what they compute, and which they do not."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tpplan
from benchmarks import zoo
from tests.models import hf
from tpplan.compiled import CompiledPlan
from tpplan.kernels.forms import GatedForm, GeluForm, NormForm, UnbiasedForm
from tpplan.language import PlanError
from tpplan.planner import compile_plan


def compiled(model: nn.Module, plan: Any, kernels: Any = None, inputs: Any = None) -> CompiledPlan:
    return compile_plan(model, tpplan.load_plan(plan, model), 2, None, kernels, inputs)


def forms(plan: CompiledPlan) -> dict[str, Any]:
    return {p.path: p.kernel.form for p in plan.modules.values() if p.kernel and p.kernel.form}


def of_zoo(name: str) -> dict[str, Any]:
    model = zoo.makers()[name]()
    return forms(compiled(model, "auto", inputs=zoo.example(model)))


@pytest.mark.parametrize(
    ("name", "path", "centred", "offset", "early"),
    [
        ("llama", "model.norm", False, 0.0, True),
        ("gemma2", "model.layers.0.post_feedforward_layernorm", False, 1.0, False),
        ("qwen3", "model.layers.1.self_attn.q_norm", False, 0.0, True),
        ("gpt2", "transformer.ln_f", True, 0.0, False),
        ("cohere", "model.layers.0.input_layernorm", True, 0.0, False),
        ("olmo2", "model.norm", False, 0.0, False),
    ],
)
@pytest.mark.turns(12)
def test_norms(name: str, path: str, centred: bool, offset: float, early: bool) -> None:
    form = of_zoo(name)[path]
    assert isinstance(form, NormForm)
    assert (form.centred, form.offset, form.early) == (centred, offset, early)


def test_the_eps_is_the_modules_own() -> None:
    model = hf("Llama", device="meta", rms_norm_eps=3e-6)
    form = forms(compiled(model, "llama.yaml"))["model.norm"]
    assert form.eps == 3e-6
    assert forms(compiled(zoo.tiny("gpt2"), "gpt2.yaml"))["transformer.ln_f"].eps == 1e-5


@pytest.mark.parametrize(
    ("name", "path", "expected"),
    [
        ("llama", "model.layers.0.mlp", GatedForm("gate_proj", "up_proj", "down_proj", "silu")),
        (
            "gemma2",
            "model.layers.0.mlp",
            GatedForm("gate_proj", "up_proj", "down_proj", "gelu_tanh"),
        ),
        ("phi3", "model.layers.0.mlp", GatedForm("gate_up_proj", None, "down_proj", "silu")),
        ("glm4", "model.layers.1.mlp", GatedForm("gate_up_proj", None, "down_proj", "silu")),
    ],
)
@pytest.mark.turns(12)
def test_gated(name: str, path: str, expected: GatedForm) -> None:
    assert of_zoo(name)[path] == expected


@pytest.mark.parametrize(
    ("name", "linear", "activation", "tanh", "transposed"),
    [
        ("gpt2", "transformer.h.1.mlp.c_fc", "transformer.h.1.mlp.act", True, True),
        (
            "gpt_neox",
            "gpt_neox.layers.0.mlp.dense_h_to_4h",
            "gpt_neox.layers.0.mlp.act",
            False,
            False,
        ),
        ("starcoder2", "model.layers.0.mlp.c_fc", "model.layers.0.mlp.act", True, False),
    ],
)
def test_gelu_takes_over_the_bias(
    name: str, linear: str, activation: str, tanh: bool, transposed: bool
) -> None:
    found = of_zoo(name)
    assert found[linear] == UnbiasedForm(activation, transposed)
    assert found[activation] == GeluForm(linear, tanh)


RULES = {
    "tpplan": 1,
    "rules": {"*.first": "colwise", "*.second": "colwise", "*.last": "rowwise"},
}


class Block(nn.Module):
    """An MLP, as the tests want it."""

    def __init__(self, forward: Any, activation: nn.Module, bias: bool = True) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32, bias), nn.Linear(16, 32, bias)
        self.last, self.act = nn.Linear(32, 16), activation
        self.dropout = nn.Dropout(0.1)
        self.run = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.run(self, x)


def in_a_model(forward: Any, activation: nn.Module) -> CompiledPlan:
    model = nn.Sequential(Block(forward, activation), Block(forward, activation))
    return compiled(model, RULES, inputs=torch.randn(2, 4, 16))


def test_what_is_no_gated_product_is_left_alone() -> None:
    def doubled(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.last(m.act(m.first(x)) * m.second(x) * 2)

    plan = in_a_model(doubled, nn.SiLU())
    assert not any(isinstance(form, GatedForm) for form in forms(plan).values())


class Gated(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(16, 32)
        self.last, self.dropout = nn.Linear(32, 16), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.dropout(F.silu(self.first(x)) * self.second(x)))


@pytest.mark.parametrize(("dropout", "stands"), [(0.0, True), (0.1, False)])
def test_a_product_that_is_dropped_in_training(dropout: float, stands: bool) -> None:
    plan = compiled(nn.Sequential(Gated(dropout)), RULES, inputs=torch.randn(2, 4, 16))
    choice = plan.modules["0"].kernel
    assert choice is not None
    assert isinstance(choice.form, GatedForm) is stands
    if not stands:
        assert choice.implementation == "torch"
        assert "more than activation(gate) * up" in choice.reason


def test_a_gelu_needs_the_layer_to_itself() -> None:
    def twice(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.first(x)
        return m.last(m.act(y) + y + m.second(x))

    def dropped(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.last(m.act(m.dropout(m.first(x))) + m.second(x))

    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.last(F.gelu(m.first(x)) + m.second(x))

    def alone(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.last(m.act(m.first(x)) + m.second(x))

    assert not forms(in_a_model(twice, nn.GELU()))
    assert not forms(in_a_model(dropped, nn.GELU()))
    assert not forms(in_a_model(alone, nn.ReLU()))
    plan = in_a_model(function, nn.GELU())
    choice = plan.modules["0.first"].kernel
    assert choice is not None
    assert "a function, not a module" in choice.reason
    one_each = nn.Sequential(*(Block(alone, nn.GELU()) for _ in range(2)))
    assert len(forms(compiled(one_each, RULES, inputs=torch.randn(2, 4, 16)))) == 4
    # one object for both blocks adds no one layer's bias
    assert not forms(in_a_model(alone, nn.GELU()))


def test_norms_that_kernels_do_not_compute() -> None:
    width = compiled(zoo.tiny("olmo2"), "olmo2.yaml").modules["model.layers.0.self_attn.q_norm"]
    assert width.kernel is not None
    assert width.kernel.implementation == "torch"
    assert "sharded" in width.kernel.reason


def test_who_chooses() -> None:
    pytest.importorskip("triton")
    plan = {"tpplan": 1, "extends": "llama.yaml", "kernels": {"rms_norm": "torch"}}
    model = hf("Llama", device="meta")
    found = compiled(model, plan)
    assert {type(form) for form in forms(found).values()} == {GatedForm}
    over = compiled(model, plan, {"rms_norm": "triton", "swiglu": "torch"})
    assert {type(form) for form in forms(over).values()} == {NormForm}
    assert not forms(compiled(model, "llama.yaml", "torch"))
    every = compiled(model, "llama.yaml", "triton")
    assert {p.kernel.implementation for p in every.modules.values() if p.kernel} == {"triton"}


def test_kernels_that_there_are_not() -> None:
    model = hf("Llama", device="meta")
    with pytest.raises(PlanError, match=r"no kind .rms_nrom.[^$]*did you mean .rms_norm."):
        compiled(model, "llama.yaml", {"rms_nrom": "triton"})
    with pytest.raises(PlanError, match="no implementation 'cuda'"):
        compiled(model, "llama.yaml", "cuda")


class Remembering(nn.Module):
    """An MLP whose code writes to what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("mean", torch.ones(()))
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> Any:
        y = self.fc(x).relu()
        self.seen.append(len(self.seen))
        self.mean.mul_(0.5).add_(0.5 * y.detach().abs().mean())  # type: ignore[operator]
        return x + self.out(y / self.mean)


def test_looking_for_kernels_writes_nothing_to_the_model() -> None:
    model = nn.Sequential(Remembering(), Remembering())
    plan = {"tpplan": 1, "rules": {"*.fc": "colwise", "*.out": "rowwise"}}
    with contextlib.suppress(tpplan.PlanError):
        tpplan.check(model, plan, 2, False, inputs=torch.randn(2, 8, 16))
    for layer in model:
        assert isinstance(layer, Remembering)
        assert layer.seen == []
        assert float(layer.mean) == 1.0  # type: ignore[arg-type]
