"""How far apart two results are, also beside numbers that are not finite (masked logits, say)."""

from __future__ import annotations

import torch

from tpplan.compat import unmoded


def largest(x: torch.Tensor) -> float:
    """The largest absolute value of those that are finite; 0 where there are none."""
    with unmoded():  # a mode that watches a model's code has nothing to see, and takes its time
        x = x.detach()
        if not x.numel() or not (x.is_floating_point() or x.is_complex()):
            return 0.0
        found = float(x.abs().max())
        if found - found == 0.0:
            return found
        finite = x[x.isfinite()]
        return float(finite.abs().max()) if finite.numel() else 0.0


def difference(due: torch.Tensor, got: torch.Tensor, equal_nan: bool = False) -> float:
    """max|Δ| of two of one shape, not empty; the same infinity is no difference, another one is.

    Args:
        equal_nan: whether the same holds of nan; else it is an infinite difference.
    """
    with unmoded():
        found = float((due - got).abs().max())
    if found == found:
        return found
    same = (due == got) | (due.isnan() & got.isnan()) if equal_nan else due == got
    finite = due.isfinite() & got.isfinite()
    if not bool((same | finite).all()):
        return float("inf")
    due, got = due[finite], got[finite]
    return float((due - got).abs().max()) if due.numel() else 0.0
