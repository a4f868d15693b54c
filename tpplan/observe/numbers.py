"""How far apart two results are, also beside numbers that are not finite (masked logits, say)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tpplan.compat import unmoded

# numbers that are looked at at once. Logits are large, and what is computed of all of them is in
# fresh memory, which takes longer than computing it
_AT_ONCE = 1 << 15


def largest(x: torch.Tensor) -> float:
    """The largest absolute value of those that are finite; 0 where there are none."""
    with unmoded():  # a mode that watches a model's code has nothing to see, and takes its time
        x = x.detach()
        if not x.numel() or not (x.is_floating_point() or x.is_complex()):
            return 0.0
        found = float(torch.stack([_most(piece) for (piece,) in _pieces(x)]).max())
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
        found = float(torch.stack([_most(a - b) for a, b in _pieces(due, got)]).max())
    if found == found:
        return found
    same = (due == got) | (due.isnan() & got.isnan()) if equal_nan else due == got
    finite = due.isfinite() & got.isfinite()
    if not bool((same | finite).all()):
        return float("inf")
    due, got = due[finite], got[finite]
    return float((due - got).abs().max()) if due.numel() else 0.0


def _most(x: torch.Tensor) -> torch.Tensor:
    """max|x|; nan where one is."""
    if x.is_complex():
        return x.abs().max()
    low, high = x.aminmax()
    return torch.maximum(-low, high)


def _pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Views of all of ``tensors``, of one shape, of so many numbers."""
    shape = tensors[0].shape
    count = -(-shape.numel() // _AT_ONCE)
    if count == 1:
        yield tensors
        return
    longest = max(range(len(shape)), key=shape.__getitem__)
    rows = -(-shape[longest] // count)
    yield from zip(*(t.split(rows, longest) for t in tensors), strict=True)
