"""Modules that are put into the layers of a model that is sharded already."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call
from torch.nn.utils import parametrize

import tpplan
from tests.compare import Errors, Findings, beyond, compare_gradients, error, same
from tests.models import weighed
from tests.ranks import Ranks
from tests.rewrite import MODES, SIZES
from tests.rewrite.life import TIGHT, WIDTH, alike, built, ids, sharded


class Beside(nn.Module):
    """Adds a product of its own to what a module gives."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.weight = nn.Parameter(torch.full((WIDTH, WIDTH), 0.01, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> Any:
        return self.module(x) + x @ self.weight


def added_job(mesh: DeviceMesh, sp: bool, frozen: bool) -> Errors:
    """It is trained as in the unsharded model, or is refused by its name."""
    found, reference = Findings(), built()
    model = sharded(reference, mesh, sp)
    for m in (reference, model):
        norms = m.layers[0].norms
        norms[0] = Beside(norms[0]).requires_grad_(not frozen)
    try:
        found.add("step", alike(reference, model))
        found.add("accepted", same(frozen or not sp))
    except RuntimeError as error:
        found.add("named", same("layers.0.norms.0.weight: this parameter was added" in str(error)))
        found.add("refused", same(sp and not frozen))
    return found.errors


def _on_a_norm(model: Any) -> None:
    norm = model.layers[0].norms[0]
    norm.gamma = nn.Parameter(torch.full((WIDTH,), 0.5, dtype=torch.float64))
    norm.register_forward_hook(lambda module, given, out: out * module.gamma)


def _beside_a_norm(model: Any) -> None:
    norms = model.layers[0].norms
    norms[0] = Beside(norms[0])


def _refused(run: Callable[[], object], name: str) -> float:
    try:
        run()
    except RuntimeError as error:
        return same(f"layers.0.norms.0.{name}: this parameter was added" in str(error))
    return same(False)


def ways_job(mesh: DeviceMesh) -> Errors:
    """On a module that has its own, in a graph, and where FSDP2 takes it for one of the model's."""
    found = Findings()
    own = mesh["tp"]
    model = sharded(built(), own, True)
    _on_a_norm(model)
    found.add("on a module", _refused(lambda: model(ids(3)), "gamma"))

    model = sharded(built(), own, True)
    _beside_a_norm(model)
    compiled = torch.compile(model, backend="aot_eager")
    found.add("in a graph", _refused(lambda: compiled(ids(3)), "weight"))

    model = sharded(built(), mesh, True)
    _beside_a_norm(model)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    found.add("fully_shard", _refused(lambda: model(ids(3)), "weight"))
    model = sharded(built(), mesh, True)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    model(ids(3)).sum().backward()
    return found.errors


@pytest.mark.parametrize("shape", ["1x4", "2x2"])
@pytest.mark.turns(24)
def test_ways(ranks: Ranks, shape: str) -> None:
    assert not beyond(ranks.run(shape, ways_job))


def swapped_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Layers of a region are replaced: refused where nothing else would be said, else right."""
    found = Findings()

    def put(path: str, make: Callable[[Any], nn.Module]) -> tuple[nn.Module, Any]:
        reference = built()
        model = sharded(reference, mesh, sp)
        parent, _, leaf = path.rpartition(".")
        for m in (reference, model):
            torch.manual_seed(3)
            holder = m.get_submodule(parent)
            setattr(holder, leaf, make(getattr(holder, leaf)).double().requires_grad_(not sp))
        return reference, model

    for path, make, refused in (
        ("layers.1.attn.k", lambda old: nn.Linear(WIDTH, old.weight.shape[0]), "would give all"),
        ("layers.1.attn.q_norm", lambda _: nn.RMSNorm(4), "" if sp else "another one on each"),
    ):
        reference, model = put(path, make)
        try:
            found.add(path, {**alike(reference, model), "accepted": same(not refused)})
        except RuntimeError as error:
            named = any(f"{path}{more}" in str(error) for more in (": this module", ".weight' is"))
            found.add(f"{path} is refused", same(named and refused in str(error)))
    found.add("held by another", alike(*put("layers.1.attn.k", nn.Sequential)))
    found.add("a whole region", alike(*put("layers.1.attn", lambda _: nn.Linear(WIDTH, WIDTH))))
    return found.errors


@MODES
@pytest.mark.turns(24)
def test_replaced_in_a_region(ranks: Ranks, sp: bool) -> None:
    assert not beyond(ranks.run(2, swapped_job, sp), TIGHT)


class LowRank(nn.Module):
    """A weight and a product of two small matrices."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        out, width = weight.shape
        self.a, self.b = (
            nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64))
            for shape in ((2, width), (out, 2))
        )

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.b @ self.a


