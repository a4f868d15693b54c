"""Columns in other orders: the parts of each head side by side, every other column."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tpplan
from tests.planner.helpers import INNER, WIDTH, Layer, Stack, plan, refused, stream, wrong

HEADS, DIM = 4, 4


class Heads(nn.Module):
    """Query, key and value of each head side by side; a size in the code is that of all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(WIDTH, 3 * HEADS * DIM), nn.Linear(HEADS * DIM, WIDTH)
        self.size = HEADS * DIM

    def forward(self, x: torch.Tensor) -> Any:
        q, k, v = self.fc(x).unflatten(-1, (-1, 3 * DIM)).transpose(1, 2).chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return x + self.out(y.reshape(*y.shape[:2], self.size))


def rules(size: str) -> dict[str, Any]:
    packed = {"parts": ["q", "k", "v"], "repeat": "heads"}
    return {
        "layers.*": {"style": "attention", "attributes": {"size": size}},
        "layers.*.fc": {"style": "colwise", "packed": packed},
    }


@pytest.mark.parametrize("sp", [False, True], ids=["TP", "TP+SP"])
def test_parts_of_each_head_say_its_width(sp: bool) -> None:
    assert not wrong(Stack(lambda _: Heads()), rules("heads * head_dim"), sp)


def test_a_size_of_something_else_is_refused() -> None:
    said = refused(Stack(lambda _: Heads()), rules("3 * heads * head_dim"), False)
    assert "is 48, but size is 16" in said


class Sizes(NamedTuple):
    heads: int
    width: int


SIZE = HEADS * DIM
HELD: dict[str, tuple[Any, str, Callable[[Any], int]]] = {
    "list": ([HEADS, SIZE], "held.1", lambda held: held[1]),
    "tuple": ((HEADS, SIZE), "held.1", lambda held: held[1]),
    "named tuple": (Sizes(HEADS, SIZE), "held.1", lambda held: held.width),
    "mapping": ({"heads": HEADS, "width": SIZE}, "held.width", lambda held: held["width"]),
    "pairs": ((("width", SIZE),), "held.width", lambda held: dict(held)["width"]),
    "deep": ({0: [HEADS, {"width": SIZE}]}, "held.0.1.width", lambda held: held[0][1]["width"]),
}


class Held(Heads):
    def __init__(self, held: Any, read: Callable[[Any], int]) -> None:
        super().__init__()
        self.held, self.read = held, read

    def forward(self, x: torch.Tensor) -> Any:
        self.size = self.read(self.held)
        return super().forward(x)


@pytest.mark.parametrize("holder", HELD)
def test_a_size_that_something_else_holds(holder: str) -> None:
    held, name, read = HELD[holder]
    before = copy.deepcopy(held)
    told = rules("heads * head_dim")
    told["layers.*"]["attributes"] = {name: "heads * head_dim"}
    assert not wrong(Stack(lambda _: Held(held, read)), told, True)
    assert held == before


