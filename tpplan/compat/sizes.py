"""Sizes that torch.compile keeps as symbols, so that one graph serves all lengths.

A comparison of symbols in Python binds the graph to its outcome. An outcome that differs from
length to length (whether tp divides it, which rank has the last rows) would cost a graph for each.
"""

from __future__ import annotations

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true


def always(holds: bool | torch.SymBool) -> bool:
    """Whether a comparison of sizes holds; of symbols, whether it does whatever they are."""
    if type(holds) is bool and not torch.compiler.is_dynamo_compiling():
        return holds
    return statically_known_true(holds)


def smaller(a: int, b: int) -> int:
    """``min``, which binds no symbol."""
    if type(a) is int and type(b) is int:
        return min(a, b)
    return torch.sym_min(a, b)  # type: ignore[no-any-return]


def larger(a: int, b: int) -> int:
    """``max``, which binds no symbol."""
    if type(a) is int and type(b) is int:
        return max(a, b)
    return torch.sym_max(a, b)  # type: ignore[no-any-return]
