"""Calls of every op's own body, which launch its kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from tpplan.kernels import cross_entropy, embedding, gated, gelu, norm, transition


class New(Protocol):
    """A tensor of that shape, where and of what the bodies are to have it."""

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor: ...


def bodies(new: New, rows: int, h: int) -> list[Callable[[], Any]]:
    """One call or more of each op, on matrices of ``rows`` and ``h`` columns."""
    x, w, ids = new(rows, h), new(h), new(rows, dtype=torch.long)
    row = new(rows, dtype=torch.float32)
    return [
        lambda: norm._norm._body(x, x, w, w, 1e-5, True, 0.0, False),
        lambda: norm._norm._body(x, None, w, None, 1e-6, False, 1.0, True),
        lambda: norm._norm_backward._body(x, x, w, row, row, x, 0.0, False, True, True),
        lambda: gelu._gelu._body(x, w, True),
        lambda: gelu._gelu._body(x, None, False),
        lambda: gelu._gelu_backward._body(x, x, w, True, True),
        lambda: gated._gated._body(x, x, "silu"),
        lambda: gated._gated._body(x, x, "gelu"),
        lambda: gated._gated_backward._body(x, x, x, "silu"),
        lambda: gated._packed._body(x, "silu", True),
        lambda: gated._packed_backward._body(new(rows, h // 2), x, "silu", True),
        lambda: cross_entropy._statistics._body(x, ids, 0, w, True),
        lambda: cross_entropy._gradient._body(x, ids, 0, w, row, row, row, row, row),
        lambda: embedding._look_up._body(ids, x, 0, None),
        lambda: embedding._look_up_backward._body(x, ids, 9, 0, 3),
        lambda: transition._pack._body(new(2, 6, h), new(h), 2, 3, torch.float32),
        lambda: transition._unpack._body(new(2, 2, 3, h), 6),
    ]
