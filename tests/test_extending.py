"""What can be added from one file: a style, a packed layout, a kernel, a hardware profile."""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from tests.compare import Errors, beyond, step
from tpplan.compat import simulate
from tpplan.language import styles as language
from tpplan.layout import Rows
from tpplan.observe.fused import FINDERS
from tpplan.roles.fused import ROLES
from tpplan.styles import STYLES

WIDTH, HEADS, DIM = 16, 4, 4


class Layer(nn.Module):
    """Attention whose one weight is, for each half of the heads, their values, queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.vqk, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        halves = self.vqk(x).unflatten(-1, (2, 3, -1, DIM))  # half, part, head of it, its width
        v, q, k = (halves[..., part, :, :].flatten(2, 3).transpose(1, 2) for part in range(3))
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Two such layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


HALVES = {
    "layers.*": {"style": "attention", "heads": 4, "kv_heads": 4, "head_dim": 4},
    "layers.*.vqk": {"style": "colwise", "packed": {"parts": ["v", "q", "k"], "repeat": 2}},
    "layers.*.out": "rowwise",
}
INPUTS = {"x": torch.zeros(2, 6, WIDTH)}


def test_a_packed_layout(tmp_path: Path) -> None:
    plan = tmp_path / "halves.yaml"
    plan.write_text(json.dumps({"tpplan": 1, "rules": HALVES}))  # which is YAML
    compiled = tpplan.check(Model(), plan, tp=2, inputs=INPUTS)  # and proves it
    placement = compiled.parameters["layers.0.vqk.weight"].placement
    # as the code cuts them: two heads of v, q and k each, in two halves
    first = ((0, 4), (8, 12), (16, 20), (4, 8), (12, 16), (20, 24))
    assert isinstance(placement, Rows)
    assert placement.pieces[0] == first
    assert placement.pieces[1] == tuple((a + 24, b + 24) for a, b in first)


class Mlp(nn.Module):
    """Whose activation the kernel of ``tests/squared.py`` computes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.act = Named()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(x)))


class Named(nn.Module):
    """The square of a ReLU, under another name."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x) ** 2


@contextlib.contextmanager
def restored(*tables: dict[Any, Any]) -> Iterator[None]:
    """What is registered within is forgotten again."""
    known = [dict(table) for table in tables]
    try:
        yield
    finally:
        for table, before in zip(tables, known, strict=True):
            table.clear()
            table.update(before)


@pytest.fixture
def calls() -> Iterator[list[torch.Size]]:
    """What the kernel of the one file was given; it is known for as long as the test lasts."""
    with restored(FINDERS, ROLES):
        yield importlib.import_module("tests.squared").CALLS


def test_a_kernel(calls: list[torch.Size]) -> None:
    plan = tpplan.load_plan({"tpplan": 1, "rules": {"*.up": "colwise", "*.down": "rowwise"}})
    x = torch.randn(2, 6, WIDTH)
    reference = nn.Sequential(Mlp(), Mlp())
    choice = tpplan.check(reference, plan, 2, inputs=(x,)).modules["0.act"].kernel
    assert choice is not None and choice.implementation == "auto"

    def job(mesh: DeviceMesh) -> Errors:
        model = copy.deepcopy(reference)
        asked = {"squared_relu": "triton"}
        tpplan.parallelize(model, plan, mesh, kernels=asked, inputs=(x,), prove=False)
        return step(copy.deepcopy(reference), model, lambda m: {"objective": m(x).square().sum()})

    calls.clear()
    assert beyond(simulate(2, job)) == {}
    assert calls.count(torch.Size((2, 6, WIDTH))) == 4  # a rank's columns, of two layers
    assert "squared_relu" in str(tpplan.dry_run(reference, plan, tp=2, inputs=(x,)))


MINE = """
extends: h100-nvlink
description: four of them, on a slower switch
node: 4
link: {bandwidth: 225e9}
"""


def test_a_hardware_profile(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(MINE)
    plan = {"tpplan": 1, "rules": HALVES}
    mine, known = (
        tpplan.dry_run(Model(), plan, tp=2, inputs=INPUTS, hardware=hardware).time
        for hardware in (file, "h100-nvlink")
    )
    assert mine.hardware == "mine"
    assert mine.total.compute == known.total.compute
    assert mine.total.communication > known.total.communication


class Scaling(nn.Module):
    """A layer whose columns are scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.by = Factor()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.by(self.up(x)))


class Factor(nn.Module):
    """What scales them."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.rand(2 * WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


SCALED = {"tpplan": 1, "rules": {"*.up": "colwise", "*.by": "scale", "*.down": "rowwise"}}


@pytest.fixture
def scale() -> Iterator[None]:
    """The style of the one file, known for as long as the test lasts."""
    with pytest.raises(tpplan.PlanError, match="scale"):
        tpplan.load_plan(SCALED)
    with restored(STYLES, language.STYLES):
        importlib.import_module("tests.scale")
        yield


def test_a_style(scale: None) -> None:
    def make() -> nn.Module:
        return nn.Sequential(Scaling(), Scaling())

    for sp in (False, True):
        tpplan.verify(make, SCALED, 2, sequence_parallel=sp, inputs=(torch.randn(2, 6, WIDTH),))
    compiled = tpplan.check(make(), SCALED, 2, inputs=(torch.randn(2, 6, WIDTH),))
    assert compiled.parameters["0.by.factor"].local_shape == (WIDTH,)
    with pytest.raises(tpplan.PlanError, match="tp 3 does not divide its 32 columns"):
        tpplan.check(make(), SCALED, 3, inputs=(torch.randn(2, 6, WIDTH),))
    wrong = {"tpplan": 1, "rules": {"*.by": "colwise", "*.up": "scale", "*.down": "rowwise"}}
    with pytest.raises(tpplan.PlanError, match="weight is not a vector"):
        tpplan.check(make(), wrong, 2, inputs=(torch.randn(2, 6, WIDTH),))
