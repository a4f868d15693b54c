"""Blocks of experts: where they enter and leave, what leaves besides, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import tpplan
from tests.mixtures import (
    EXPERTS,
    PLAN,
    RULES,
    WIDTH,
    Block,
    Layer,
    Model,
    Packed,
    Scaled,
    model_of,
)
from tpplan.compiled import CompiledPlan
from tpplan.planner import compile_plan

INPUT = torch.randn(2, 8, WIDTH)


def compiled(
    model: nn.Module, tp: int = 2, sp: bool = True, rules: Mapping[str, Any] = RULES
) -> CompiledPlan:
    """The plan of these models, compiled."""
    plan = tpplan.load_plan({**PLAN, "rules": dict(rules)})
    return compile_plan(model, plan, tp, sp, inputs=INPUT)


def refusal(model: nn.Module, **how: Any) -> str:
    """What is said of a model that is refused."""
    with pytest.raises(tpplan.PlanError) as raised:
        compiled(model, **how)
    return str(raised.value)


@pytest.mark.parametrize("sp", [False, True], ids=["tp", "tp+sp"])
def test_a_block(sp: bool) -> None:
    plan = compiled(model_of("in turns"), sp=sp)
    block = plan.modules["layers.0.block"]
    assert [b.arguments[0].name for b in block.boundaries] == ["x"]
    assert block.summed is not None
    assert block.summed.outputs == ((0,),)
    assert block.escaping == ((1,),)
    assert plan.modules["layers.0.block.down"].partial
    assert not plan.modules["layers.0.block.up"].boundaries  # has entered already
    experts = plan.modules["layers.0.block.experts"]
    assert experts.summed is not None
    assert experts.summed.added == ("narrow_bias",)
    summed = {name for name, entry in plan.parameters.items() if entry.summed}
    inside = {"router.weight", "experts.narrow_bias", "down.bias"}
    norms = {"layers.0.norm.weight", "layers.0.norm.bias"} if sp else set()
    assert {n for n in summed if n.startswith("layers.0")} == norms | {
        f"layers.0.block.{name}" for name in inside
    }


def nonlinear() -> Block:
    """What the block does to the sum in the end is not linear."""
    block = Block(Packed())
    block.last = torch.tanh  # type: ignore[method-assign]
    return block


class Kept(Block):
    """Keeps what its router gave for others to read."""

    def forward(self, x: torch.Tensor) -> Any:
        y, self.seen = super().forward(x)
        return y


class Reading(Layer):
    """Reads what the router gave."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.block(self.norm(x))
        return x + y, 2 * self.block.seen  # type: ignore[operator]


def reading() -> Model:
    """A model whose layers do."""
    model = Model(lambda: Kept(Packed()))
    for layer in model.layers:
        layer.__class__ = Reading
    return model


class Direct(nn.Module):
    """A layer that calls its experts itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.experts = Packed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.norm(x).reshape(-1, WIDTH)
        factors, chosen = self.router(rows).softmax(-1).topk(2)
        return x + self.experts(rows, chosen, factors).view_as(x)


DIRECT = {
    "*.norm": "sequence_parallel",
    "*.router": "replicate",
    "*.experts": "experts",
}


@pytest.mark.parametrize(
    ("make", "how", "line", "message"),
    [
        (lambda: model_of("packed"), {"tp": 3}, 6, "tp 3 does not divide the 8 inner columns"),
        (lambda: Model(lambda: Block(Scaled())), {}, 6, "no inner columns were found"),
        (lambda: Model(nonlinear), {}, 6, "gives parts that do not sum up"),
        (reading, {}, 6, "code outside of it uses what is made inside of it"),
        (
            lambda: nn.Sequential(Direct(), Direct()),
            {"rules": DIRECT},
            6,
            "an element of the stack calls experts itself",
        ),
        (
            lambda: model_of("packed"),
            {"rules": {**RULES, "layers.*.block.up": "experts"}},
            7,
            "holds no parameter (experts, rows, columns)",
        ),
        (
            lambda: model_of("packed"),
            {
                "rules": {
                    **RULES,
                    "layers.*.block.up": "replicate",
                    "layers.*.block.down": "replicate",
                }
            },
            6,
            "what works beside the experts must be sharded too",
        ),
    ],
    ids=["width", "statistics", "nonlinear", "lost", "direct", "no experts", "whole beside"],
)
def test_refused(
    make: Callable[[], nn.Module], how: Mapping[str, Any], line: int, message: str
) -> None:
    said = refusal(make(), **how)
    assert message in said
    assert said.startswith(f"<mapping>:{line}:")


def test_a_proof_of_large_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """On thin ones it finds what is wrong, and nothing where nothing is."""
    from tpplan.proof import prove

    monkeypatch.setattr("tpplan.observe.experts._SMALL", 0)
    for layout in ("packed", "in turns", "apart"):
        model = model_of(layout)
        plan = compiled(model)
        assert plan.modules["layers.0.block.experts"].thin is not None
        prove(model, plan, INPUT)
    monkeypatch.setattr("tpplan.roles.experts.divide_gradient", lambda x, by: x)
    with pytest.raises(tpplan.PlanError, match="computes something else than whole"):
        prove(model, plan, INPUT)
