"""What the unsharded model does not agree about with itself, its sums reordered, is no mistake."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tpplan
from tests.stacked import PLAN, Code, Layer, Stacked

WRONG = "computes something else than whole|columns of one rank are not enough"


def iterated(steps: int) -> Code:
    """The logistic map, which doubles what it is off by in every step."""

    def chaotic(x: torch.Tensor) -> torch.Tensor:
        y = x.mean(-1, keepdim=True).sigmoid()
        for _ in range(steps):
            y = 3.9 * y * (1 - y)
        return x * (1 + y)

    return chaotic


chaotic = iterated(40)
"""Put in off by 1e-16, off by 1e-7 to 1e-5 after it."""


def leaning(by: float) -> Code:
    """A mistake of a given size: each rank's own mean."""
    return lambda h: F.gelu(h) + by * h.mean(-1, keepdim=True)


def model_of(inner: Code, outer: Code) -> nn.Module:
    return Stacked(2, lambda: Layer(inner, outer))


def test_rounding() -> None:
    tpplan.check(model_of(F.gelu, chaotic), PLAN, 4, sequence_parallel=False)


@pytest.mark.parametrize("by", [1e-6, 1e-3])
def test_a_small_mistake_of_a_model_that_is_right_to_the_last_digit(by: float) -> None:
    with pytest.raises(tpplan.PlanError, match=WRONG):
        tpplan.check(model_of(leaning(by), lambda x: x), PLAN, 2, sequence_parallel=False)


def test_a_mistake_of_one_that_is_not() -> None:
    with pytest.raises(tpplan.PlanError, match=WRONG):
        tpplan.check(model_of(leaning(1e-2), chaotic), PLAN, 2, sequence_parallel=False)


def test_what_no_proof_can_tell() -> None:
    """It is refused, and the refusal says why."""
    with pytest.raises(tpplan.PlanError, match=WRONG) as error:
        tpplan.check(model_of(F.gelu, iterated(60)), PLAN, 4, sequence_parallel=False)
    assert "amplifies rounding" in str(error.value)


class Last(torch.autograd.Function):
    """The gradient of the last column is a little more: on the last rank alone that is right."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        last = torch.arange(gradient.shape[-1]) == gradient.shape[-1] - 1
        return gradient * (1 + 4e-7 * last)


def test_a_rank_that_departs_alone() -> None:
    """It does not leave the others waiting."""
    model = model_of(lambda h: F.gelu(Last.apply(h)), lambda x: 100 * x)
    with pytest.raises(tpplan.PlanError, match=r"the gradient of layers\.\d\.up\.\w+.* on rank 0"):
        tpplan.check(model, PLAN, 2, sequence_parallel=False)
