"""What modules keep as attributes in their forward, and the losses that users make of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import tpplan
from tests.compare import Errors, Findings, beyond, compare_gradients, error, same
from tests.ranks import Ranks
from tests.rewrite import MODES, SIZES

WIDTH, INNER, EXPERTS = 16, 32, 4


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / 4)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, odds: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for e in range(EXPERTS):
            token, place = (chosen == e).nonzero(as_tuple=True)
            made = F.gelu(x[token] @ self.up[e]) @ self.down[e]
            out = out.index_add(0, token, made * odds[token, place, None])
        return out


class Routed(nn.Module):
    """Keeps, in training, how evenly its experts are used."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, EXPERTS), Experts()
        self.balance: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, WIDTH)
        odds = self.gate(flat).softmax(-1)
        if self.training:
            self.balance = odds.mean(0).square().sum()
        best, chosen = odds.topk(2, -1)
        return self.experts(flat, chosen, best).view(x.shape)  # type: ignore[no-any-return]


class Dense(nn.Module):
    """Experts in parameters of its own, all of which run."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / 4)
        self.balance: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        odds = self.gate(x).softmax(-1)
        self.balance = odds.mean((0, 1)).square().sum()
        inner = F.gelu(torch.einsum("bsd,edf->bsef", x, self.up))
        return torch.einsum("bsef,efd,bse->bsd", inner, self.down, odds)


class Sparse(nn.Module):
    """Keeps its columns, and how large they are."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.balance: torch.Tensor | None = None
        self.columns: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.up(x))
        self.balance, self.columns = inner.abs().mean(), [inner]
        return self.down(inner)  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, mlp: Callable[[], nn.Module], keeps: bool) -> None:
        super().__init__()
        self.norm, self.mlp, self.keeps = nn.LayerNorm(WIDTH), mlp(), keeps
        self.balance: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mlp(self.norm(x))
        if self.keeps:
            self.balance = x
        return x


class Keeping(nn.Module):
    """``adds``: whether it gives, in training, the loss of what its layers keep by itself."""

    def __init__(
        self, mlp: Callable[[], nn.Module], keeps: bool = False, adds: bool = False
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(mlp, keeps) for _ in range(2))
        self.adds, self.recompute = adds, False

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        if self.adds and self.training:
            return x, sum(layer.mlp.balance for layer in self.layers)  # type: ignore[union-attr, misc]
        return x


RULES: dict[type[nn.Module], dict[str, Any]] = {
    Routed: {"layers.*.mlp.gate": "replicate", "layers.*.mlp.experts": "experts"},
    Dense: {
        "layers.*.mlp.gate": "replicate",
        "layers.*.mlp.up": {"style": "colwise", "dim": 2},
        "layers.*.mlp.down": {"style": "rowwise", "dim": 1},
    },
    Sparse: {"layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"},
}


def both(mesh: DeviceMesh, sp: bool, kind: type[nn.Module], **how: bool) -> tuple[Keeping, Keeping]:
    torch.manual_seed(0)
    reference = Keeping(kind, **how).double().train()
    model = copy.deepcopy(reference)
    plan = {"tpplan": 1, "rules": {"layers.*.norm": "sequence_parallel", **RULES[kind]}}
    example = torch.randn(2, 8, WIDTH).double()
    tpplan.parallelize(model, plan, mesh, sequence_parallel=sp, inputs=example)
    return reference, model


def kept_in(model: Keeping) -> list[torch.Tensor]:
    holders = [layer if layer.keeps else layer.mlp for layer in model.layers]  # type: ignore[union-attr]
    return [holder.balance for holder in holders]  # type: ignore[union-attr, misc]


