"""Blocks of experts: where they enter and leave, what leaves besides, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import tpplan
from benchmarks import zoo
from tests.mixtures import (
    EXPERTS,
    LAYOUTS,
    PLAN,
    RULES,
    WIDTH,
    Block,
    Grouped,
    HandingThrough,
    Layer,
    Model,
    Packed,
    Scaled,
    model_of,
)
from tpplan import places
from tpplan.compiled import CompiledPlan
from tpplan.observe.experts import shared_experts
from tpplan.planner import compile_plan
from tpplan.planner.experts import ways
from tpplan.proof import prove

pytestmark = pytest.mark.turns(4)

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


def test_experts_of_layers_that_are_alike_are_examined_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    examined = []

    def count(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        examined.append(module)
        return shared_experts(module, *args, **kwargs)

    monkeypatch.setattr("tpplan.planner.sharing.shared_experts", count)
    plan = compiled(model_of("in turns"))
    assert len([path for path in plan.modules if path.endswith(".block.experts")]) > 1
    assert len(examined) == 1


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


class Listing(Block):
    """Keeps it in a list."""

    def forward(self, x: torch.Tensor) -> Any:
        y, seen = super().forward(x)
        self.seen = [seen]
        return y


class Reading(Layer):
    """Reads what the router gave."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, seen = self.block(self.norm(x)), self.block.seen
        return x + y, 2 * (seen[0] if isinstance(seen, list) else seen)  # type: ignore[operator]


def reading(block: type[Block]) -> Model:
    """A model whose layers do."""
    model = Model(lambda: block(Packed()))
    for layer in model.layers:
        layer.__class__ = Reading
    return model


@pytest.mark.parametrize("sp", [False, True], ids=["tp", "tp+sp"])
def test_what_a_block_keeps(sp: bool) -> None:
    """Read by the layer's code, it has the gradient of what is whole."""
    model = reading(Kept)
    plan = compiled(model, sp=sp)
    assert plan.modules["layers.0.block"].escaping == ((places.Kept("", "seen"),),)
    prove(model, plan, INPUT)


@pytest.mark.parametrize("sp", [False, True], ids=["tp", "tp+sp"])
def test_whole_experts_in_grouped_products(sp: bool) -> None:
    """In float32, of which torch's own fake tensors refuse them."""
    torch.manual_seed(0)
    model = Model(lambda: Block(Grouped()))
    rules = {f"layers.*.block.{name}": "replicate" for name in ("experts", "up", "down")}
    rules["layers.*.block"] = {"style": "replicate", "input": "gather"}
    prove(
        model, compiled(model, sp=sp, rules={"layers.*.norm": "sequence_parallel", **rules}), INPUT
    )


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
        (lambda: reading(Listing), {}, 6, "code outside of it uses what is made inside of it"),
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
    monkeypatch.setattr("tpplan.observe.experts._SMALL", 0)
    for layout in ("packed", "in turns", "apart"):
        model = model_of(layout)
        plan = compiled(model)
        assert plan.modules["layers.0.block.experts"].thin is not None
        prove(model, plan, INPUT)
    monkeypatch.setattr("tpplan.roles.experts.divide_gradient", lambda x, by: x)
    with pytest.raises(tpplan.PlanError, match="computes something else than whole"):
        prove(model, plan, INPUT)


class Normed(nn.Module):
    """A layer that calls its experts itself, and normalises what they give."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), LAYOUTS[layout]()
        self.norm, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.norm(x).reshape(-1, WIDTH)
        factors, chosen = self.router(rows).softmax(-1).topk(2)
        return x + self.after(self.experts(rows, chosen, factors)).view_as(x)


def normed(layout: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Normed(layout), Normed(layout))


def here(**options: str) -> Mapping[str, Any]:
    """A plan of such layers."""
    experts = {"style": "experts", "reduce": "here", **options}
    rules = {"*.{norm,after}": "sequence_parallel", "*.router": "replicate", "*.experts": experts}
    return {"tpplan": 1, "sequence_parallel": False, "rules": rules}


@pytest.mark.parametrize("shard", ["inner", "experts"])
@pytest.mark.parametrize("layout", ["packed", "in turns", "apart"])
@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (4, 1), (1, 2), (2, 2)])
@pytest.mark.turns(24)
def test_experts_that_are_reduced_by_themselves(layout: str, shard: str, tp: int, ep: int) -> None:
    made = tpplan.verify(lambda: normed(layout), here(shard=shard), tp, ep=ep, inputs=INPUT)
    assert made.gradient_error <= 1e-5
    if tp > 1:  # of the tokens, and backward of the factors besides
        assert made.counts["forward"]["all_reduce"] == 2
        assert made.counts["backward"]["all_reduce"] == 4


def test_experts_that_are_reduced_by_themselves_have_all_tokens() -> None:
    with pytest.raises(tpplan.PlanError, match="each rank has tokens of its own") as refused:
        compile_plan(normed("packed"), tpplan.load_plan(here()), 2, True, inputs=INPUT)
    assert all(found.position is not None for found in refused.value.diagnostics)


@pytest.mark.turns(24)
@pytest.mark.parametrize("shard", ["inner", "experts"])
@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (4, 1), (1, 2), (2, 2)])
def test_gemma(shard: str, tp: int, ep: int) -> None:
    """Gemma 4 with experts: its layers call these themselves, beside an MLP."""
    sizes = {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32}

    def make() -> nn.Module:
        return zoo.tiny("gemma4_text", enable_moe_block=True, **sizes)

    plan = tpplan.load_plan("auto", make())
    if shard != "inner":
        plan = ways(plan)[shard]
    made = tpplan.verify(make, plan, tp, ep=ep, sequence_parallel=False)
    assert max(made.output_error, made.gradient_error) <= 1e-5


class PutAnew(HandingThrough):
    """The stack with a place for those that hand tokens through is held last."""

    def __init__(self) -> None:
        super().__init__()
        wide = self.wide
        del self.wide
        self.wide = wide


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("made", [HandingThrough, PutAnew])
def test_experts_that_hand_tokens_through(tp: int, made: Callable[[], nn.Module]) -> None:
    """What no parameter is in is whole on every rank, and must be added once."""
    model = Model(lambda: Block(made()))
    plan = tpplan.load_plan(PLAN)
    for sp in (False, True):
        found = tpplan.verify(model, plan, tp, sequence_parallel=sp, inputs=INPUT)
        assert found.gradient_error <= 1e-5
    whole = {**RULES, "layers.*.block.experts": {"style": "experts", "shard": "experts"}}
    assert "some of its parameters are not of one expert each" in refusal(model, rules=whole)