def parametrized_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """A parametrization of what is sharded meets whole weights; its own parameters are trained."""
    reference = built()
    model = sharded(reference, mesh, sp)
    for m in (reference, model):
        up = m.layers[0].up
        parametrize.register_parametrization(up, "weight", LowRank(up.weight), unsafe=True)
    return alike(reference, model)


@SIZES
@MODES
@pytest.mark.turns(24)
def test_parametrized(ranks: Ranks, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, parametrized_job, sp), TIGHT)


class Scaled(nn.Module):
    """A layer whose scales are held by others."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(WIDTH))])
        self.held = nn.Module()
        self.held.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scales[0] * self.held.scale * self.down(self.up(x).tanh())  # type: ignore[no-any-return]


LENT: dict[str, Any] = {
    "tpplan": 1,
    "rules": {
        "*.up": "colwise",
        "*.down": "rowwise",
        "*.scales.*": "replicate",
        "*.held.*": "replicate",
    },
}


def replaced_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Parameters that other code reads are replaced, for good and for one call."""
    found = Findings()
    torch.manual_seed(0)
    reference = nn.Sequential(Scaled(), Scaled()).double()
    x = torch.randn(2, 7, WIDTH, dtype=torch.float64)
    model = tpplan.parallelize(
        copy.deepcopy(reference), LENT, mesh, sequence_parallel=sp, inputs=x, prove=False
    )
    for m in (reference, model):
        first: Any = m[0]
        first.scales[0] = nn.Parameter(torch.full((WIDTH,), 0.5, dtype=torch.float64))
        first.held.scale = nn.Parameter(torch.full((WIDTH,), 0.7, dtype=torch.float64))
    for turn in range(2):
        weighed(reference(x)).backward()
        weighed(model(x)).backward()
        found.add(f"step {turn}", compare_gradients(reference, model))
    once = {
        "1.held.scale": torch.full((WIDTH,), 0.3, dtype=torch.float64, requires_grad=True),
        "1.scales.0": torch.full((WIDTH,), 0.2, dtype=torch.float64, requires_grad=True),
    }
    due = torch.autograd.grad(weighed(functional_call(reference, once, x)), list(once.values()))
    got = torch.autograd.grad(weighed(functional_call(model, once, x)), list(once.values()))
    for name, one, other in zip(once, due, got, strict=True):
        found.add(f"{name} of one call", error(one, other))
    found.add("read", same(model[0].held.scale.shape == (WIDTH,)))  # type: ignore[index, union-attr]
    return found.errors


@SIZES
@MODES
@pytest.mark.turns(24)
def test_replaced_where_others_read(ranks: Ranks, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, replaced_job, sp), TIGHT)


@SIZES
@MODES
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_added(ranks: Ranks, tp: int, sp: bool, frozen: bool) -> None:
    assert not beyond(ranks.run(tp, added_job, sp, frozen), TIGHT)


