"""What a model's code keeps outside of the model is, after each run of ours, what it was."""

from __future__ import annotations

import itertools
import math
import threading
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import tpplan
from tests.observe import habits
from tests.ranks import Ranks
from tpplan.language import PlanError
from tpplan.observe.chance import Chance
from tpplan.observe.untouched import Snapshot, apart, as_before, by_itself, view

EACH = pytest.mark.parametrize(
    "habit", range(len(habits.HABITS)), ids=[h.__name__ for h in habits.HABITS]
)


def ids(length: int = 8) -> torch.Tensor:
    return torch.arange(2 * length).view(2, length) % habits.WORDS


def model_with(habit: int) -> nn.Module:
    torch.manual_seed(0)
    return habits.Model(habit)


def step(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A training step whose loss takes what the code has put aside."""
    out = model(ids())
    losses = [*habits.AUX, *habits.NESTED["losses"]]
    loss = F.cross_entropy(out.flatten(0, 1), ids().flatten()) + sum(losses)
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), {
        name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()
    }


@pytest.mark.turns(4)
@EACH
@pytest.mark.parametrize("warm", [False, True])
def test_check(habit: int, warm: bool) -> None:
    habits.forget()
    model = model_with(habit)
    if warm:
        model(ids())
    before = habits.kept()
    tpplan.check(model, habits.PLAN, 2)
    assert habits.kept() == before
    with pytest.raises(PlanError) as told:
        tpplan.check(model, habits.WRONG, 2)
    assert "Dependent" not in str(told.value)
    assert habits.kept() == before
    assert type(model(ids())) is torch.Tensor


@pytest.mark.turns(4)
@EACH
def test_dry_run_and_verify(habit: int) -> None:
    habits.forget()
    before = habits.kept()
    tpplan.dry_run(model_with(habit), habits.PLAN, 2, batch=1, seq=8)
    assert habits.kept() == before
    tpplan.verify(model_with(habit), habits.PLAN, 2)
    assert habits.kept() == before


@pytest.mark.turns(4)
def test_suggest() -> None:
    habits.forget()
    before = habits.kept()
    assert "colwise" in str(tpplan.suggest(model_with(0), 2).text)
    assert habits.kept() == before


def training_job(mesh: DeviceMesh) -> list[Any]:
    found = []
    for habit in range(len(habits.HABITS)):
        habits.forget()
        model, before = model_with(habit), habits.kept()
        tpplan.parallelize(model, habits.PLAN, mesh)
        same = habits.kept() == before
        found.append((same, type(habits.BUILT).__name__, *step(model)))
    habits.forget()
    return found


def test_the_first_step(ranks: Ranks) -> None:
    results = ranks.run(2, training_job)
    for habit, of_ranks in enumerate(zip(*results, strict=True)):
        habits.forget()
        loss, gradients = step(model_with(habit))
        for same, _, got, theirs in of_ranks:
            assert same, habits.HABITS[habit]
            torch.testing.assert_close(got, loss)
            torch.testing.assert_close(theirs, gradients)
    habits.forget()


def test_code_and_flags_alone_stay() -> None:
    habits.forget()
    held: Any = habits.CALLS
    with as_before(model_with(0)):
        habits.READY = True
        held["found"] = math.sqrt
    assert habits.READY and held.pop("found") is math.sqrt
    with as_before(model_with(0)):
        habits.AUX.append(torch.ones(()))
        habits.READY = False
        held["found"] = math.sqrt
    assert habits.READY and not habits.AUX  # what goes with a tensor goes with it
    assert held.pop("found") is math.sqrt  # but for code
    habits.forget()


def test_what_was_taken_out_comes_back() -> None:
    habits.forget()
    model = model_with(0)
    mine = [torch.ones(()), torch.zeros(())]
    habits.AUX.extend(mine)
    habits.TABLES.update({2: mine[0], 1: mine[1]})
    losses = habits.NESTED["losses"]
    try:
        with pytest.raises(KeyError), as_before(model):
            habits.AUX.clear()
            habits.NESTED["losses"] = [mine[0]]
            del habits.Layer.tables
            habits.TABLES.pop(2)
            habits.TABLES[3] = mine[0]
            raise KeyError
        assert all(a is b for a, b in zip(habits.AUX, mine, strict=True))
        assert habits.NESTED["losses"] is losses and not losses
        assert [*habits.TABLES] == [2, 1] and habits.Layer.tables == {}
    finally:
        habits.forget()


def test_runs_by_themselves_and_in_turns() -> None:
    habits.forget()
    model = model_with(0)
    with as_before(model):
        with by_itself():
            habits.AUX.append(torch.ones(()))
        assert not habits.AUX
        one, other = view(), view()
        for mine, count in itertools.product((one, other), (1, 2)):
            with mine:
                habits.AUX.append(torch.full((), float(count)))
                assert len(habits.AUX) == count
        assert not habits.AUX
    with by_itself():  # of no model
        habits.AUX.append(torch.ones(()))
    assert habits.AUX
    habits.forget()


@pytest.mark.parametrize("fails", [False, True])
def test_ranks_that_keep_something_run_again(fails: bool) -> None:
    habits.forget()
    runs = []

    def run(turns: Any) -> list[Any]:
        habits.BUILT = torch.ones(())
        runs.append(turns)
        if fails and turns is None:
            raise ValueError
        return ["done"]

    with as_before(model_with(0)):
        kept = view().kept
        assert kept is not None and kept.touched  # there are containers
        kept.touched = False
        assert apart(run, 2) == ["done"]
    assert runs[0] is None and len(runs) == 2 and len(runs[1]) == 2
    assert habits.BUILT is None


def test_an_error_of_ranks_that_keep_nothing() -> None:
    def run(turns: Any) -> list[Any]:
        assert turns is None
        raise ValueError("of its own")

    with as_before(nn.Linear(2, 2)), pytest.raises(ValueError, match="of its own"):
        apart(run, 2)


class Pushing(habits.Layer):
    """Puts a rank's own columns aside, and takes them again after others have run as well."""

    def __init__(self) -> None:
        super().__init__(0)
        self.fc2, self.out2 = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        habits.AUX.append(self.fc(x))
        x = x + self.out2(self.fc2(x).relu())
        return x + self.out(habits.AUX.pop().relu())


def test_ranks_find_their_own() -> None:
    habits.forget()
    model = model_with(0)
    model.layers = nn.ModuleList(Pushing() for _ in range(2))
    rules = {**habits.RULES, "layers.*.fc2": "colwise", "layers.*.out2": "rowwise"}
    plan = {**habits.PLAN, "rules": rules}
    for tp in (2, 4):
        tpplan.check(model, plan, tp)
    assert not habits.AUX


def test_hooks_and_threads() -> None:
    seen: list[torch.Tensor] = []
    model = model_with(0)
    model.register_forward_hook(lambda *call: seen.append(call[-1]))
    tpplan.check(model, habits.PLAN, 2)
    assert not seen
    found: list[list[str]] = []
    with as_before(model):  # other threads are no runs of ours
        thread = threading.Thread(target=lambda: found.append([str(view().kept)]))
        thread.start()
        thread.join()
    assert found == [["None"]]


def test_torch_is_left_alone() -> None:
    assert {held.package for held in Snapshot(model_with(0)).held} == {""}
    assert all(isinstance(held.thing, Chance) for held in Snapshot(nn.Linear(2, 2)).held)


def test_of_an_installed_package_only_tensors() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    ropes = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 2)
    config = llama.LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=1)
    before = dict(ropes)
    with as_before(llama.LlamaModel(config)):
        ropes["number"] = 1
    assert ropes.pop("number") == 1
    with as_before(llama.LlamaModel(config)):
        ropes["table"] = (torch.ones(2),)
    assert ropes == before


class Noting(nn.Module):
    """A gated MLP that keeps what it has seen in objects of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.latest: deque[torch.Tensor] = deque(maxlen=2)
        self.notes = SimpleNamespace(seen=[], last=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.silu(self.a(x)) * self.b(x)
        self.latest.append(out.detach())
        self.notes.seen.append(out.detach())
        self.notes.last = out.detach()
        result: torch.Tensor = self.c(out)
        return result


@pytest.mark.turns(4)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_objects_of_a_gated_module(device: str) -> None:
    with torch.device(device):
        model = nn.Sequential(Noting(), Noting())
    inputs = torch.randn(2, 8, 16)
    rules = {"*.a": "colwise", "*.b": "colwise", "*.c": "rowwise"}
    plan = {"tpplan": 1, "sequence_parallel": False, "rules": rules}
    for _ in range(2):
        compiled = tpplan.check(model, plan, 2, inputs=inputs)
        for path in ("0", "1"):
            choice = compiled.modules[path].kernel
            assert choice is not None and choice.form is not None
    for mlp in model:
        assert not mlp.latest and not mlp.notes.seen and mlp.notes.last is None
