"""Models with fused kernels against unsharded ones: on gloo ranks, alone, compiled, recomputed.

Where there is a GPU the ranks share it, and kernels are compiled for it.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import tpplan
from benchmarks import zoo
from tests.compare import Errors, Findings, beyond, same, step
from tests.models import token_ids
from tests.ranks import DEVICE, Ranks
from tests.rewrite import MODES, SIZES
from tpplan.kernels import cross_entropy, embedding, gated, gelu, norm, transition
from tpplan.kernels.launch import interpreted
from tpplan.simulate import Recorder

# norms of both kinds, gated products of two layers and of one, GeLUs with a bias
NAMES = ["phi3", "gpt2", "llama", "gpt_neox"]


def whole(name: str) -> Any:
    return zoo.makers()[name]().to(DEVICE)


def sharded(name: str, mesh: DeviceMesh | None, sp: bool, kernels: str = "triton") -> Any:
    model = zoo.makers()[name]()
    model = tpplan.parallelize(
        model,
        "auto",
        mesh,
        sequence_parallel=sp,
        kernels=kernels,
        inputs=zoo.example(model),
        prove=False,
    )
    return model.to(DEVICE)


def tokens(length: int, seed: int) -> torch.Tensor:
    return token_ids(2, length, seed).to(DEVICE)


class Launches:
    """Counts the kernels that are launched while it is active, by room."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def __enter__(self) -> Launches:
        rooms = (norm, gelu, gated, embedding, transition, cross_entropy)
        self.before = {room: room.launch for room in rooms}
        for room, launch in self.before.items():
            room.launch = functools.partial(self._counted, room.__name__, launch)  # type: ignore[assignment]
        return self

    def _counted(self, name: str, launch: Any, *args: Any) -> Any:
        key = name.rpartition(".")[2]
        self.counts[key] = self.counts.get(key, 0) + 1
        return launch(*args)

    def __exit__(self, *_: Any) -> None:
        for room, launch in self.before.items():
            room.launch = launch  # type: ignore[assignment]


def parity_job(mesh: DeviceMesh, name: str, sp: bool) -> Errors:
    """Outputs and gradients, twice; a deep copy; what the state dict is called."""
    found = Findings()
    reference, model = whole(name), sharded(name, mesh, sp)
    found.add("names", same(list(reference.state_dict()) == list(model.state_dict())))
    with Launches() as launches:
        run = functools.partial(logits_of, ids=tokens(13, 1))
        found.add("logits", step(reference, model, run))
        model = copy.deepcopy(model)
        run = functools.partial(loss_of, ids=tokens(14, 2))
        found.add("loss", step(reference, model, run))
    expected = {"norm", "embedding", "cross_entropy", "transition"}
    expected |= {"gelu"} if name.startswith("gpt") else {"gated"}
    found.add(f"{launches.counts}", same(set(launches.counts) == expected))
    return found.errors


def logits_of(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    logits = model(input_ids=ids).logits
    factors = torch.arange(logits.numel(), device=DEVICE).cos().view_as(logits)
    return {"logits": logits, "objective": (logits * factors).sum()}


def loss_of(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    loss = model(input_ids=ids, labels=ids).loss
    return {"loss": loss, "objective": 100 * loss}


def collectives_job(mesh: DeviceMesh, name: str, sp: bool) -> list[Any]:
    """What is sent, with kernels and without."""
    sent = []
    for kernels in ("triton", "torch"):
        model = sharded(name, mesh, sp, kernels)
        model(input_ids=tokens(13, 1)).logits.sum().backward()
        model.zero_grad()
        with Recorder() as recorder:
            model(input_ids=tokens(13, 1)).logits.sum().backward()
        sent.append([(c.kind, c.module, c.shape, c.reason) for c in recorder.collectives])
    return sent


def compile_job(mesh: DeviceMesh, name: str, sp: bool) -> Errors:
    """One graph, the same numbers, gradients included."""
    found = Findings()
    reference, twin = whole(name), sharded(name, mesh, sp)
    ids = tokens(12, 3)
    twin(input_ids=ids)  # the comparison of the first batch is not compiled
    twin.compile(fullgraph=True, backend="aot_eager")
    found.add("step", step(reference, twin, functools.partial(logits_of, ids=ids)))
    return found.errors


@SIZES
@MODES
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.turns(48)
def test_parity(ranks: Ranks, name: str, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, parity_job, name, sp, device=DEVICE))


@MODES
def test_no_collective_more(ranks: Ranks, sp: bool) -> None:
    for with_kernels, without in ranks.run(2, collectives_job, "llama", sp, device=DEVICE):
        assert with_kernels == without


@pytest.mark.turns(24)
@pytest.mark.parametrize(("name", "sp"), [("llama", True), ("gpt2", False)])
def test_one_graph(ranks: Ranks, name: str, sp: bool) -> None:
    assert not beyond(ranks.run(2, compile_job, name, sp, device=DEVICE))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.turns(24)
def test_a_single_process(name: str) -> None:
    """At tp 1 kernels are swapped and nothing is sharded."""
    reference, model = whole(name), sharded(name, None, False)
    run = functools.partial(logits_of, ids=tokens(7, 1))
    with Launches() as launches:
        assert not beyond([step(reference, model, run)])
    assert launches.counts["norm"] > 0
    assert list(reference.state_dict()) == list(model.state_dict())
    assert not beyond([step(reference, copy.deepcopy(model), run)])
    with Launches() as launches:
        sharded(name, None, False, "torch")(input_ids=tokens(7, 1))
    assert not launches.counts


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_recomputed(name: str) -> None:
    reference, model = whole(name), sharded(name, None, False)
    for path, layer in model.named_modules():
        if path.rpartition(".")[2].isdigit():
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    model.config.use_cache = reference.config.use_cache = False
    run = functools.partial(logits_of, ids=tokens(7, 1))
    assert not beyond([step(reference, model, run)])


class SequenceFirst(nn.Module):
    """Residual layers on a stream of shape (sequence, batch, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 16)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2)
        )
        self.head = nn.Linear(16, 24)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for first, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(first(x))
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("length", [8, 7])
@pytest.mark.turns(12)
def test_the_sequence_first(length: int) -> None:
    rules = {"embed": "vocab", "norms.*": "sequence_parallel", "head": "vocab"}
    rules |= {"layers.*.0": "colwise", "layers.*.2": "rowwise"}
    plan = tpplan.load_plan({"tpplan": 1, "sequence_dim": 0, "rules": rules})
    ids = torch.randint(24, (length, 3), generator=torch.Generator().manual_seed(length))
    for kernels in ("torch", "triton") if interpreted() else ("torch",):
        result = tpplan.verify(SequenceFirst, plan, 2, kernels=kernels, inputs=(ids,))
        assert result.gradient_error <= 1e-5


def test_autocast() -> None:
    """As in the model itself: norms in float32, products in bfloat16."""
    reference, model = whole("llama"), sharded("llama", None, False)
    ids = tokens(7, 1)
    with torch.autocast(DEVICE, torch.bfloat16):
        expected, found = (m(input_ids=ids).logits for m in (reference, model))
    assert found.dtype == expected.dtype
    assert float((found - expected).abs().max() / expected.abs().max()) < 2**-5
