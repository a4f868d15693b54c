"""What a model's own code does to the stream before and after the stack, and to its logits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from tests.compare import Errors, Findings, beyond, same, step
from tests.models import randomize
from tests.ranks import Ranks
from tests.rewrite import MODES
from tpplan.simulate import Recorder

pytestmark = pytest.mark.turns(48)

WIDTH, INNER, CLASSES = 16, 32, 13
PLAN: dict[str, Any] = {
    "tpplan": 1,
    "rules": {
        "layers.*.up": "colwise",
        "layers.*.down": "rowwise",
        "embedding": "vocab",
        "head": "vocab",
        "positions": "replicate",
    },
}
Code = Callable[["Model", torch.Tensor, torch.Tensor, torch.Tensor], Any]


class Layer(nn.Module):
    """An MLP and its residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    """Runs ``code`` on what went into the stack, what came out of it, and the logits."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.positions = nn.Parameter(torch.zeros(32, WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.code = code

    def forward(self, ids: torch.Tensor) -> Any:
        before = self.embedding(ids) * self.scale + self.positions[: ids.size(1)]
        x = before
        for layer in self.layers:
            x = layer(x)
        return self.code(self, before, x, self.head(x))


def marked(x: torch.Tensor) -> torch.Tensor:
    """``x`` with its first token replaced."""
    x = x * 1
    x[:, 0] = 3.0
    return x.cumsum(1)


CODES: dict[str, Code] = {
    "mse_loss": lambda m, x0, x, z: (F.mse_loss(x, x0), z),
    "huber_loss": lambda m, x0, x, z: (F.huber_loss(x, x0), F.smooth_l1_loss(z, z.roll(1, -1))),
    "cumsum": lambda m, x0, x, z: (x.cumsum(1), z.cumsum(-1), z.logcumsumexp(-1)),
    "bce": lambda m, x0, x, z: F.binary_cross_entropy_with_logits(z, torch.ones_like(z)),
    "kl_div": lambda m, x0, x, z: F.kl_div(
        z.log_softmax(-1), (4 * (30 * z).cos()).softmax(-1), reduction="batchmean"
    ),
    "attention": lambda m, x0, x, z: F.scaled_dot_product_attention(
        x[:, None], x0[:, None], x[:, None]
    ),
    "split": lambda m, x0, x, z: (z.split(4, -1)[1], x.chunk(2, 1)[0]),
    "pooled": lambda m, x0, x, z: (x.mean(1), x[:, 0], m.head(x[:, -1:])),
    "first token": lambda m, x0, x, z: (marked(x), m.head(marked(x)[:, -1:])),
    "scaled": lambda m, x0, x, z: (m.head(x * m.scale + m.positions[: x.size(1)]), z * 2),
    "another layer": lambda m, x0, x, z: m.layers[0](x[:, 1:] * m.scale),
}
COMPILED = ("mse_loss", "attention", "first token")


def called(ids: torch.Tensor, make: Callable[[Any], Any] = lambda m: m) -> Any:
    """A call for ``step``: all outputs, weighed."""

    def run(model: Any) -> Mapping[str, torch.Tensor]:
        out = make(model)(ids)
        outputs = list(out) if isinstance(out, tuple) else [out]
        total = torch.zeros((), dtype=torch.float64)
        for i, t in enumerate(outputs):
            generator = torch.Generator().manual_seed(i)
            weights = torch.randn(t.shape, generator=generator, dtype=torch.float64)
            total = total + (t * weights).sum()
        return {**{f"output {i}": t for i, t in enumerate(outputs)}, "objective": total}

    return run


def token_ids(length: int) -> torch.Tensor:
    """A batch of two."""
    return torch.randint(0, CLASSES, (2, length), generator=torch.Generator().manual_seed(length))


def made(code: Code, mesh: DeviceMesh, sp: bool) -> tuple[Model, Model]:
    """A model and its sharded copy."""
    reference = Model(code).double()
    randomize(reference, 1)
    model = copy.deepcopy(reference)
    tpplan.parallelize(model, PLAN, mesh, sequence_parallel=sp)
    return reference, model


def eager_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Outputs and gradients, of lengths that tp divides and not."""
    found = Findings()
    for name, code in CODES.items():
        reference, model = made(code, mesh, sp)
        for length in (8, 7):
            with found.case(f"{name}, {length}"):
                found.add(f"{name}, {length}", step(reference, model, called(token_ids(length))))
    return found.errors


def compiled_job(mesh: DeviceMesh, sp: bool, name: str) -> Errors:
    """The same in one graph."""
    found = Findings()
    reference, model = made(CODES[name], mesh, sp)
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    for length in (8, 7):
        run = called(token_ids(length), lambda m: whole if m is model else m)
        with found.case(f"{name}, {length}"):
            found.add(f"{name}, {length}", step(reference, model, run))
    return found.errors


def gathers_job(mesh: DeviceMesh) -> Errors:
    """One gather for each tensor that a loss on the stream is of, and none more in backward."""
    found = Findings()
    _, model = made(lambda m, x0, x, z: F.mse_loss(x, torch.ones_like(x)), mesh, True)
    with Recorder() as recorder:
        loss = model(token_ids(8))
        with recorder.during("backward"):
            loss.backward()
    sites = [
        (c.phase, c.kind, c.reason.removeprefix("the stream, gathered"))
        for c in recorder.collectives
        if c.reason.startswith("the stream")
    ]
    due = [
        *[("forward", "all_gather", " for mse_loss")] * 2,
        # the gradients of parameters beside the stream, whole on every rank: the first rows of
        # one, and of one that meets every row
        ("backward", "all_gather", " for slice_backward"),
        ("backward", "all_reduce", ": sum"),
    ]
    found.add(f"gathers {sites}", same(sites == due))
    return found.errors


@MODES
def test_eager(ranks: Ranks, sp: bool) -> None:
    assert not beyond(ranks.run(2, eager_job, sp), 1e-9)


@pytest.mark.turns(32)
@pytest.mark.parametrize("name", COMPILED)
def test_compiled(ranks: Ranks, name: str) -> None:
    assert not beyond(ranks.run(2, compiled_job, True, name), 1e-9)


def test_gathers(ranks: Ranks) -> None:
    assert not beyond(ranks.run(2, gathers_job))


@pytest.mark.turns(24)
def test_four_ranks(ranks: Ranks) -> None:
    assert not beyond(ranks.run(4, eager_job, True), 1e-9)
