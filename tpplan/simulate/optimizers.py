"""Optimizers by name, and one step of any of them on a model's parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from tpplan.comm.meshes import by_mesh, clip_grad_norm_
from tpplan.compat import local_of

# the implementations that hold nothing but the state while they step
OPTIMIZERS: Mapping[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "adamw": partial(AdamW, fused=True),
    "adam": partial(Adam, fused=True),
    "adagrad": partial(Adagrad, foreach=False),
    "rmsprop": partial(RMSprop, foreach=False),
    "sgd": partial(SGD, lr=1e-3, foreach=False),
    "sgd-momentum": partial(SGD, lr=1e-3, momentum=0.9, foreach=False),
}
_SHORT = (torch.bfloat16, torch.float16)

OptimizerSource = str | Callable[[list[nn.Parameter]], Optimizer] | None


def optimizer_named(source: OptimizerSource) -> Callable[[list[nn.Parameter]], Optimizer] | None:
    """What makes an optimizer from parameters, from its name ("none" for none) or itself.

    Raises:
        ValueError: naming the optimizers there are.
    """
    if source is None or source == "none":
        return None
    if isinstance(source, str):
        if source not in OPTIMIZERS:
            raise ValueError(f"no optimizer '{source}'; there are {', '.join(OPTIMIZERS)}, none")
        return OPTIMIZERS[source]
    return source


def take_step(
    model: nn.Module,
    make: Callable[[list[nn.Parameter]], Optimizer],
    max_norm: float | None,
    master_weights: bool,
) -> dict[str, int]:
    """Clip the gradients of ``model`` to ``max_norm`` and take one step with a new optimizer.

    Args:
        master_weights: whether 16-bit parameters have float32 copies that the optimizer works on,
            as mixed-precision training keeps them (Micikevicius et al. 2018); their gradients are
            cast, the 16-bit ones freed.

    Returns the optimizer's bytes for each parameter, by name: state and float32 copies.
    """
    named = {n: p for n, p in model.named_parameters() if p.grad is not None}
    if not named:
        return {}
    if max_norm is not None:
        clip_grad_norm_(named.values(), max_norm)
    # these work on each number by itself: DTensors would take longer, and do the same to shards
    by_number = make in OPTIMIZERS.values()
    masters: dict[str, nn.Parameter] = {}
    for name, parameter in named.items():
        held, grad = _held(parameter, by_number), _held(parameter.grad, by_number)
        if master_weights and parameter.dtype in _SHORT:
            masters[name] = nn.Parameter(held.detach().float())
            masters[name].grad = grad.float()
            parameter.grad = None
        elif held is not parameter:
            masters[name] = nn.Parameter(held)
            masters[name].grad = grad
        del grad
    states: dict[torch.Tensor, Any] = {}
    paths = {id(parameter): name for name, parameter in named.items()}
    for group in by_mesh(named.values()):
        optimizer = make([masters.get(paths[id(p)], p) for p in group])
        optimizer.step()
        states.update(optimizer.state)
    with torch.no_grad():
        for name, master in masters.items():
            held = _held(named[name], by_number)
            if held.dtype is not master.dtype:
                held.copy_(master)
    found = {}
    for name, parameter in named.items():
        master = masters.get(name, parameter)
        found[name] = sum(_bytes(value) for value in states.get(master, {}).values())
        if master.dtype is not parameter.dtype:
            found[name] += _bytes(master)
    return found


def _held(tensor: torch.Tensor | None, local: bool) -> torch.Tensor:
    """A tensor, or what this rank holds of it."""
    assert tensor is not None
    return local_of(tensor) if local and isinstance(tensor, DTensor) else tensor


def _bytes(value: Any) -> int:
    if not isinstance(value, torch.Tensor):
        return 0
    local = local_of(value) if isinstance(value, DTensor) else value
    return local.numel() * local.element_size()