def right_job(mesh: DeviceMesh, sp: bool, kind: type[nn.Module], keeps: bool) -> Errors:
    """A loss on what is kept, step after step: with and without it, recomputed, accumulated."""
    found = Findings()
    pair = both(mesh, sp, kind, keeps=keeps)
    for turn, shape in enumerate([(2, 8), (3, 7), (1, 5), (2, 8)]):
        batches = [torch.randn(*shape, WIDTH).double() for _ in range(1 + turn // 3)]
        values = []
        for model in pair:
            model.zero_grad()
            model.recompute = turn == 2
            for x in batches:
                loss = model(x).square().mean()
                kept = kept_in(model)
                values.append(kept[-1].detach())
                aux = sum(i * k.square().mean() for i, k in enumerate(kept, 1))
                (loss if turn == 1 else loss + aux).backward()
        half = len(values) // 2
        found.add(f"{turn}", max(map(error, values[:half], values[half:])))
        found.add(f"{turn}", compare_gradients(*pair))
    return found.errors


def added_job(mesh: DeviceMesh, sp: bool, kind: type[nn.Module]) -> Errors:
    """The model's own code reads what its layers keep."""
    pair, found = both(mesh, sp, kind, adds=True), Findings()
    x = torch.randn(2, 6, WIDTH).double()
    for model in pair:
        out, aux = model(x)
        (out.square().mean() + 3 * aux).backward()
    found.add("added", compare_gradients(*pair))
    return found.errors


def wrong_job(mesh: DeviceMesh, sp: bool, kind: type[nn.Module], keeps: bool) -> Errors:
    """A loss on a rank's part raises; without one all is as before."""
    pair, found = both(mesh, sp, kind, keeps=keeps), Findings()
    x = torch.randn(2, 6, WIDTH).double()
    losses = [model(x).square().mean() for model in pair]
    kept = kept_in(pair[1])
    other = [] if keeps else [layer.mlp.columns[0] for layer in pair[1].layers]  # type: ignore[union-attr, index]
    for tensor in (*kept, *other):
        said = ""
        try:
            (losses[1] + tensor.sum()).backward(retain_graph=True)
        except RuntimeError as e:
            said = str(e)
        found.add("says which", same("a loss reads this attribute" in said and "layers." in said))
        pair[1].zero_grad()
    for loss in losses:
        loss.backward()
    found.add("without it", compare_gradients(*pair))
    with torch.no_grad():
        found.add("evaluated", error(pair[0](x), pair[1](x)))
    return found.errors


def compiled_job(mesh: DeviceMesh, sp: bool, whole: bool) -> Errors:
    """Layers compiled one by one, or the model: the gradient of what is whole."""
    (reference, model), found = both(mesh, sp, Dense), Findings()
    torch._dynamo.reset()
    for module in [model] if whole else model.layers:
        module.compile(backend="aot_eager", fullgraph=True)
    for shape in ((2, 8), (3, 7)):
        x = torch.randn(*shape, WIDTH).double()
        for each in (reference, model):
            each.zero_grad()
            out = each(x).square().mean()
            aux = sum(i * k for i, k in enumerate(kept_in(each), 1))
            (out + aux).backward()
        found.add(f"{shape}", compare_gradients(reference, model))
    return found.errors


def compiled_parts_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Layers compiled one by one leave parts as they are; in a compiled model they are refused."""
    (_, model), found, said = both(mesh, sp, Sparse), Findings(), ""
    torch._dynamo.reset()
    try:
        torch.compile(model, backend="aot_eager", fullgraph=True)(torch.randn(2, 6, WIDTH).double())
    except Exception as e:
        said = str(e)
    found.add("says why", same("which a compiled model cannot leave out" in said))
    torch._dynamo.reset()
    for layer in model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    loss = model(torch.randn(2, 6, WIDTH).double()).square().mean()
    loss.backward(retain_graph=True)
    try:
        (loss + kept_in(model)[0]).backward()
    except RuntimeError as e:
        said = str(e)
    found.add("says which", same("a loss reads this attribute" in said))
    return found.errors


@SIZES
@MODES
@pytest.mark.parametrize("kind", [Routed, Dense])
def test_whole(ranks: Ranks, sp: bool, tp: int, kind: type[nn.Module]) -> None:
    assert not beyond(ranks.run(tp, right_job, sp, kind, False))


def test_on_the_stream(ranks: Ranks) -> None:
    """Outside of any region a layer's attribute is whole; a rank's rows are not."""
    assert not beyond(ranks.run(2, right_job, False, Sparse, True))
    assert not beyond(ranks.run(2, wrong_job, True, Sparse, True))


@MODES
def test_read_by_the_model(ranks: Ranks, sp: bool) -> None:
    assert not beyond(ranks.run(2, added_job, sp, Routed))


@MODES
def test_parts(ranks: Ranks, sp: bool) -> None:
    assert not beyond(ranks.run(2, wrong_job, sp, Sparse, False))


@MODES
@pytest.mark.parametrize("whole", [False, True])
def test_compiled(ranks: Ranks, sp: bool, whole: bool) -> None:
    assert not beyond(ranks.run(2, compiled_job, sp, whole))


@MODES
def test_compiled_parts(ranks: Ranks, sp: bool) -> None:
    assert not beyond(ranks.run(2, compiled_parts_job, sp))
