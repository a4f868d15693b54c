"""The formula of an RMSNorm that is gated, as state-space and linear-attention layers have it.

Mamba-2 normalises what is gated, others gate what is normalised; over the whole width, or over each
of several groups of columns (Dao and Gu 2024, section 7).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}


@dataclass(frozen=True)
class GatedForm:
    """How exactly a norm gates.

    Attributes:
        groups: of columns, each of which is normalised by itself.
        activation: of the gate.
        first: whether it gates before it normalises.
    """

    groups: int
    activation: str
    first: bool


def gated_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    scale: torch.Tensor,
    form: GatedForm,
    means: Callable[[torch.Tensor], torch.Tensor],
    eps: float,
) -> torch.Tensor:
    """What the norm makes of ``x`` (..., columns), some or all of those it normalises together.

    Args:
        gate: (..., columns); scale: (columns,).
        means: of the columns' squares (..., columns) -> the mean of squares for each column, of a
            shape that broadcasts.
    """
    dtype = x.dtype
    if dtype in (torch.bfloat16, torch.float16):
        x, gate = x.float(), gate.float()
    factor = ACTIVATIONS[form.activation](gate)
    x = x * factor if form.first else x
    x = x * torch.rsqrt(means(x.square()) + eps) * scale
    return (x if form.first else x * factor).to(dtype)


def grouped_means(squares: torch.Tensor, groups: int) -> torch.Tensor:
    """The means over each of ``groups`` of columns, for each column."""
    means = squares.unflatten(-1, (groups, -1)).mean(-1, keepdim=True)
    whole: torch.Tensor = means.expand(*means.shape[:-1], squares.size(-1) // groups).flatten(-2)
    return whole
