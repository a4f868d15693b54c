"""Products of groups of rows in float64, of which torch computes 16 and 32 bits alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


def _grouped(
    given: Callable[..., torch.Tensor],
) -> Callable[..., torch.Tensor]:
    def product(
        mat_a: torch.Tensor, mat_b: torch.Tensor, *, offs: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        if mat_a.dtype != torch.float64 or offs is None or (mat_a.dim(), mat_b.dim()) != (2, 3):
            return given(mat_a, mat_b, offs=offs, **kwargs)
        ends = offs.tolist()
        if len(ends) != len(mat_b):
            raise RuntimeError(f"{len(ends)} groups of rows for {len(mat_b)} matrices")
        groups = enumerate(zip([0, *ends[:-1]], ends, strict=True))
        made = [mat_a[start:stop] @ mat_b[i] for i, (start, stop) in groups if stop > start]
        # rows of no group
        made.append(mat_a.new_zeros(mat_a.shape[0] - ends[-1], mat_b.shape[-1]))
        return torch.cat(made)

    return product


GROUPED: Mapping[Any, Callable[..., torch.Tensor]] = {
    function: _grouped(function)
    for function in (getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None))
    if function is not None
}
"""torch's functions -> what computes the same in any precision."""


class InAnyPrecision(TorchFunctionMode):
    """Within it, grouped products are computed in the precision of their factors."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return GROUPED.get(func, func)(*args, **(kwargs or {}))
