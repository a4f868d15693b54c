"""A kernel added from one file: the square of a ReLU, by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tpplan.kernels.forms import Form
from tpplan.kernels.operator import operator
from tpplan.observe.fused import Findings, Seen, finds
from tpplan.roles.fused import Fused, stands_for

CALLS: list[torch.Size] = []


@operator("tpplan_tests::squared")
def squared(x: torch.Tensor) -> torch.Tensor:
    """Its body would be Triton's on a GPU."""
    CALLS.append(x.shape)
    return x.relu().square()


@squared.register_fake
def _squared_fake(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
    (x,) = ctx.saved_tensors
    return dy * 2 * x.relu()


squared.register_autograd(_backward, setup_context=_setup)


@dataclass(frozen=True)
class SquaredForm(Form):
    """There is one way to compute it."""


@finds("squared_relu")
def find(seen: Seen) -> Findings:
    """The modules that compute it, whatever they are called."""
    x = torch.linspace(-2, 2, 64)
    found: Findings = {}
    for path, module in seen.model.named_modules():
        if any(True for _ in module.children()) or any(True for _ in module.parameters()):
            continue
        try:
            same = torch.equal(module(x), x.relu().square())
        except Exception:
            continue
        if same:
            found[path] = ("squared_relu", SquaredForm(), None)
    return found


@stands_for(SquaredForm)
class FusedSquared(Fused):
    """What such a module becomes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return squared(x)  # type: ignore[no-any-return]
