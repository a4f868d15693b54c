"""Parameters with rules of their own, with several names, and what compiling leaves behind."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tpplan
from tests.planner.helpers import INNER, WIDTH, Layer, Stack, plan, refused, stream, wrong

pytestmark = pytest.mark.turns(4)

BOTH = pytest.mark.parametrize("sp", [False, True])


class Gated(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(INNER))

    def between(self, y: torch.Tensor) -> torch.Tensor:
        return y.relu() * self.gate


class Penalized(Gated):
    def between(self, y: torch.Tensor) -> torch.Tensor:
        self.penalty = self.gate.pow(2).sum()
        return super().between(y)


class WithPenalty(Stack):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), sum(layer.penalty for layer in self.layers)


class ScaledStack(Stack):
    def __init__(self) -> None:
        super().__init__(lambda i: Layer())
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * self.scale.mean()


@BOTH
def test_parameters_cut_by_a_rule_of_their_own(sp: bool) -> None:
    rules = {"layers.*.gate": "colwise"}
    assert not wrong(Stack(lambda i: Gated()), rules, sp)
    outside = "is used outside a sharded region"
    assert outside in refused(WithPenalty(lambda i: Penalized()), rules, sp)
    assert outside in refused(ScaledStack(), {"scale": "colwise"}, sp)


def test_a_rule_against_the_modules() -> None:
    text = refused(Stack(lambda i: Layer()), {"layers.*.fc.weight": "replicate"}, False)
    assert "<mapping>:5:3: error: layers.*.fc.weight (2 of them): 'replicate' contradicts" in text
    assert "<mapping>:3:3" in text
    packed = {"layers.*.fc": {"style": "colwise", "packed": ["q", "k", "v"]}}
    text = refused(Attention.stack(), {**packed, "layers.*.fc.weight": "colwise"}, False)
    assert "contradicts 'colwise', the rule of its module" in text
    # what says the same again is no contradiction
    same = {"layers.*.fc.weight": "colwise", "layers.*.out.bias": "replicate"}
    assert not wrong(Stack(lambda i: Layer()), same, False)


class Twice(Layer):
    """One norm on the stream and in the region."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.fc(self.norm(x)).unflatten(-1, (-1, WIDTH))
        return x + self.out(self.norm(y).flatten(2))


def test_one_norm_on_the_stream_and_in_a_region() -> None:
    text = refused(Stack(lambda i: Twice()), {"layers.*.norm": "sequence_parallel"}, False)
    assert "used both inside and outside a sharded region" in text
    where = "layers.0.norm.weight is used inside in layers.0.norm, and outside in layers.0.norm"
    assert where in text


# --- several names


class Shared(Stack):
    def __init__(self) -> None:
        super().__init__(lambda i: Layer())
        self.layers[1].fc.weight = self.layers[0].fc.weight


class Again(Stack):
    def __init__(self) -> None:
        super().__init__(lambda i: Gated(), 1)
        self.layers = nn.ModuleList([self.layers[0]] * 2)


class Beside(Layer):
    def forward(self, x: torch.Tensor, first: torch.Tensor) -> Any:
        return super().forward(x + first)


class WithFirst(Stack):
    def __init__(self) -> None:
        super().__init__(lambda i: Beside())
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        first = x = self.norm(x)
        for layer in self.layers:
            x = layer(x, first)
        return x


@BOTH
def test_one_thing_under_several_names(sp: bool) -> None:
    assert not wrong(Shared(), {}, sp)
    assert not wrong(Again(), {"layers.*.gate": "colwise"}, sp)
    assert not wrong(WithFirst(), {"norm": "sequence_parallel"}, sp)


# --- views of packed layers


class Attention(Layer):
    """[q|k|v] viewed as (3, heads, dim)."""

    @classmethod
    def stack(cls) -> Stack:
        return Stack(lambda i: cls(3 * WIDTH, WIDTH))

    def between(self, y: torch.Tensor) -> torch.Tensor:
        q, k, v = y.unflatten(-1, (3, -1, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@BOTH
def test_the_parts_come_first(sp: bool) -> None:
    packed = {"layers.*.fc": {"style": "colwise", "packed": ["q", "k", "v"]}}
    assert not wrong(Attention.stack(), packed, sp)


# --- what compiling leaves behind


@functools.lru_cache
def mask(length: int) -> tuple[torch.Tensor]:
    return (torch.ones(length, length, dtype=torch.bool).triu(1),)


class Masked(Layer):
    def between(self, y: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in y.chunk(3, -1))
        scores = (q @ k.mT).masked_fill(mask(y.size(1))[0], -1e9)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def test_no_fakes_in_the_users_cache() -> None:
    packed = {"layers.*.fc": {"style": "colwise", "packed": ["q", "k", "v"]}}
    mask.cache_clear()
    model = Stack(lambda i: Masked(3 * WIDTH, WIDTH))
    tpplan.check(model, plan(packed), 2, False, inputs=stream(dtype=torch.float32))
    assert type(mask(8)[0]) is torch.Tensor
    tpplan.dry_run(model, plan(packed), 2, inputs=stream(dtype=torch.float32))
    assert type(mask(8)[0]) is torch.Tensor
    assert not wrong(model, packed, False)


class Drawing(Layer):
    def between(self, y: torch.Tensor) -> torch.Tensor:
        if self.training:
            random.random()
            np.random.rand()
            y = F.dropout(y, 0.5)
        return y.relu()


def test_the_random_state_stays() -> None:
    model = Stack(lambda i: Drawing())
    torch.manual_seed(3)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    tpplan.check(model, plan({}), 2, inputs=stream(dtype=torch.float32))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
