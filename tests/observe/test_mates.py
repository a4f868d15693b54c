"""Experts in a list, of which tokens are routed to some: all of them are planned."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from tests.compare import compare_gradients, error
from tests.ranks import Ranks
from tests.routed import RULES, WIDTH, Expert, Mixture, Model, plan
from tpplan.observe import shadow
from tpplan.observe.mates import with_mates


def test_each_is_called_in_the_place_of_another() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"few": nn.ModuleList(Expert() for _ in range(5)), "other": Expert()})
    few = model["few"]
    few.append(nn.Linear(WIDTH, WIDTH))  # which is like none of them
    before, met = list(few), list[nn.Module]()
    for number in with_mates(model, [1, 1]):
        for module in (few[0], few[3]):
            module.register_forward_hook(lambda m, *_: met.append(m))
            module(torch.zeros(2, WIDTH))
        assert number == 1
    assert {before.index(m) for m in met} == set(range(5))
    assert list(few) == before
    assert not any(m._forward_pre_hooks for m in few)


@pytest.mark.parametrize("sp", [False, True], ids=["TP", "TP+SP"])
@pytest.mark.parametrize("tp", [2, 4])
def test_few_tokens_are_enough_to_plan_all(tp: int, sp: bool) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        compiled = tpplan.check(Model(), plan(sp), tp, inputs=torch.randn(1, 4, WIDTH))
        assert not any(p.unreached for p in compiled.modules.values())
        assert sum(len(p.boundaries) for p in compiled.modules.values()) == 2


@pytest.mark.turns(4)
def test_without_a_rule_for_the_mixture() -> None:
    rules = {pattern: rule for pattern, rule in RULES.items() if pattern != "b.*.m"}
    inputs = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(0))
    assert tpplan.check(Model(), {**plan(False), "rules": rules}, 2, inputs=inputs)
    with pytest.raises(tpplan.PlanError) as told:
        tpplan.check(Model(), {**plan(True), "rules": rules}, 2, inputs=inputs)
    hints = [d.hint or "" for d in told.value.diagnostics]
    assert any("{style: attention, reduce: here}" in hint for hint in hints)


@pytest.mark.turns(24)
def test_suggested() -> None:
    torch.manual_seed(0)
    found = tpplan.suggest(Model(), tp=2, inputs=torch.randn(2, 8, WIDTH))
    rules = {rule.pattern.text: (rule.style, dict(rule.options)) for rule in found.rules}
    assert rules["b.*.m"] == ("attention", {"reduce": "here"})
    assert rules["b.*.m.e.*.z"] == ("rowwise", {})
    assert tpplan.check(Model(), found, 2, True, inputs=torch.randn(2, 8, WIDTH))


def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    out: torch.Tensor = model(batch)
    kept = sum(module.loss for module in model.modules() if isinstance(module, Mixture))
    (out.square().sum() + 3 * kept).backward()
    return out.detach()


def job(mesh: DeviceMesh, sp: bool) -> dict[str, float]:
    torch.manual_seed(mesh.size())
    whole, batches = Model().double(), [torch.randn(2, n, WIDTH).double() for n in (8, 5, 3)]
    model = tpplan.parallelize(copy.deepcopy(whole), plan(sp), mesh=mesh, inputs=batches[0])
    found = {}
    for number, batch in enumerate(batches):
        found[f"output {number}"] = error(step(whole, batch), step(model, batch))
        errors = compare_gradients(whole, model).items()
        found.update({f"{name} {number}": each for name, each in errors})
    return found


@pytest.mark.parametrize("sp", [False, True], ids=["TP", "TP+SP"])
@pytest.mark.parametrize("tp", [2, 4])
def test_right_on_ranks(ranks: Ranks, tp: int, sp: bool) -> None:
    for found in ranks.run(tp, job, sp):
        assert max(found.values()) <= 1e-12, found


@pytest.mark.turns(4)
@pytest.mark.parametrize("held", [2000, 300], ids=["of each other", "of their own rows"])
def test_large_models_share_their_numbers(monkeypatch: pytest.MonkeyPatch, held: int) -> None:
    monkeypatch.setattr(shadow, "_HELD", held)
    with torch.device("meta"):
        model = Model()
    computing = shadow.computing_shadow_of(model)
    assert computing is not None
    storages = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in computing.parameters()
    }
    assert sum(p.numel() for p in computing.parameters()) > 10_000
    assert sum(storages.values()) < 4 * 10_000
    inputs = torch.randn(1, 8, WIDTH, device="cpu")
    compiled = tpplan.check(model, plan(True), 2, inputs=inputs)
    assert not any(p.unreached for p in compiled.modules.values())
    monkeypatch.setattr(shadow, "_COMPUTED", 2000)
    with pytest.raises(tpplan.PlanError, match="cannot be run on example inputs"):
        tpplan.check(model, plan(True), 2, inputs=inputs)
