"""What leaves a model of which a rank has a part: keys and values that it is given again."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import tpplan
from tests.compare import Errors, Findings, beyond, compare_gradients, error, full, same
from tests.handed import HEADS, VOCABULARY, Model, Pair, plan
from tests.ranks import Ranks


def pair(
    mesh: DeviceMesh, sequence_parallel: bool, *args: Any, **options: Any
) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    reference = Model(*args, **options).double()
    model = copy.deepcopy(reference)
    tpplan.parallelize(model, plan(sequence_parallel), mesh)
    return reference, model


def ids(length: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (2, length), generator=generator)


def whole(past: list[Pair]) -> torch.Tensor:
    return torch.stack([full(x) for kept in past for x in kept])


def decoded(mesh: DeviceMesh, sequence_parallel: bool) -> Errors:
    """A prompt, some steps of one token, beams that change places, a cache cut short."""
    reference, model = pair(mesh, sequence_parallel)
    found = Findings()
    kept: dict[nn.Module, Any] = {reference: None, model: None}

    def step(case: str, length: int) -> None:
        given = ids(length, seed=len(found.errors))
        due, got = (m(given, kept[m]) for m in (reference, model))
        found.add(f"{case}: logits", error(due["logits"], full(got["logits"])))
        found.add(f"{case}: cache", error(whole(due["past"]), whole(got["past"])))
        kept.update({reference: due["past"], model: got["past"]})

    def change(function: Any) -> None:
        for m, past in kept.items():
            kept[m] = [tuple(map(function, one)) for one in past]

    with torch.no_grad():
        step("prompt", 6)
        step("one token", 1)
        first = kept[model][0][0]
        held = full(first).shape[1] == HEADS and first.to_local().shape[1] == HEADS // mesh.size()
        found.add("a rank has its heads", same(isinstance(first, DTensor) and held))
        change(lambda x: x.index_select(0, torch.tensor([1, 0])))
        step("other beams", 1)
        change(lambda x: x[:, :, :5])
        step("cut short", 3)
    return found.errors


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["TP", "TP+SP"])
def test_decoding(ranks: Ranks, sequence_parallel: bool, tp: int) -> None:
    assert beyond(ranks.run(tp, decoded, sequence_parallel), 1e-12) == {}


def trained(mesh: DeviceMesh, sequence_parallel: bool) -> Errors:
    """A loss on all that leaves the model, at two lengths, through a step that is given a cache."""
    reference, model = pair(mesh, sequence_parallel, weights=True)
    found = Findings()
    for length in (8, 5):
        for m in (reference, model):
            first = m(ids(length))
            second = m(ids(3, 7), first["past"])
            generator = torch.Generator().manual_seed(length)
            loss = torch.zeros((), dtype=torch.float64)
            for out in (first, second):
                made = [out["logits"], *out["weights"], *(x for kept in out["past"] for x in kept)]
                for t in made:
                    share = torch.randn(t.shape, generator=generator, dtype=torch.float64)
                    loss = loss + full_with_grad(t * share).sum()
            loss.backward()
        found.add(f"length {length}", compare_gradients(reference, model))
    return found.errors


def full_with_grad(t: torch.Tensor) -> torch.Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["TP", "TP+SP"])
def test_gradients(ranks: Ranks, sequence_parallel: bool) -> None:
    assert beyond(ranks.run(2, trained, sequence_parallel), 1e-12) == {}


def compiled(mesh: DeviceMesh, sequence_parallel: bool) -> Errors:
    torch._dynamo.reset()
    reference, model = pair(mesh, sequence_parallel)
    model.compile(backend="aot_eager")
    found, past = Findings(), {reference: None, model: None}
    with torch.no_grad():
        for length in (6, 2, 3):
            due, got = (m(ids(length), past[m]) for m in (reference, model))
            past = {reference: due["past"], model: got["past"]}
            found.add(f"{length}: logits", error(due["logits"], full(got["logits"])))
            found.add(f"{length}: cache", error(whole(due["past"]), whole(got["past"])))
    return found.errors


@pytest.mark.turns(8)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["TP", "TP+SP"])
def test_compiled(ranks: Ranks, sequence_parallel: bool) -> None:
    assert beyond(ranks.run(2, compiled, sequence_parallel), 1e-12) == {}


def test_shared_heads_are_refused() -> None:
    """Two heads of keys on four ranks: no dimension of what they give is cut evenly."""
    with pytest.raises(tpplan.PlanError, match="equal parts") as caught:
        tpplan.check(Model(shared=2), plan(False), tp=4, inputs=ids(8))
    (found,) = caught.value.diagnostics
    assert found.position is not None and "mixer.{q,k,v}" in str(found.position.text)
    tpplan.check(Model(shared=2), plan(False), tp=2, inputs=ids(8))