class RMS(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


class Interleaved(nn.Module):
    """A gated MLP of every other column, with a norm over what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(WIDTH, 2 * INNER), nn.Linear(INNER, WIDTH)
        self.norm = RMS(INNER)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.fc(x)
        return x + self.out(self.norm(y[..., ::2].tanh() * y[..., 1::2]))


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("sp", [False, True], ids=["TP", "TP+SP"])
def test_a_norm_over_every_other_column(sp: bool, tp: int) -> None:
    assert not wrong(Stack(lambda _: Interleaved()), {"layers.*.norm": "colwise"}, sp, tp)


class Centred(Layer):
    """A norm over the columns whose mean is far from zero, beside their deviations."""

    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm = norm()
        with torch.no_grad():
            self.fc.bias.add_(300.0)

    def between(self, y: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(y)
        return out


class HalfCentred(Layer):
    """A norm of one half of the columns, which gates the other (gMLP's, without its positions)."""

    def __init__(self) -> None:
        super().__init__(2 * INNER, INNER)
        self.norm = nn.LayerNorm(INNER)

    def between(self, y: torch.Tensor) -> torch.Tensor:
        kept, gate = y.chunk(2, -1)
        out: torch.Tensor = kept * self.norm(gate)
        return out


CENTRED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "scaled and shifted": (lambda: Centred(lambda: nn.LayerNorm(INNER)), {}),
    "scaled": (lambda: Centred(lambda: nn.LayerNorm(INNER, 1e-3, bias=False)), {}),
    "neither": (lambda: Centred(lambda: nn.LayerNorm(INNER, elementwise_affine=False)), {}),
    "squares alone": (lambda: Centred(lambda: nn.RMSNorm(INNER, 1e-3, False)), {}),
    "of a half": (HalfCentred, {"layers.*.fc": {"style": "colwise", "packed": ["kept", "gate"]}}),
}


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("sp", [False, True], ids=["TP", "TP+SP"])
@pytest.mark.parametrize("kind", CENTRED)
@pytest.mark.turns(12)
def test_layer_norms_over_the_width(sp: bool, tp: int, kind: str) -> None:
    make, rules = CENTRED[kind]
    assert not wrong(Stack(lambda _: make()), {"layers.*.norm": "colwise", **rules}, sp, tp)


class Grouped(nn.Module):
    """Attention of grouped heads, whose queries and keys are normalised over all of them."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.fc, self.k, self.v = (nn.Linear(WIDTH, n * DIM) for n in (8, 4, 4))
        self.norm, self.k_norm = norm(8 * DIM), norm(4 * DIM)
        self.out, self.each = nn.Linear(8 * DIM, WIDTH), 2

    def forward(self, x: torch.Tensor) -> Any:
        q, k, v = self.norm(self.fc(x)), self.k_norm(self.k(x)), self.v(x)
        q, k, v = (t.unflatten(-1, (-1, DIM)).transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(self.each, 1) for t in (k, v))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.turns(4)
@pytest.mark.parametrize("sp", [False, True], ids=["TP", "TP+SP"])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm], ids=["LayerNorm", "RMSNorm"])
def test_heads_behind_a_norm(sp: bool, norm: Callable[[int], nn.Module]) -> None:
    """They are counted, for expressions that say so."""
    names = {"layers.*.{k,v,norm,k_norm}": "colwise"}
    told = {"style": "attention", "attributes": {"each": "heads // kv_heads"}}
    assert not wrong(Stack(lambda _: Grouped(norm)), {**names, "layers.*": told}, sp)


def test_a_large_mean_costs_no_digits() -> None:
    """In float32, where squares less the square of the mean would have none left."""
    model = Stack(lambda _: Centred(lambda: nn.LayerNorm(INNER)))
    found = tpplan.verify(model, plan({"layers.*.norm": "colwise"}), 4, inputs=stream().float())
    assert all(check.output_error < 1e-5 for check in found.checks), found.checks


def test_what_a_layer_norm_over_the_width_sends() -> None:
    model = Stack(lambda _: Centred(lambda: nn.LayerNorm(INNER)))
    report = tpplan.dry_run(model, plan({"layers.*.norm": "colwise"}), tp=2, inputs=stream())
    sent = [c for c in report.collectives if c.module == "layers.0.norm"]
    assert [(c.phase, c.kind, c.reason) for c in sent] == [
        ("forward", "all_gather", "means and squares over the sharded width"),
        ("backward", "reduce_scatter", "gradients of means and squares"),
    ]


class Halves(Interleaved):
    """The same of halves, without a word of it in the plan."""

    def forward(self, x: torch.Tensor) -> Any:
        gate, up = self.fc(x).chunk(2, -1)
        return x + self.out(self.norm(gate.tanh() * up))


def test_a_norm_over_halves_that_the_plan_does_not_name_is_refused() -> None:
    refused(Stack(lambda _: Halves()), {"layers.*.norm": "colwise"}, False)
