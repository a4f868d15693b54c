"""How rewritten modules multiply by their weights, chosen here for all of them."""

from __future__ import annotations

from typing import Protocol

import torch

from tpplan.comm.products import product


class Projection(Protocol):
    """``x`` (..., in) times a weight as the module stores it, and the bias: (..., out)."""

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, /
    ) -> torch.Tensor: ...


def projection(transposed: bool) -> Projection:
    """The product of a module whose weight is stored (out, in), or ``transposed``: (in, out)."""
    return _transposed if transposed else product


def is_plain(project: Projection) -> bool:
    """Whether it is one of ``projection``'s, and not what somebody put in its place."""
    return project is product or project is _transposed


def _transposed(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, /
) -> torch.Tensor:
    return product(x, weight, bias, transposed=True)
