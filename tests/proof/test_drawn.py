"""Random numbers as the proof notes them: how many, and from which sequence."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tpplan
from tests.rewrite import MODES
from tests.rewrite.noise import HEAD, WIDTH, Layer, Noisy, plan_of
from tests.rewrite.test_noise import Reading
from tpplan.proof.drawn import Drawn, misdrawn
from tpplan.proof.exact import exact
from tpplan.proof.noted import noting

DROPOUTS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "dropout": (F.dropout, (2, 3, 4)),
    "alpha_dropout": (F.alpha_dropout, (2, 3, 4)),
    "dropout1d": (F.dropout1d, (2, 3, 4)),
    "dropout1d, no batch": (F.dropout1d, (3, 4)),
    "dropout2d": (F.dropout2d, (2, 3, 4, 5)),
    "dropout2d of one dimension": (F.dropout2d, (2, 3, 4)),
    "dropout3d": (F.dropout3d, (2, 3, 4, 5, 6)),
    "dropout3d, no batch": (F.dropout3d, (3, 4, 5, 6)),
    "feature_alpha_dropout": (F.feature_alpha_dropout, (2, 3, 4)),
    "torch.feature_dropout": (torch.feature_dropout, (2, 3, 4, 5)),
    "torch.feature_alpha_dropout": (torch.feature_alpha_dropout, (2, 3, 4, 5)),
}


@pytest.mark.parametrize("name", DROPOUTS)
@pytest.mark.filterwarnings("ignore:dropout2d")
def test_what_dropouts_draw(name: str) -> None:
    function, shape = DROPOUTS[name]
    x = torch.ones(shape)
    with Reading() as reading:
        function(x, 0.5, True)
    with exact(), noting(nn.Module()) as notes:
        function(x, 0.5, True)
        function(x, 0.5, False)
    assert [math.prod(drawn.shape) for drawn in notes.drawn] == [t.numel() for t in reading.drawn]
    (drawn,) = notes.drawn
    assert [n for n in drawn.shape if n != 1] == [n for n in reading.drawn[0].shape if n != 1]


# --- refused


def refusal(model: nn.Module, plan: Any, tp: int, sp: bool, x: torch.Tensor) -> str:
    """What the proof says of it, nothing where it is right."""
    try:
        tpplan.check(model.train(), plan, tp, sp, inputs=x)
    except tpplan.PlanError as error:
        return str(error)
    return ""


OWN = "of which each rank needs its own, from a sequence that all ranks share (in training"
ALIKE = "of which all ranks need the same, from a sequence of each rank's own (in training"
TWICE = "for parts that several ranks hold alike, from a sequence of each rank's own (in training"


@pytest.mark.turns(4)
@MODES
@pytest.mark.parametrize("inside", [False, True], ids=["on the stream", "in a region"])
def test_a_generator_of_the_codes_own_draws_the_same_on_all_ranks(sp: bool, inside: bool) -> None:
    generator = torch.Generator()
    x = torch.randn(4, 6, WIDTH)

    def each(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand(x.shape, generator=generator)

    def one(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand(len(x), 1, 1, generator=generator)

    assert not refusal(Noisy(lambda: Layer(one, inside)), plan_of(False), 2, sp, x)
    said = refusal(Noisy(lambda: Layer(each, inside)), plan_of(False), 2, sp, x)
    if inside or sp:
        assert f"layers.0 draws random numbers of shape (4, 11, {32 if inside else 16})" in said
        assert OWN in said
    else:
        assert not said


def test_numbers_that_are_repeated_are_not_taken_for_one() -> None:
    def repeated(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand(len(x), 1, 1).repeat(1, *x.shape[1:])

    model = Noisy(lambda: Layer(repeated, True))
    assert ALIKE in refusal(model, plan_of(False), 2, False, torch.randn(4, 6, WIDTH))


class Grouped(nn.Module):
    """Attention that drops its key-value heads out, or what they are repeated to."""

    def __init__(self, heads: int, groups: int, repeated: bool) -> None:
        super().__init__()
        width = heads * HEAD
        self.norm, self.times, self.repeated = nn.LayerNorm(width), heads // groups, repeated
        self.q, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.k, self.v = nn.Linear(width, groups * HEAD), nn.Linear(width, groups * HEAD)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, k, v = (p(h).unflatten(-1, (-1, HEAD)).transpose(1, 2) for p in (self.q, self.k, self.v))
        if not self.repeated:
            v = F.dropout(v, 0.5, self.training)
        k, v = (t.repeat_interleave(self.times, 1) for t in (k, v))
        if self.repeated:
            v = F.dropout(v, 0.5, self.training)
        y = (q @ k.mT).softmax(-1) @ v
        return x + self.out(y.transpose(1, 2).flatten(2))


GROUPED = {
    "tpplan": 1,
    "rules": {
        "layers.*.norm": "sequence_parallel",
        "layers.*.{q,k,v}": "colwise",
        "layers.*.out": "rowwise",
    },
}


@pytest.mark.turns(4)
@MODES
def test_heads_that_several_ranks_hold_are_dropped_out_alike(sp: bool) -> None:
    x = torch.randn(2, 6, 8 * HEAD)
    said = refusal(Noisy(lambda: Grouped(8, 2, False)), GROUPED, 4, sp, x)
    assert "layers.0 draws random numbers of shape (2, 2, 11, 4)" in said
    assert TWICE in said
    assert not refusal(Noisy(lambda: Grouped(8, 2, True)), GROUPED, 4, sp, x)
    assert not refusal(Noisy(lambda: Grouped(8, 4, False)), GROUPED, 4, sp, x)


def test_a_few_rows_are_padded() -> None:
    """Four ranks hold a row each of two: that is no row twice."""
    due, got = [Drawn((2, 2, 16), False)], [Drawn((2, 1, 16), True)]
    assert misdrawn(due, got, 4) is not None
    assert misdrawn(due, got, 4, length=2) is None
    assert misdrawn([Drawn((2, 9, 16), False)], [Drawn((2, 3, 16), True)], 4) is None
