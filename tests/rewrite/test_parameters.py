"""The life of parameters: replaced, converted, changed, loaded, hooked and shared ones."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize, prune

import tpplan
from tests.compare import (
    Errors,
    Findings,
    beyond,
    compare_gradients,
    compare_parameters,
    error,
    full,
    gradient_errors,
    same,
)
from tests.models import weighed
from tests.ranks import Ranks
from tests.rewrite import MODES, SIZES
from tests.rewrite.life import TIGHT, alike, built, ids, loss_of, sharded

Pair = tuple[Any, Any]


def pair(mesh: DeviceMesh, sp: bool) -> Pair:
    """The whole model and a sharded copy that has run before."""
    reference = built()
    model = sharded(reference, mesh, sp)
    alike(reference, model)
    return reference, model


def twice(models: Pair) -> Errors:
    """What is made anew once may be wrong when it is kept."""
    again = {f"{name}, again": e for name, e in alike(*models, 5).items()}
    return {**alike(*models), **again}


def of_each(models: Pair, values: Callable[[Any], Any]) -> list[Any]:
    """A function of both models."""
    return [values(model) for model in models]


# --- what stands in a parameter's place


def in_place_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Plain parameters, ``functional_call`` with plain and sharded tensors, ``data``."""
    found = Findings()
    others = built(5), sharded(built(5), mesh, sp)

    def called(models: Pair, given: Pair, order: int) -> list[dict[str, torch.Tensor]]:
        grads = []
        for model, other in zip(models, given, strict=True):
            weights = {n: p.detach().clone().requires_grad_() for n, p in other.named_parameters()}
            logits = torch.func.functional_call(model, weights, (ids(3),))
            mine = torch.autograd.grad(
                weighed(logits), list(weights.values()), create_graph=order > 1
            )
            if order > 1:
                sum(whole(g).pow(2).sum() for g in mine).backward()  # type: ignore[union-attr]
                mine = tuple(w.grad for w in weights.values())  # type: ignore[misc]
            grads.append(dict(zip(weights, mine, strict=True)))
        return grads

    models = pair(mesh, sp)
    for title, given in (("plain", (others[0], others[0])), ("sharded", others)):
        for order in (1, 2):
            with found.case(title):
                errors = gradient_errors(*called(models, given, order))
                found.add(f"functional_call, {title}, gradients of order {order}", errors)
        found.add(f"afterwards, {title}", alike(*models))
    for model in models:
        for name, p in others[0].named_parameters():
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, nn.Parameter(p.detach().clone()))
    found.add("replaced by plain ones", twice(models))
    with torch.no_grad():
        of_each(models, lambda m: [p.mul_(0.7) for p in m.parameters()])
    found.add("and these changed", twice(models))

    models = pair(mesh, sp)
    for model, other in zip(models, others, strict=True):
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            p.data = q.data.clone()
    found.add("replaced through data", twice(models))
    model = sharded(built(), mesh, sp)
    model.head.weight = nn.Parameter(torch.zeros(3, 3).double())
    with pytest.raises(RuntimeError, match=r"head\.weight has the shape"):
        model(ids(1))
    model.head.weight = None
    with pytest.raises(RuntimeError, match=r"head\.weight is gone"):
        model(ids(1))
    return found.errors


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor, still in the graph."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Doubled(nn.Module):
    """A parametrization for which the whole tensor matters."""

    def forward(self, w: torch.Tensor) -> torch.Tensor:
        """Twice the tensor and its sum."""
        return 2 * w + 0.01 * w.sum()


