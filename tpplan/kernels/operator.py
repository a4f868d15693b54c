"""Ops of PyTorch's that cost a plain call what an autograd function costs."""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType
from typing import Any

import torch

from tpplan.compat import dispatch_is_observed, has_data

_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_OTHERS = frozenset({torch.dtype, NoneType, bool, int, float, str})


class Operator:
    """A ``torch.library.custom_op``, around which calls are led that do not need one.

    The dispatcher shows the op to compilers, to fake and other special tensors, and to modes. Where
    nobody looks, it and its autograd would be nearly half of what a call costs the host
    (``benchmarks/op_overhead.py``): there the body runs as it is, or as an autograd function.
    """

    def __init__(self, name: str, body: Callable[..., Any]) -> None:
        self._body = body
        self._op: Any = torch.library.custom_op(name, body, mutates_args=())
        self._function: Any = None

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """As of a custom op."""
        self._op.register_fake(fake)
        return fake

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[..., Any]
    ) -> None:
        """As of a custom op."""
        self._op.register_autograd(backward, setup_context=setup_context)
        body = self._body

        def forward(ctx: Any, *args: Any) -> Any:
            result = body(*args)
            setup_context(ctx, args, result)
            return result

        # not with a setup_context of its own, for which PyTorch reads signatures at each call
        members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        self._function = type(self._body.__name__, (torch.autograd.Function,), members)

    def __call__(self, *args: Any) -> Any:
        """The op's result."""
        if torch.compiler.is_compiling() or dispatch_is_observed():
            return self._op(*args)
        for arg in args:
            kind = type(arg)
            if kind not in _OTHERS and (kind not in _TENSORS or not has_data(arg)):
                return self._op(*args)
        if self._function is None or not torch.is_grad_enabled():
            return self._body(*args)
        return self._function.apply(*args)


def operator(name: str) -> Callable[[Callable[..., Any]], Operator]:
    """Make an op of a function that changes none of its arguments."""
    return lambda body: Operator(name, body)
