"""Sharded models over many lengths: compiled, in as few graphs as unsharded ones; recomputed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from tests.compare import Errors, beyond, compare_gradients, error, joined, same, step
from tests.models import hf, recomputed, token_ids
from tests.ranks import Ranks

# of the first alone a graph is made for one length; tp divides some of the others
LENGTHS = 16, 18, 24, 32, 17, 33, 40, 7, 64, 5
GRAPHS = 2  # what the unsharded model takes


def over_lengths(
    reference: nn.Module, model: nn.Module, run: Callable[..., Any], lengths: tuple[int, ...]
) -> Errors:
    """The errors of ``model`` at each length; ``run`` calls what was compiled of it."""
    errors: Errors = {}
    for length in lengths:
        ids = token_ids(2, length, length)

        def outputs(m: nn.Module, ids: torch.Tensor = ids) -> dict[str, torch.Tensor]:
            out = (run if m is model else m)(ids, labels=ids)
            return {"objective": out.loss, "loss": out.loss, "logits": out.logits}

        found = step(reference, model, outputs, plain=False)
        errors |= {f"{name} at length {length}": e for name, e in found.items()}
    return errors


def sharded(mesh: DeviceMesh, sequence_parallel: bool) -> tuple[Any, Any]:
    torch._dynamo.reset()
    counters.clear()
    reference = hf(use_cache=False)
    model = copy.deepcopy(reference)
    tpplan.parallelize(model, "llama.yaml", mesh, sequence_parallel=sequence_parallel, prove=False)
    return reference, model


def graphs() -> int:
    """How many were made since."""
    return int(counters["stats"]["unique_graphs"])


def whole(mesh: DeviceMesh, sequence_parallel: bool, dynamic: bool | None) -> Errors:
    reference, model = sharded(mesh, sequence_parallel)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    errors = over_lengths(reference, model, compiled, LENGTHS)
    return {**errors, "graphs": same(graphs() <= (1 if dynamic else GRAPHS))}


@pytest.mark.turns(32)
@pytest.mark.parametrize("dynamic", [None, True], ids=["found out", "dynamic=True"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["TP", "TP+SP"])
def test_model(ranks: Ranks, sequence_parallel: bool, dynamic: bool | None) -> None:
    assert beyond(ranks.run(2, whole, sequence_parallel, dynamic)) == {}


def layers(mesh: DeviceMesh, sequence_parallel: bool, backend: str) -> Errors:
    """Each layer compiled in place: one graph serves them all."""
    reference, model = sharded(mesh, sequence_parallel)
    for layer in model.model.layers:
        layer.compile(backend=backend, fullgraph=True)
    errors = over_lengths(reference, model, model, LENGTHS)
    return {**errors, "graphs": same(graphs() <= GRAPHS)}


@pytest.mark.turns(32)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["TP", "TP+SP"])
def test_layers(ranks: Ranks, sequence_parallel: bool, backend: str) -> None:
    assert beyond(ranks.run(2, layers, sequence_parallel, backend)) == {}


def again(mesh: DeviceMesh, sequence_parallel: bool) -> Errors:
    reference, model = sharded(mesh, sequence_parallel)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    errors = over_lengths(reference, model, model, (16,) * 4)
    return {**errors, "graphs": same(graphs() == 1)}


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["TP", "TP+SP"])
def test_called_again(ranks: Ranks, sequence_parallel: bool) -> None:
    """What a call leaves behind is nothing that the next one's graph is guarded by."""
    assert beyond(ranks.run(2, again, sequence_parallel)) == {}


def close(mesh: DeviceMesh, lengths: tuple[int, ...]) -> Errors:
    """Each layer compiled in place: of the next length a rank may have as many rows."""
    reference, model = sharded(mesh, sequence_parallel=True)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    return over_lengths(reference, model, model, lengths)


@pytest.mark.turns(24)
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("lengths", [(15, 16, 14), (16, 15, 17)])
def test_lengths_of_as_many_rows(ranks: Ranks, lengths: tuple[int, ...], tp: int) -> None:
    assert beyond(ranks.run(tp, close, lengths)) == {}


class Between(nn.Module):
    """Code of its own on the stream between its layers, which somebody compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
            for _ in range(2)
        )
        self.last = nn.LayerNorm(16)
        self.code = self.mixed

    def mixed(self, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        return x * 0.5 + torch.tanh(first)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = first = self.table(ids)
        for layer in self.layers:
            x = self.code(layer(x), first)
        out: torch.Tensor = self.last(x)
        return out


BETWEEN = {
    "table": "vocab",
    "layers.*.0": "sequence_parallel",
    "layers.*.1": "colwise",
    "layers.*.3": "rowwise",
    "last": "sequence_parallel",
}


def code_between(mesh: DeviceMesh, lengths: tuple[int, ...], trained: bool) -> Errors:
    """A graph of elementwise code asks for no length: it is guarded all the same."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    reference = Between().double()
    model = copy.deepcopy(reference)
    plan = {"tpplan": 1, "sequence_parallel": True, "rules": BETWEEN}
    tpplan.parallelize(model, plan, mesh)
    model.code = torch.compile(model.mixed, backend="aot_eager", fullgraph=True)
    errors: Errors = {}
    for length in lengths:
        ids = token_ids(2, length, length) % 32
        with torch.set_grad_enabled(trained):
            due, got = reference(ids), joined(model(ids))
        errors[f"length {length}"] = error(due, got)
        for out in (due, got) if trained else ():
            out.square().sum().backward()
    return errors | (compare_gradients(reference, model) if trained else {})


@pytest.mark.turns(48)
@pytest.mark.parametrize("trained", [False, True], ids=["evaluated", "trained"])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("lengths", [(7, 8, 6), (16, 15, 13, 5)])
def test_code_between(ranks: Ranks, lengths: tuple[int, ...], tp: int, trained: bool) -> None:
    assert beyond(ranks.run(tp, code_between, lengths, trained), 1e-12) == {}


def beyond_the_limit(mesh: DeviceMesh) -> str:
    """Layers compiled in place, and more lengths than there may be graphs for."""
    _, model = sharded(mesh, sequence_parallel=True)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    with torch._dynamo.config.patch(recompile_limit=2):
        for length in (8, 16, 1):
            try:
                model(token_ids(2, length, 0))
            except RuntimeError as error:
                return str(error)
    return "never refused"


@pytest.mark.turns(48)
def test_more_lengths_than_graphs(ranks: Ranks) -> None:
    """A rank that goes on without a graph would wait for another that still runs one."""
    for message in ranks.run(2, beyond_the_limit):
        assert "set torch._dynamo.config.recompile_limit higher" in message


def checkpointed(mesh: DeviceMesh, selective: bool) -> Errors:
    """Layers that backward recomputes, all of them or but for their products."""
    reference, model = sharded(mesh, sequence_parallel=True)
    recomputed(model, selective, preserve_rng_state=False)
    return over_lengths(reference, model, model, LENGTHS[-4:])


@pytest.mark.parametrize("selective", [False, True], ids=["all", "selective"])
@pytest.mark.turns(48)
def test_checkpointed(ranks: Ranks, selective: bool) -> None:
    assert beyond(ranks.run(2, checkpointed, selective)) == {}
