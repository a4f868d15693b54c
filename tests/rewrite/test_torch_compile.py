"""torch.compile of a parallelized model: one graph, the same numbers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import tpplan
from tests.compare import Errors, Findings, beyond, error, full, step
from tests.models import hf, randomize, token_ids
from tests.ranks import Ranks
from tpplan.comm.tangents import living

pytestmark = pytest.mark.turns(32)


def compiled(mesh: DeviceMesh, sequence_parallel: bool, warm: bool) -> Errors:
    reference = hf()
    model = copy.deepcopy(reference)
    tpplan.parallelize(model, "llama.yaml", mesh, sequence_parallel=sequence_parallel, prove=False)
    ids = token_ids(2, 16, 0)
    if warm:
        model(ids)
    torch._dynamo.reset()
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)

    def run(m: torch.nn.Module) -> dict[str, torch.Tensor]:
        out = (whole if m is model else m)(ids, labels=ids)
        return {"objective": out.loss, "logits": out.logits}

    return step(reference, model, run)


@pytest.mark.parametrize(
    ("sequence_parallel", "warm"),
    [
        # every day: one line that TorchDynamo cannot trace breaks all of them
        pytest.param(True, False, id="TP+SP-first call", marks=pytest.mark.turns(12)),
        pytest.param(True, True, id="TP+SP-after an eager call", marks=pytest.mark.turns(24)),
        pytest.param(False, False, id="TP-first call", marks=pytest.mark.turns(24)),
        pytest.param(False, True, id="TP-after an eager call", marks=pytest.mark.turns(24)),
    ],
)
def test_fullgraph(ranks: Ranks, sequence_parallel: bool, warm: bool) -> None:
    assert beyond(ranks.run(2, compiled, sequence_parallel, warm)) == {}


def in_turn(mesh: DeviceMesh) -> Errors:
    """One model after the other on the same part of a mesh, which is another object each time."""
    found, ids = Findings(), token_ids(2, 16, 0)
    for turn in ("first", "second"):
        torch._dynamo.reset()
        reference = hf()
        model = copy.deepcopy(reference)
        tpplan.parallelize(model, "llama.yaml", mesh["tp"], sequence_parallel=True, prove=False)
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")

        def run(m: torch.nn.Module) -> dict[str, torch.Tensor]:
            out = m(ids, labels=ids)
            return {"objective": out.loss, "logits": out.logits}

        found.add(turn, step(reference, model, run, plain=False))
    return found.errors


@pytest.mark.turns(6)
def test_models_in_turn(ranks: Ranks) -> None:
    assert beyond(ranks.run("2x2", in_turn)) == {}


def exported(mesh: DeviceMesh, sequence_parallel: bool) -> Errors:
    """What ``torch.export`` makes of each rank, run in the place of the model."""
    reference = hf(use_cache=False)
    model = copy.deepcopy(reference)
    tpplan.parallelize(model, "llama.yaml", mesh, sequence_parallel=sequence_parallel, prove=False)
    ids, others = token_ids(2, 16, 0), token_ids(2, 16, 1)
    if sequence_parallel:
        with pytest.raises(RuntimeError, match="without strict=True records no collec"):
            torch.export.export(model, (ids,))
    with pytest.raises(RuntimeError, match=r"torch\.jit records no collectives"):
        torch.jit.trace(model, ids, check_trace=False)
    program = torch.export.export(model, (ids,), strict=sequence_parallel).module()
    with torch.no_grad():
        return {"logits": error(reference(others).logits, full(program(others).logits))}


@pytest.mark.turns(24)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["TP", "TP+SP"])
def test_exported(ranks: Ranks, sequence_parallel: bool) -> None:
    assert beyond(ranks.run(2, exported, sequence_parallel)) == {}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


class Told(nn.Module):
    """Gives what was after each layer, and the logits, beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 16)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        states = [self.embed(ids)]
        for layer in self.layers:
            states.append(layer(states[-1]))
        logits = self.head(self.norm(states[-1]))
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten()), logits, states


def unread(mesh: DeviceMesh, output: str) -> Errors:
    """Sharded results of a graph that no loss reads, and that one does."""
    plan = {
        "tpplan": 1,
        "rules": {
            "layers.*.norm": "sequence_parallel",
            "norm": "sequence_parallel",
            "layers.*.up": "colwise",
            "layers.*.down": "rowwise",
            "embed": "vocab",
            "head": {"style": "vocab", "output": output},
        },
    }
    living.clear()  # what earlier tests ran may still be there, on other meshes
    reference = Told()
    randomize(reference, 0, 0.5)
    model = tpplan.parallelize(
        copy.deepcopy(reference), plan, mesh, sequence_parallel=True, inputs=token_ids(2, 8, 0, 16)
    )
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = Findings()
    for length in (9, 12):  # of 9 rows the last of four ranks has none
        ids = token_ids(2, length, length, 16)
        for read in ((), (2,), (1, 2)):

            def run(
                m: nn.Module, ids: torch.Tensor = ids, read: tuple[int, ...] = read
            ) -> dict[str, torch.Tensor]:
                loss, logits, states = (compiled if m is model else m)(ids)
                more = [states[i].square().mean() for i in read]
                return {"objective": loss + sum(more), "loss": loss, "logits": logits}

            found.add(f"length {length}, {read}", step(reference, model, run, plain=False))
    return found.errors


@pytest.mark.turns(24)
@pytest.mark.parametrize("output", ["gather", "shard"])
@pytest.mark.parametrize("tp", [2, 4])
def test_results_that_nothing_reads(ranks: Ranks, tp: int, output: str) -> None:
    """Where nothing reads a result its gradient is plain zeros (pytorch#172556)."""
    assert beyond(ranks.run(tp, unread, output)) == {}


def given_the_stream(mesh: DeviceMesh) -> Errors:
    """Layers that are called with the stream as a DTensor of the user's, as a stage's may be."""
    reference = nn.Sequential(Layer(), Layer())
    randomize(reference, 0, 0.5)
    rules = {"*.norm": "sequence_parallel", "*.up": "colwise", "*.down": "rowwise"}
    model = tpplan.parallelize(
        copy.deepcopy(reference),
        {"tpplan": 1, "rules": rules},
        mesh,
        sequence_parallel=True,
        inputs=torch.zeros(1, 8, 8),
    )
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = Findings()
    for length in (8, 9):
        generator = torch.Generator().manual_seed(length)
        whole = torch.randn(2, length, 8, generator=generator).requires_grad_()
        sharded = distribute_tensor(whole.detach(), mesh, [Shard(1)]).requires_grad_()

        def run(
            m: nn.Module, whole: torch.Tensor = whole, sharded: DTensor = sharded
        ) -> dict[str, torch.Tensor]:
            out = compiled(sharded).full_tensor() if m is model else m(whole)
            return {"objective": out.square().mean(), "out": out}

        found.add(f"length {length}", step(reference, model, run))
        assert whole.grad is not None
        assert sharded.grad is not None
        found.add(f"length {length}, input", {"gradient": error(whole.grad, sharded.grad)})
    return found.errors


@pytest.mark.turns(24)
@pytest.mark.parametrize("tp", [2, 4])
def test_given_the_stream(ranks: Ranks, tp: int) -> None:
    assert beyond(ranks.run(tp, given_the_stream)) == {}