def computed_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Parametrizations and pruning, put on after the model was sharded."""
    found = Findings()
    models = pair(mesh, sp)
    for model in models:
        for path in ("layers.0.up", "layers.1.down", "head", "layers.0.attn.qkv"):
            parametrize.register_parametrization(model.get_submodule(path), "weight", Doubled())
    found.add("parametrizations", twice(models))
    models = pair(mesh, sp)
    of_each(models, lambda m: nn.utils.parametrizations.weight_norm(m.layers[0].up))
    found.add("weight_norm", twice(models))
    models = pair(mesh, sp)
    of_each(models, lambda m: prune.l1_unstructured(m.layers[0].up, "weight", 0.0))  # type: ignore[no-untyped-call]
    found.add("pruning", twice(models))
    parametrize.register_parametrization(models[1].norm, "weight", Doubled())
    with pytest.raises(RuntimeError, match=r"norm\.weight: a parametrization was put on"):
        models[1](ids(1))
    return found.errors


# --- changed before the backward, and gradients of gradients


def versions_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """A parameter that is changed between forward and backward is noticed where torch does."""
    found = Findings()
    models = pair(mesh, sp)

    def noticed(model: Any, name: str) -> bool:
        loss = loss_of(model)
        with torch.no_grad():
            model.get_parameter(name).mul_(1.25)
        try:
            loss.backward()
        except RuntimeError as e:
            return "modified by an inplace operation" in str(e)
        finally:
            model.zero_grad()
        return False

    for name, _ in models[0].named_parameters():
        expected, got = of_each(models, lambda m, name=name: noticed(m, name))
        found.add(name, same(expected == got))
    with torch.no_grad():
        for p in models[0].parameters():
            p.mul_(1.5)
        for p in models[1].parameters():
            p.to_local().mul_(1.5)
    found.add("written to the shards", twice(models))
    return found.errors


def penalty_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """A penalty on all gradients, and the product of the Hessian with a vector."""
    found = Findings()
    models = pair(mesh, sp)

    def gradients(model: Any) -> tuple[torch.Tensor, ...]:
        model.zero_grad()
        return torch.autograd.grad(loss_of(model), list(model.parameters()), create_graph=True)

    def penalty(model: Any) -> None:
        sum(whole(g).pow(2).sum() for g in gradients(model)).backward()  # type: ignore[union-attr]

    def sharded_penalty(model: Any) -> None:
        whole(sum((g * g).sum() for g in gradients(model))).backward()  # type: ignore[arg-type]

    def product(model: Any) -> None:
        given = torch.Generator().manual_seed(2)
        terms = []
        for g in gradients(model):
            vector = torch.randn(g.shape, generator=given, dtype=g.dtype)
            terms.append((whole(g) * vector).sum())
        sum(terms).backward()  # type: ignore[union-attr]

    for change in (penalty, sharded_penalty, product):
        of_each(models, change)
        found.add(change.__name__, compare_gradients(*models))
    return found.errors


# --- training


def training_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Accumulation, clipping, freezing, zeroing, conversions, checkpoints, anomaly mode."""
    found = Findings()
    models = pair(mesh, sp)
    of_each(models, lambda m: m.zero_grad())
    for seed in range(3):
        of_each(models, lambda m, seed=seed: loss_of(m, seed).backward())
    found.add("accumulated", compare_gradients(*models))
    norms = of_each(models, lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1))
    found.add("norm", error(full(norms[0]), full(norms[1])))
    found.add("clipped", compare_gradients(*models))
    optimizers = of_each(models, lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3))
    for optimizer in optimizers:
        optimizer.step()
    found.add("stepped", compare_parameters(*models))
    for turn in range(3):
        for model in models:
            for i, p in enumerate(model.parameters()):
                p.requires_grad_((i + turn) % 3 != 0)
        found.add(f"frozen, {turn}", alike(*models, turn))
    of_each(models, lambda m: m.requires_grad_(True))
    alike(*models)
    for model in models:
        model.zero_grad(set_to_none=False)
        loss_of(model).backward()
        loss_of(model, 4).backward()
    found.add("set to zero", compare_gradients(*models))
    with torch.autograd.set_detect_anomaly(True):
        found.add("anomaly mode", alike(*models))
    of_each(models, lambda m: m.layers[0].up.float().double())
    found.add("one layer converted", twice(models))
    for model in models:
        for p in model.norm.parameters():
            p.data = p.data.float().double()
    found.add("a norm converted through data", twice(models))
    of_each(models, lambda m: m.float().double())
    found.add("converted", twice(models))
    for assign in (False, True):
        other = built(7 + assign)
        models[1].load_state_dict(other.state_dict(), assign=assign)
        found.add(f"loaded, assign={assign}", twice((other, models[1])))
    return found.errors


DATA: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda p: 1.1 * whole(p.detach()),
    "a part of something": lambda p: torch.stack([whole(p.detach())] * 2)[1] * 0.9,
    "centred": lambda p: p.data - 0.5 * p.data.mean(0, keepdim=True),
    "turned": lambda p: p.data.flip(0),
    "of two": lambda p: p.data + p.detach() * 0.1,
}


def data_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """``p.data`` may be given what has another placement, or none."""
    models, found = pair(mesh, sp), Findings()
    for name, change in DATA.items():
        for p in (p for model in models for p in model.parameters()):
            p.data = change(p)
        found.add(name, twice(models))
    for model in models:
        rows = torch.cat([0.9 * whole(p.detach()).flatten() for p in model.parameters()])
        nn.utils.vector_to_parameters(rows, model.parameters())
    found.add("a vector", twice(models))
    return found.errors


def copies_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """A deep copy and a pickle have weights of their own."""
    found = Findings()
    reference, model = pair(mesh, sp)
    other = copy.deepcopy(reference)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.3)
    for title, twin in (
        ("deep copy", copy.deepcopy(model)),
        ("pickle", pickle.loads(pickle.dumps(model))),
    ):
        with torch.no_grad():
            for p in twin.parameters():
                p.mul_(1.3)
        found.add(title, twice((other, twin)))
        found.add(f"the original of the {title}", twice((reference, model)))
    for m in (reference, model):  # by a parameter of the user's, which tpplan did not make
        m.head.weight = nn.Parameter(m.head.weight.detach() * 1.5)
    found.add("before", twice((reference, model)))
    models, optimizers = zip(*map(_with_optimizer, (reference, model)), strict=True)
    grads = [p.grad for m in models for p in (*m.parameters(), m.head.weight)]
    found.add("no gradients are copied", same(grads == [None] * len(grads)))
    for m in models:
        weighed(m(ids(7))).backward()
    found.add("gradients of the copy", compare_gradients(*models))
    for optimizer in optimizers:
        optimizer.step()
    found.add("the copied optimizer", compare_parameters(*models))
    found.add("of the original", compare_parameters(reference, model))
    return found.errors


