"""Sizes that torch.compile keeps as symbols, so that one graph serves all lengths.

A comparison of symbols in Python binds the graph to its outcome. An outcome that differs from
length to length (whether tp divides it, which rank has the last rows) would cost a graph for each.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from tpplan.compat.replaced import there


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


def unite(whole: Sequence[int], local: Sequence[int], sharded: int) -> None:
    """Have sizes be the same symbols but along the dimension that is sharded.

    Torch says of those of a local tensor where they come from, and may forget to of the others.
    """
    for dim, (one, other) in enumerate(zip(whole, local, strict=True)):
        if dim != sharded and isinstance(one, torch.SymInt):
            torch._check(one == other)


def bind_to_sizes(x: torch.Tensor) -> None:
    """Have the graph that torch.compile makes serve no other sizes of ``x`` than it was made for.

    Of a DTensor torch compares what is on this rank only: of a length that tp does not divide, and
    of the next one, most ranks have as many rows. Sizes that are symbols it compares by itself.
    """
    if torch.compiler.is_dynamo_compiling():
        from torch._dynamo.comptime import comptime

        comptime(_compare_sizes_of_local)


@functools.cache
def bind_all_to_sizes(kind: type[torch.Tensor]) -> None:
    """Have every graph do so with what it is given of a kind, in whatever code."""
    from torch._dynamo.variables.builder import VariableBuilder

    wrap = there(VariableBuilder, "wrap_tensor")

    @functools.wraps(wrap)
    def wrapping(self: Any, value: torch.Tensor) -> Any:
        made = wrap(self, value)
        if type(value) is kind:
            _compare_sizes(self.source, made.as_proxy().node.meta["example_value"])
        return made

    VariableBuilder.wrap_tensor = wrapping  # type: ignore[method-assign]


def _compare_sizes_of_local(context: Any) -> None:
    x = context.get_local("x")
    source = x._i_will_not_complain_if_bc_breaks_VariableTracker().source
    if source is not None:  # not made in the graph
        _compare_sizes(source, x.as_fake())


def _compare_sizes(source: Any, x: torch.Tensor) -> None:
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import TensorProperty, TensorPropertySource

    for dim, size in enumerate(x.shape):
        if type(size) is int:
            own = TensorPropertySource(source, TensorProperty.SIZE, dim)
            install_guard(own.make_guard(GuardBuilder.EQUALS_MATCH))