class Layer(nn.Module):
    """Of which the region is a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 24), nn.SiLU(), nn.Linear(24, WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.mlp(self.norm(x))


class Stacked(nn.Module):
    """Layers in a sequence, or in a list."""

    def __init__(self, kind: type[Any]) -> None:
        super().__init__()
        layers = [Layer() for _ in range(4)]
        self.layers = kind(*layers) if kind is nn.Sequential else kind(layers)

    def forward(self, x: torch.Tensor) -> Any:
        if isinstance(self.layers, nn.Sequential):
            return self.layers(x)
        for layer in self.layers[:]:
            x = layer(x)
        return x


RULES = {
    "tpplan": 1,
    "rules": {
        "layers.*.norm": "sequence_parallel",
        "layers.*.mlp.0": "colwise",
        "layers.*.mlp.2": "rowwise",
    },
}


def stacked(mesh: DeviceMesh, sp: bool, kind: type[Any]) -> tuple[Any, Any]:
    torch.manual_seed(3)
    reference = Stacked(kind).double()
    x, model = torch.randn(2, 9, WIDTH).double(), copy.deepcopy(reference)
    tpplan.parallelize(model, RULES, mesh, sequence_parallel=sp, prove=False, inputs=x)
    return reference, model


def trained(call: Callable[[Any], Any], *models: Any) -> Errors:
    """The errors of what a call gives, and of the gradients."""
    x, outs = torch.randn(2, 9, WIDTH).double(), []
    for m in models:
        m.zero_grad()
        outs.append(call(m)(x))
        weighed(outs[-1]).backward()
    return {"output": error(*outs), **compare_gradients(*models)}


def sliced_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Some of the layers, alone and put back, copied and not; what else is made of such classes."""
    found = Findings()
    for kind in (nn.Sequential, nn.ModuleList):
        models = stacked(mesh, sp, kind)
        name = kind.__name__
        found.add(f"{name}, before", trained(lambda m: m, *models))
        if kind is nn.Sequential:
            found.add("by itself", trained(lambda m: m.layers[1:3], *models))
            found.add("layers one by one", trained(lambda m: nn.Sequential(*m.layers), *models))
        for m in models:
            m.layers = m.layers[:2] + m.layers[3:]
            m.layers.append(copy.deepcopy(m.layers)[0])
            m.layers[1].norm = type(m.layers[1].norm)(WIDTH).double().requires_grad_(False)
        found.add(f"{name}, put back", trained(lambda m: m, *models))
        found.add(f"{name}, of copies", trained(lambda m: m, *map(copy.deepcopy, models)))
        if kind is nn.Sequential:  # compiled models are called whole
            for m in models:
                m.compile(backend="eager")
            found.add("compiled", trained(lambda m: m, *models))
    _, model = stacked(mesh, sp, nn.Sequential)
    found.add("another model", same(type(type(model)(nn.Sequential)) is Stacked))
    with pytest.raises(
        RuntimeError, match=r"layers\.1\.mlp\.0: another Sequential was made around"
    ):
        model.layers[1].mlp[:2]
    return found.errors


@SIZES
@MODES
@pytest.mark.turns(24)
def test_sliced(ranks: Ranks, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, sliced_job, sp), TIGHT)


def sliced_subclasses_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Sequences of which others made subclasses: FSDP2, parametrizations."""
    found = Findings()
    reference, model = stacked(mesh["tp"], sp, nn.Sequential)
    for m in (reference, model):
        parametrize.register_parametrization(
            m.layers[2].mlp[0], "weight", LowRank(m.layers[2].mlp[0].weight), unsafe=True
        )
    found.add("copied", trained(lambda m: m, *map(copy.deepcopy, (reference, model))))
    reference, model = stacked(mesh["tp"], sp, nn.Sequential)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model.layers, mesh=mesh["dp"])
    for m in (reference, model):
        m.layers = m.layers[:2]
    found.add("a plain one", same(type(model.layers) is nn.Sequential))
    found.add("fully sharded", trained(lambda m: m, reference, model))
    return found.errors


@MODES
@pytest.mark.turns(24)
def test_sliced_subclasses(ranks: Ranks, sp: bool) -> None:
    assert not beyond(ranks.run("2x2", sliced_subclasses_job, sp), TIGHT)
