"""What a model is given beside the stream, and what gradient it gets: angles, masks, conditions."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from tests.compare import Errors, Findings, beyond, compare_gradients, error, joined
from tests.planner.helpers import plan
from tests.ranks import Ranks

WIDTH, HEAD = 16, 4
RULES = {
    "layers.*.norm": "sequence_parallel",
    "layers.*.fc": {"style": "colwise", "packed": ["q", "k", "v"]},
    "layers.*.out": "rowwise",
}


class Turning(nn.Module):
    """Attention with queries and keys turned by angles, and a number added to all its scores."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, angles: Any, mask: torch.Tensor) -> torch.Tensor:
        cos, sin = angles
        parts = self.fc(self.norm(x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (-1, HEAD)).transpose(1, 2) for t in parts)
        q, k = (t * cos + t.flip(-1) * sin for t in (q, k))
        scores = (q @ k.mT + mask).softmax(-1)
        return x + self.out((scores @ v).transpose(1, 2).flatten(2))


class Placed(nn.Module):
    """Is given where its rows are, and what they may see.

    ``heads``: for how many heads it makes angles of their own.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.scales = torch.linspace(1, 2, heads)[:, None, None]
        self.layers = nn.ModuleList(Turning() for _ in range(2))

    def forward(self, x: torch.Tensor, at: torch.Tensor, given: dict[str, torch.Tensor]) -> Any:
        angles = at[:, None] * self.scales * torch.arange(1.0, HEAD + 1, dtype=at.dtype)
        for layer in self.layers:
            x = layer(x, (angles.cos(), angles.sin()), given["mask"])
        return x


def inputs(length: int, grad: bool = False) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(length)

    def drawn(*size: int) -> torch.Tensor:
        made = torch.randn(*size, generator=generator, dtype=torch.float64)
        return made.requires_grad_(grad)

    return drawn(2, length, WIDTH), drawn(2, length, 1), {"mask": drawn(length, length)}


def job(mesh: DeviceMesh, sequence_parallel: bool, heads: int) -> Errors:
    torch.manual_seed(0)
    reference = Placed(heads).double()
    model = copy.deepcopy(reference)
    cut: dict[str, Any] = {"layers.*": {"style": "attention", "head_inputs": {"angles": 1}}}
    rules = RULES | (cut if heads > 1 else {})
    tpplan.parallelize(model, plan(rules), mesh, sequence_parallel, inputs=inputs(8))
    found = Findings()
    for length in (8, 5):
        due, got = inputs(length, grad=True), inputs(length, grad=True)
        outs = reference(*due), joined(model(*got))
        found.add(f"{length}", error(*outs))
        for out in outs:
            out.square().sum().backward()
        found.add(f"{length}: parameters", compare_gradients(reference, model))
        tensors = zip((*due[:2], due[2]["mask"]), (*got[:2], got[2]["mask"]), strict=True)
        for name, (theirs, ours) in zip(("x", "at", "mask"), tensors, strict=True):
            assert theirs.grad is not None and ours.grad is not None
            found.add(f"{length}: {name}", error(theirs.grad, ours.grad))
    return found.errors


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["TP", "TP+SP"])
@pytest.mark.parametrize("heads", [1, WIDTH // HEAD], ids=["for all heads", "for each head"])
def test_gradients(ranks: Ranks, heads: int, sequence_parallel: bool, tp: int) -> None:
    assert beyond(ranks.run(tp, job, sequence_parallel, heads), 1e-12) == {}


class Counting(Placed):
    """Counts what it may see, of which there is no gradient."""

    def forward(self, x: torch.Tensor, at: torch.Tensor, seen: torch.Tensor) -> Any:
        few = torch.arange(x.size(1)) < seen.sum(-1, dtype=torch.int)[:, None]
        mask = torch.zeros(few.shape, dtype=x.dtype).masked_fill(~few, -4.0)
        return super().forward(x, at, {"mask": mask[:, None, None]})


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["TP", "TP+SP"])
def test_an_input_without_a_gradient(sequence_parallel: bool) -> None:
    x, at, _ = inputs(8)
    given = x, at, torch.ones(2, 6)
    tpplan.check(Counting(1).double(), plan(RULES), 2, sequence_parallel, inputs=given)


class Optional(Placed):
    """May be given what its rows may see."""

    def forward(self, x: torch.Tensor, at: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        length = x.size(1)
        mask = torch.zeros(length, length, dtype=x.dtype) if mask is None else mask
        return super().forward(x, at, {"mask": mask})


def later(mesh: DeviceMesh, sequence_parallel: bool) -> list[str]:
    x, at, given = inputs(8)
    model = Optional(1).double()
    tpplan.parallelize(model, plan(RULES), mesh, sequence_parallel, inputs=(x, at))
    said = []
    for trained in (False, True):
        try:
            joined(model(x, at, mask=given["mask"].requires_grad_(trained))).sum().backward()
            said.append("")
        except RuntimeError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["TP", "TP+SP"])
def test_what_the_plan_was_not_compiled_with(ranks: Ranks, sequence_parallel: bool) -> None:
    for frozen, trained in ranks.run(2, later, sequence_parallel):
        assert frozen == "" and trained.startswith("the gradient of 'mask' is another one")
