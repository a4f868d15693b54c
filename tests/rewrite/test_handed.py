"""What leaves a model of which a rank has a part: keys and values that it is given again."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import tpplan
from tests.compare import Errors, Findings, beyond, compare_gradients, error, full, joined, same
from tests.handed import BLOCKS, HEADS, VOCABULARY, Block, Mixer, Model, Pair, plan
from tests.ranks import Ranks
from tpplan.places import tensors_in


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
                    loss = loss + joined(t * share).sum()
            loss.backward()
        found.add(f"length {length}", compare_gradients(reference, model))
    return found.errors


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


@pytest.mark.turns(24)
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


@dataclasses.dataclass
class Record:
    k: torch.Tensor
    v: torch.Tensor


class Recording(Mixer):
    """Its cache is a dataclass."""

    def forward(self, x: torch.Tensor, past: Any) -> Any:
        out, cache, weights = super().forward(x, None if past is None else (past.k, past.v))
        return out, Record(*cache), weights


class Writing(Mixer):
    """Writes into the mapping that it is given, and gives that."""

    def forward(self, x: torch.Tensor, past: Any) -> Any:
        out, (k, v), weights = super().forward(x, (past["k"], past["v"]) if past else None)
        past.update(k=k, v=v)
        return out, past, weights


class Stacking(Model):
    """Makes one tensor of what its blocks give."""

    def forward(self, ids: torch.Tensor, past: Any = None) -> dict[str, Any]:
        out = super().forward(ids, None if past is None else list(past.transpose(0, 1)))
        return {**out, "past": torch.stack([torch.stack(one) for one in out["past"]], 1)}


WAYS: dict[str, type[Mixer] | None] = {"dataclass": Recording, "written": Writing, "stacked": None}


def model_of(way: str) -> Model:
    model = (Stacking if way == "stacked" else Model)().double()
    kind = WAYS[way]
    for block in model.blocks if kind else ():
        assert isinstance(block, Block) and kind is not None
        block.mixer.__class__ = kind
    return model


def kept(mesh: DeviceMesh, sequence_parallel: bool) -> Errors:
    """Some steps, with what was returned or, of what is written to, with the caller's own."""
    found = Findings()
    for way in WAYS:
        torch.manual_seed(0)
        reference = model_of(way)
        model = copy.deepcopy(reference)
        example: dict[str, Any] = {"ids": ids(8)}
        example |= {"past": [{} for _ in range(BLOCKS)] if way == "written" else None}
        tpplan.parallelize(model, plan(sequence_parallel), mesh, inputs=example)
        losses = dict.fromkeys((reference, model), torch.zeros((), dtype=torch.float64))
        own: dict[nn.Module, Any] = {
            m: [{} for _ in range(BLOCKS)] if way == "written" else None for m in losses
        }
        for length in (6, 1, 3):
            for m in losses:
                out = m(ids(length), own[m])
                own[m] = own[m] if way == "written" else out["past"]
                losses[m] = losses[m] + joined(out["logits"]).square().sum()
            found.add(f"{way}: a loss at {length}", error(losses[reference], losses[model]))
        for loss in losses.values():
            loss.backward()
        found.add(way, compare_gradients(reference, model))
        (due, got) = (next(iter(tensors_in(past)))[1] for past in own.values())
        found.add(f"{way}: a cache", error(due, full(got)))
        found.add(f"{way}: a rank has its heads", same(isinstance(got, DTensor)))
    return found.errors


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["TP", "TP+SP"])
def test_caches_of_other_kinds(ranks: Ranks, sequence_parallel: bool) -> None:
    assert beyond(ranks.run(2, kept, sequence_parallel), 1e-12) == {}
