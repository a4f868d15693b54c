"""Experts that ranks of ep are to share: what each has, what is refused, and the proof of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import tpplan
from tests.gpt import GPT
from tests.mixtures import EXPERTS, PLAN, RULES, WIDTH, Experts, Model, model_of
from tests.planner.test_experts import INPUT
from tpplan.compat import fake_world
from tpplan.compiled import CompiledPlan
from tpplan.planner import compile_plan
from tpplan.proof import prove


def compiled(layout: str, tp: int, ep: int, whole: bool = False) -> tuple[Model, CompiledPlan]:
    """One of these models, and its plan."""
    rules: dict[str, Any] = {**RULES}
    if whole:
        rules["layers.*.block.experts"] = {"style": "experts", "shard": "experts"}
    model = model_of(layout)
    plan = tpplan.load_plan({**PLAN, "rules": rules})
    return model, compile_plan(model, plan, tp, True, inputs=INPUT, ep=ep)


@pytest.mark.parametrize("layout", ["packed", "in turns", "apart", "plain"])
@pytest.mark.parametrize(("tp", "ep", "whole"), [(1, 2, False), (2, 2, False), (2, 2, True)])
@pytest.mark.parametrize("large", [False, True], ids=["", "large"])
@pytest.mark.turns(24)
def test_every_layout(
    layout: str, tp: int, ep: int, whole: bool, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:
        monkeypatch.setattr("tpplan.observe.experts._SMALL", 0)
        monkeypatch.setattr("tpplan.proof.miniature._LARGE", 16)
    model, plan = compiled(layout, tp, ep, whole)
    name = "layers.0.block.experts"
    assert plan.ep == ep
    assert plan.modules[name].dispatched
    assert (plan.modules[name].thin is not None) == large
    for leaf, parameter in model.get_submodule(name).named_parameters():
        entry = plan.parameters[f"{name}.{leaf}"]
        assert entry.over_ep == Shard(0)
        assert entry.local_shape[0] == EXPERTS // (ep * tp if whole else ep)
        cut = tp if leaf != "narrow_bias" and not whole else 1
        assert math.prod(entry.local_shape[1:]) == math.prod(parameter.shape[1:]) // cut
    assert all(e.over_ep is None for n, e in plan.parameters.items() if "experts" not in n)
    prove(model, plan, INPUT)


def test_the_proof_finds_sums_for_means(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan = compiled("packed", 1, 2)
    monkeypatch.setattr("torch.Tensor.div_", lambda x, by: x)
    with pytest.raises(tpplan.PlanError, match="computes something else than whole"):
        prove(model, plan, INPUT)


def test_the_proof_finds_rows_that_come_back_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    from tpplan.roles import dispatch

    def turned(*given: Any) -> Any:
        made = dispatch_exchange(*given)
        return (made[0].flip(0), *made[1:]) if len(made) == 1 else made

    dispatch_exchange = dispatch.exchange
    model, plan = compiled("packed", 1, 2)
    monkeypatch.setattr(dispatch, "exchange", turned)
    with pytest.raises(tpplan.PlanError, match="computes something else than whole"):
        prove(model, plan, INPUT)


def test_experts_that_ep_does_not_divide() -> None:
    with pytest.raises(tpplan.PlanError) as raised:
        compiled("packed", 1, 3)
    assert "experts: ep 3 does not divide the 4 experts there are" in str(raised.value)
    assert "help: ep may be 1, 2, 4" in str(raised.value)
    with pytest.raises(tpplan.PlanError) as raised:
        compiled("packed", 2, 4, whole=True)
    assert "ep 4 times tp 2 does not divide the 4 experts there are" in str(raised.value)
    assert "help: ep times tp may be 1, 2, 4" in str(raised.value)


class Dense(Experts):
    """All experts for all tokens: it is told no choices."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Parameter(torch.randn(EXPERTS, WIDTH, 8))
        self.down = torch.nn.Parameter(torch.randn(EXPERTS, 8, WIDTH))

    def forward(self, x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        rows = x.view(1, -1, WIDTH).expand(EXPERTS, -1, -1)
        return torch.bmm(torch.bmm(rows, self.up).relu(), self.down).sum(0)


def test_experts_that_cannot_be_sent_tokens() -> None:
    from tests.mixtures import Block

    class Told(Block):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            rows = x.reshape(-1, x.size(-1))
            scores = self.router(rows)
            return self.experts(rows).view_as(x) + self.down(self.up(x).relu()), scores

    model = Model(lambda: Told(Dense()))
    with pytest.raises(tpplan.PlanError) as raised:
        compile_plan(model, tpplan.load_plan(PLAN), 1, inputs=INPUT, ep=2)
    assert "ep 2: it is not given activations, choices" in str(raised.value)
    assert "use the ranks of 'ep' for data parallelism" in str(raised.value)


def test_a_plan_without_experts() -> None:
    with pytest.raises(tpplan.PlanError) as raised:
        tpplan.check(GPT(), "gpt", 1, ep=2)
    assert "ep 2: no rule of the plan is of experts" in str(raised.value)


def test_meshes() -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "ep"))
        with pytest.raises(ValueError, match="'tp' before 'ep'"):
            tpplan.parallelize(GPT(), "gpt", mesh=mesh)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
        with pytest.raises(ValueError, match="no dimension named 'tp'"):
            tpplan.parallelize(GPT(), "gpt", mesh=mesh)
        mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("ep", "tp"))
        with pytest.raises(tpplan.PlanError, match="ep 4: no rule"):
            tpplan.parallelize(GPT(), "gpt", mesh=mesh)
    with pytest.raises(tpplan.PlanError, match="ep must be at least 1"):
        tpplan.check(GPT(), "gpt", 1, ep=0)
