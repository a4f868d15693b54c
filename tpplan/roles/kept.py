"""What modules keep as attributes in their forward, of which a rank has a part."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tpplan import compat
from tpplan.comm import divide_gradient, is_divided
from tpplan.roles.lowered import Lowered


class Keeping(Lowered):
    """Keeps what a training loop may read, and what of it it must not train on.

    The model's own code may still compute with it, until the forward that the user called is over.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        if self._tpplan.stream.shared is None:
            put_right(self)
        return out


def divide_kept(module: nn.Module, name: str, ranks: int) -> None:
    """Divide, among the ranks, the gradient of what a module keeps that is whole on each of them.

    It is of an earlier call, and divided, where this one kept nothing.
    """
    value = vars(module).get(name)
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return
    if torch.compiler.is_compiling() or not is_divided(value):
        setattr(module, name, divide_gradient(value, ranks))


def put_right(module: Keeping) -> None:
    """Put right what ``module`` keeps, or have backward raise where it comes to it.

    Raises:
        RuntimeError: in a compiled graph, whose backward comes to all that it gives.
    """
    plan = module._tpplan.plan
    if compat.in_backward() or not torch.is_grad_enabled():
        return
    for name, whole in plan.kept:
        if whole:
            divide_kept(module, name, module._tpplan.stream.group.size)
            continue
        value = vars(module).get(name)
        path = f"{plan.path}.{name}".lstrip(".")
        guarded = _guarded(value, path)
        if guarded is not value:
            setattr(module, name, guarded)


def _guarded(value: Any, path: str) -> Any:
    if isinstance(value, torch.Tensor):
        return _guarded_tensor(value, path)
    if isinstance(value, list):
        value[:] = [_guarded(item, path) for item in value]
    elif isinstance(value, dict):
        value.update({key: _guarded(item, path) for key, item in value.items()})
    elif type(value) is tuple:
        return tuple(_guarded(item, path) for item in value)
    return value


def _guarded_tensor(x: torch.Tensor, path: str) -> torch.Tensor:
    if not x.requires_grad:
        return x
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"{path}: each rank keeps its part of something as this attribute, with a gradient, "
            "which a compiled model cannot leave out; keep it detached, or compile the layers one "
            "by one"
        )
    known = x.grad_fn is None or isinstance(x.grad_fn, _Guard._backward_cls)  # type: ignore[attr-defined]
    return x if known else _Guard.apply(x, path)  # type: ignore[no-any-return]


class _Guard(compat.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, path: str) -> torch.Tensor:
        ctx.path = path
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        raise RuntimeError(
            f"{ctx.path}: a loss reads this attribute, in which each rank keeps its part of what "
            "the unsharded model keeps there: its gradients would be wrong; let the model return "
            "it, or make the loss of what the model returns"
        )