def _with_optimizer(model: Any) -> tuple[Any, torch.optim.Optimizer]:
    """Copies of a model and an optimizer that has a state, made while there are gradients."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
    optimizer.step()
    return copy.deepcopy((model, optimizer))


# --- hooks and attributes


def hooks_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """What users put on parameters before they are sharded."""
    found = Findings()
    reference, handles = built(), []
    model = built()
    for m in (reference, model):
        m.head.weight = m.tok.weight
        m.tok.weight.note = "kept"
        m(ids(1)).sum().backward()
        handles.append(m.tok.weight.register_hook(lambda g: g * 3))
        for p in m.layers[0].parameters():
            p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * 2))
    sharded(model, mesh, sp, copied=False)
    found.add("gradients", compare_gradients(reference, model))
    found.add("hooks", alike(reference, model))
    for m in (reference, model):
        m.float().double()
    found.add("hooks, after a conversion", twice((reference, model)))
    found.add("attributes", same(model.tok.weight.note == "kept"))
    for handle in handles:
        handle.remove()
    found.add("hooks, removed", twice((reference, model)))
    return found.errors


# --- FSDP2


def fsdp_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """``fully_shard`` after a first forward, and a checkpoint of the unsharded model."""
    found = Findings()
    reference, model = pair(mesh["tp"], sp)
    old = [weakref.ref(p) for p in model.parameters()]
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    with pytest.raises(RuntimeError, match=r"layers\.0\.up\.weight is sharded by FSDP"):
        model.layers[0].up(torch.zeros(1, 1, 16).double())

    def compared(whole_model: Any) -> Errors:
        losses = []
        for m in (whole_model, model):
            m.zero_grad()
            loss = loss_of(m)
            loss.backward()
            losses.append(loss.detach())
        expected, got = (
            {n: None if p.grad is None else full(p.grad) for n, p in m.named_parameters()}
            for m in (whole_model, model)
        )
        return {"loss": error(*losses), **gradient_errors(expected, got)}

    found.add("first", compared(reference))
    found.add("second", compared(reference))
    found.add("the old ones are let go", same(not any(p() is not None for p in old)))
    other = built(7)
    model.load_state_dict(other.state_dict())
    found.add("loaded", compared(other))
    return found.errors


class Scaled(nn.Module):
    """A parameter of no dimensions, as a temperature is."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.rand(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu()) * self.scale.exp()


SCALED = {"tpplan": 1, "rules": {"up": "colwise", "down": "rowwise", "scale": "replicate"}}


def no_dimensions_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Full state dicts with a parameter of no dimensions, by torch's ways."""
    generator = torch.Generator().manual_seed(1)
    found, x = Findings(), torch.randn(2, 6, 8, generator=generator, dtype=torch.float64)
    reference = Scaled().double()
    with torch.no_grad():
        for p in reference.parameters():
            p.copy_(torch.rand(p.shape, generator=generator, dtype=p.dtype))
    for way in ("load_state_dict", "set_model_state_dict"):
        model = tpplan.parallelize(Scaled().double(), SCALED, mesh, False, inputs=x)
        if way == "load_state_dict":
            model.load_state_dict(reference.state_dict())
        else:
            options = StateDictOptions(full_state_dict=True)
            set_model_state_dict(model, reference.state_dict(), options=options)
        found.add(f"{way}, values", compare_parameters(reference, model))
        for m in (reference, model):
            m.zero_grad()
            m(x).pow(2).sum().backward()
        found.add(f"{way}, gradients", compare_gradients(reference, model))
    return found.errors


JOBS = {
    "no dimensions": no_dimensions_job,
    "in place of a parameter": in_place_job,
    "computed parameters": computed_job,
    "changed before the backward": versions_job,
    "gradients of gradients": penalty_job,
    "training": training_job,
    "copies": copies_job,
    "data": data_job,
    "hooks": hooks_job,
}


@SIZES
@MODES
@pytest.mark.parametrize("event", JOBS)
def test_life_of_parameters(ranks: Ranks, tp: int, sp: bool, event: str) -> None:
    assert not beyond(ranks.run(tp, JOBS[event], sp), TIGHT)


@MODES
def test_fsdp_after_a_forward(ranks: Ranks, sp: bool) -> None:
    assert not beyond(ranks.run("2x2", fsdp_job, sp), TIGHT)
