"""A module for each head: every rank trains members of its own, all ranks sum for all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import tpplan
from tests.compare import Errors, Findings, beyond, full, gradient_errors, step
from tests.models import weighed
from tests.ranks import Ranks
from tests.rewrite import MODES, SIZES
from tpplan.simulate import Recorder

WIDTH, INNER, HEAD = 16, 32, 4
PLAN: dict[str, Any] = {
    "tpplan": 1,
    "rules": {"layers.*.fc": "colwise", "layers.*.out": "rowwise", "layers.*.heads": "colwise"},
}
INPUT = torch.zeros(2, 8, WIDTH)


class Head(nn.Module):
    """Several parameters, of its own and of modules inside."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(HEAD))
        self.norm, self.mix = nn.LayerNorm(HEAD), nn.Linear(HEAD, HEAD)
        self.idle = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.idle else x + self.mix(self.norm(x) * self.scale).tanh()


class Layer(nn.Module):
    """An MLP with a module for each head in between."""

    def __init__(self, make: Callable[[int], nn.Module] = lambda _: Head()) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.heads = nn.ModuleList(make(i) for i in range(INNER // HEAD))
        self.run: Callable[..., torch.Tensor] = lambda f, x: f(x)
        self.by_number = self.skipped = False

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.fc(x).split(HEAD, -1)
        if self.by_number:
            found = [self.heads[i](part) for i, part in enumerate(parts)]
        else:
            found = [head(part) for head, part in zip(self.heads, parts, strict=True)]
        return self.out(torch.cat(found, -1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.skipped else x + self.run(self.inside, x)


class Model(nn.Module):
    """Two layers."""

    def __init__(self, make: Callable[[int], nn.Module] = lambda _: Head()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(make) for _ in range(2))
        self.double()
        for parameter in self.parameters():
            nn.init.normal_(parameter, 0.5, 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def tied() -> Model:
    """One weight in two members, which run on different ranks, and in another layer."""
    model = Model()
    first, second = (layer.heads for layer in model.layers)
    first[7].mix.weight = second[3].mix.weight = first[0].mix.weight
    return model


def pair(mesh: DeviceMesh, sp: bool, reference: Model) -> tuple[Any, Any]:
    """The whole model and a sharded copy."""
    model = copy.deepcopy(reference)
    tpplan.parallelize(model, PLAN, mesh, sp, inputs=INPUT, prove=False)
    return reference, model


def called(model: Any) -> dict[str, torch.Tensor]:
    """A forward for ``step``."""
    x = torch.randn(2, 7, WIDTH, generator=torch.Generator().manual_seed(1)).double()
    x.requires_grad_()  # or reentrant checkpoints have no gradient
    y = model(x)
    return {"output": y, "objective": weighed(y)}


def unused(reference: Model, model: Any) -> Errors:
    """Gradients where some parameters are not used: members have zeros for None."""
    found = []
    for m in (reference, model):
        m.zero_grad()
        called(m)["objective"].backward()
        zeros = {n: torch.zeros(p.shape, dtype=p.dtype) for n, p in m.named_parameters()}
        given = {n: full(p.grad) for n, p in m.named_parameters() if p.grad is not None}
        found.append(zeros | given)
    return gradient_errors(*found)


def layers_of(models: Sequence[Any]) -> list[Any]:
    """Those of all models."""
    return [layer for model in models for layer in model.layers]


def set_idle(models: Sequence[Any], idle: bool) -> None:
    """Whether heads of some of the ranks do nothing."""
    for model in models:
        for name in ("layers.0.heads.5", "layers.1.heads.2"):
            model.get_submodule(name).idle = idle


def recomputed_and_frozen(models: Sequence[Any], right: Callable[[str], None]) -> None:
    """Checkpoints of both kinds, and one parameter alone that is trained."""
    for reentrant in (True, False):
        for layer in layers_of(models):
            layer.run = lambda f, x, r=reentrant: checkpoint(f, x, use_reentrant=r)
        right(f"recomputed {reentrant}")
    for layer in layers_of(models):
        layer.run = lambda f, x: f(x)
    for kept in ("layers.0.heads.0.scale", "layers.1.heads.7.mix.bias"):
        for name, parameter in (named for m in models for named in m.named_parameters()):
            parameter.requires_grad_(name == kept)
        right(f"only {kept}")
        right(f"only {kept}, again")
    for model in models:
        model.requires_grad_(True)


def left_out(models: Sequence[Any], found: Findings, title: str) -> None:
    """Some gradients that are asked for, layers that are skipped, heads that are idle."""
    some = [[m.layers[0].heads[0].norm.weight, m.layers[1].out.weight] for m in models[:1]]
    some += [[p for n, p in models[1].named_parameters() if n in _SOME]]
    grads = [
        torch.autograd.grad(called(m)["objective"], p) for m, p in zip(models, some, strict=True)
    ]
    found.add(f"{title}, two of them", gradient_errors(*(dict(enumerate(g)) for g in grads)))
    for skipped in (True, False):
        for model in models:
            model.layers[1].skipped = skipped
        if skipped:
            found.add(f"{title}, one layer is skipped", unused(*models))
    set_idle(models, True)
    found.add(f"{title}, heads of some ranks are idle", unused(*models))
    set_idle(models, False)


def events_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Members are reached, tied, recomputed, frozen, replaced, copied and left out."""
    found = Findings()
    for title, made in (("own", Model()), ("tied", tied())):
        models = pair(mesh, sp, made)

        def right(name: str, both: Any = models, title: str = title) -> None:
            with found.case(f"{title}, {name}"):
                found.add(f"{title}, {name}", step(*both, called))

        right("first")
        for by_number in (True, False):
            for layer in layers_of(models):
                layer.by_number = by_number
            right(f"by number {by_number}")
        recomputed_and_frozen(models, right)
        left_out(models, found, title)
        twins = tuple(copy.deepcopy(model) for model in models)
        right("of the copies", twins)
        for model in (*models, *twins):
            member = model.get_submodule("layers.0.heads.7")
            member.scale = nn.Parameter(member.scale.detach() * 1.5)
        right("one is replaced")
        right("one is replaced, again")
        right("one is replaced in the copies", twins)
        for layer in layers_of(models):
            layer.by_number = True
        right("one is replaced, by number")
        right("one is replaced, by number, again")
    return found.errors


_SOME = ("layers.0.heads.0.norm.weight", "layers.1.out.weight")


def refused_job(mesh: DeviceMesh) -> list[str]:
    """What cannot be right is refused on every rank."""
    said = []
    _, model = pair(mesh["tp"], True, Model())
    member = model.get_submodule("layers.0.heads.7")
    parametrize.register_parametrization(member, "scale", nn.Identity())
    with pytest.raises(RuntimeError) as raised:
        called(model)
    said.append(str(raised.value))
    _, model = pair(mesh["tp"], True, Model())
    fully_shard(model.get_submodule("layers.0.heads.7"), mesh=mesh["dp"])
    with pytest.raises(RuntimeError) as raised:
        called(model)
    said.append(str(raised.value))
    return said


def counts_job(mesh: DeviceMesh, sharded: bool) -> int:
    """How often gradients are summed in a step."""
    _, model = pair(mesh["tp"], True, Model())
    if sharded:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    called(model)["objective"].backward()
    with Recorder() as recorder:
        called(model)["objective"].backward()
    return sum("gradients of replicated" in c.reason for c in recorder.collectives)


@SIZES
@MODES
@pytest.mark.turns(48)
def test_events(ranks: Ranks, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, events_job, sp), 1e-9)


def test_refused_on_every_rank(ranks: Ranks) -> None:
    for parametrized, sharded in ranks.run("2x2", refused_job):
        assert "a parametrization was put on it after" in parametrized
        assert "layers.0.heads.7 is sharded by FSDP by itself" in sharded


@pytest.mark.parametrize("sharded", [False, True])
def test_one_sum(ranks: Ranks, sharded: bool) -> None:
    # all at once, or under FSDP2 those of each layer, whose parameters are there for it alone
    assert ranks.run("2x2", counts_job, sharded) == [2 if sharded else 1] * 4


def shared(_: int, one: nn.Module = nn.LayerNorm(HEAD)) -> nn.Module:  # noqa: B008
    """The same module for all heads."""
    return one


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda i: nn.LayerNorm(HEAD, bias=i > 3), "its modules have different parameters"),
        (shared, "a module is in it several times"),
    ],
)
def test_members_that_are_not_alike(make: Callable[[int], nn.Module], message: str) -> None:
    with pytest.raises(tpplan.PlanError, match=message):
        tpplan.check(Model(make), PLAN, 2, inputs=INPUT)
