"""Runs in which nothing but a mistake can make two results differ.

Every floating tensor is float64, whatever the model's code asks for, and what it draws at random
is the same number everywhere: then a rank's part of something is exactly that part of the whole,
in training as well.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tpplan.observe.channels import CHANNELS
from tpplan.observe.grouped import GROUPED
from tpplan.proof import decided
from tpplan.proof.drawn import note

_WIDER = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
}
_CASTS = {
    torch.Tensor.float: torch.Tensor.double,
    torch.Tensor.half: torch.Tensor.double,
    torch.Tensor.bfloat16: torch.Tensor.double,
}
# what makes float32 of Python's numbers, which may be too large for it, where no dtype is named
_FACTORIES = frozenset(
    {torch.full, torch.tensor, torch.scalar_tensor, torch.arange, torch.linspace, torch.logspace}
)
# what says nothing of a tensor's numbers, and is asked more often than all else
_ASKED = ("shape", "dtype", "device", "requires_grad", "grad_fn")
_TELLING = frozenset(
    {
        *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.stride),
        *(torch.Tensor.is_floating_point, torch.Tensor.is_complex),
        *(getattr(torch.Tensor, name).__get__ for name in _ASKED),
    }
)
# where attention functions take the probability of their dropout
_PROBABILITIES = {F.scaled_dot_product_attention: 4, F.multi_head_attention_forward: 10}


def _halves(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.full_like(x, 0.5)


def _filled(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return x.fill_(0.5)


def _sized(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def drawn(*size: Any, generator: Any = None, **kwargs: Any) -> torch.Tensor:
        return make(*size, **kwargs).fill_(0.5)

    return drawn


def _ints(*args: Any, generator: Any = None, **kwargs: Any) -> torch.Tensor:
    low, size = (args[0], args[2]) if len(args) > 2 else (0, args[1])
    return torch.full(size, low, **{"dtype": torch.long, **kwargs})


def _tossed(x: torch.Tensor, p: Any = None, **_: Any) -> torch.Tensor:
    odds = x if p is None else torch.full_like(x, p)
    return (odds > 0.5).to(x.dtype)


def _chosen(
    logits: torch.Tensor, tau: float = 1.0, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> torch.Tensor:
    """Gumbel softmax: noise that is one number drops out of it."""
    soft = (logits / tau).softmax(dim)
    if not hard:
        return soft
    first = torch.zeros_like(soft).scatter(dim, soft.argmax(dim, keepdim=True), 1.0)
    return first - soft.detach() + soft


_DRAWS: Mapping[Any, Callable[..., Any]] = {
    torch.rand: _sized(torch.zeros),
    torch.randn: _sized(torch.zeros),
    torch.rand_like: _halves,
    torch.randn_like: _halves,
    torch.bernoulli: _tossed,
    torch.Tensor.bernoulli: _tossed,
    torch.Tensor.bernoulli_: lambda x, p=0.5, **_: x.fill_(
        (p > 0.5) if isinstance(p, torch.Tensor) else float(p > 0.5)
    ),
    torch.randint: _ints,
    torch.randint_like: lambda x, *bounds, **_: torch.zeros_like(x),
    torch.randperm: lambda n, generator=None, **kwargs: torch.arange(n, **kwargs),
    torch.multinomial: lambda x, n, *_, **__: x.argsort(-1, descending=True)[..., :n],
    torch.Tensor.multinomial: lambda x, n, *_, **__: x.argsort(-1, descending=True)[..., :n],
    torch.Tensor.uniform_: _filled,
    torch.Tensor.normal_: _filled,
    torch.Tensor.exponential_: _filled,
    torch.Tensor.cauchy_: _filled,
    torch.Tensor.log_normal_: _filled,
    torch.Tensor.geometric_: lambda x, *_, **__: x.fill_(1),
    torch.Tensor.random_: lambda x, *bounds, **_: x.fill_(bounds[0] if len(bounds) > 1 else 0),
    torch.poisson: lambda rates, *_, **__: rates.detach().clone(),
    torch.binomial: lambda count, odds, *_, **__: (count * odds).detach(),
    F.gumbel_softmax: _chosen,
    torch.normal: lambda mean, *_, **__: mean + 0.5,
}


def _kept(
    function: Any, input: Any, p: float = 0.5, training: Any = True, *_: Any, **kwargs: Any
) -> Any:
    """What a dropout is given: it drops nothing."""
    if p and kwargs.get("train", training):
        note(input, function)
    return input


def _with_mask(input: torch.Tensor, p: float, train: bool | None) -> Any:
    """What a dropout that gives its mask as well is given, and that mask."""
    return _kept(F.dropout, input, p, train is not False), torch.ones_like(input, dtype=torch.bool)


def _rectified(
    input: torch.Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
    **_: Any,
) -> torch.Tensor:
    """By the mean of the slopes that are drawn, as in evaluation."""
    if training:
        note(input)
    return F.rrelu(input, lower, upper, inplace=inplace)


_IN_TRAINING: Mapping[Any, Callable[..., Any]] = {
    function: functools.partial(_kept, function)
    for function in (
        F.dropout,
        F.alpha_dropout,
        torch.dropout,
        torch.dropout_,
        torch.alpha_dropout,
        torch.alpha_dropout_,
        *CHANNELS,
    )
} | {
    F.rrelu: _rectified,
    torch.rrelu: _rectified,
    torch.rrelu_: functools.partial(_rectified, inplace=True),
    torch.native_dropout: _with_mask,
}


class _Exact(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _TELLING:
            return func(*args, **kwargs)
        if func is torch.autograd.backward and kwargs.get("inputs") is None:
            return self._backward(*args, **kwargs)
        if func in _IN_TRAINING:
            return _IN_TRAINING[func](*args, **kwargs)
        if func in _PROBABILITIES:
            args, kwargs = _without_dropout(_PROBABILITIES[func], args, kwargs)
        func = _CASTS.get(func, func)
        if any(isinstance(a, torch.dtype) for a in args):
            args = tuple(_WIDER.get(a, a) if isinstance(a, torch.dtype) else a for a in args)
        if func in _FACTORIES and kwargs.get("dtype") is None:
            if any(isinstance(x, float) for x in tree_leaves((args, kwargs))):
                kwargs = {**kwargs, "dtype": torch.float64}
        elif kwargs.get("dtype") in _WIDER:
            kwargs = {**kwargs, "dtype": _WIDER[kwargs["dtype"]]}
        func = GROUPED.get(func, func)
        decided.note(func, args, kwargs)
        out = _DRAWS.get(func, func)(*args, **kwargs)
        if func in _DRAWS:
            note(out, generator=kwargs.get("generator"))
        return _widened(out) if isinstance(out, torch.Tensor) else out

    def _backward(self, tensors: Any, *args: Any, **kwargs: Any) -> None:
        """Backward with this mode in it as well: checkpointed code runs again there."""
        given = (tensors,) if isinstance(tensors, torch.Tensor | GradientEdge) else tensors
        # torch hands tensors to a mode, which is off meanwhile, but not the edges of its graph
        edges = [get_gradient_edge(t) if isinstance(t, torch.Tensor) else t for t in given]
        with self:
            torch.autograd.backward(edges, *args, **kwargs)


def _widened(x: torch.Tensor) -> torch.Tensor:
    wider = _WIDER.get(x.dtype)
    return x if wider is None else x.to(wider)


def _without_dropout(
    at: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    if len(args) > at:
        return (*args[:at], 0.0, *args[at + 1 :]), kwargs
    return args, {**kwargs, "dropout_p": 0.0}


def exact() -> contextlib.AbstractContextManager[object]:
    """Within it, this thread computes in float64 and draws the same number always."""
    return _Exact()


def widened(values: Any) -> Any:
    """``values`` with every floating tensor in it in float64."""
    return tree_map_only(torch.Tensor, _widened, values)
