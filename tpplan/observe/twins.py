"""Copies of modules on random numbers, to be run for what they compute."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from tpplan.observe.chance import DROPOUT
from tpplan.observe.trace import Call, Numbered, attributes_of
from tpplan.observe.untouched import by_itself

Shapes = Callable[[nn.Parameter], tuple[int, ...]]
Drawn = Callable[[tuple[int, ...]], torch.Tensor]
# by which transformers (utils/output_capturing.py) knows that its own hooks are there, which it
# puts on at the first call that asks for hidden states or for what routers gave
_CAPTURING = "_output_capturing_hooks_installed"


def twin_of(
    module: nn.Module,
    dtype: torch.dtype = torch.float64,
    shape_of: Shapes = lambda parameter: tuple(parameter.shape),
    numbers: Drawn | None = None,
) -> nn.Module:
    """A copy of ``module`` on the CPU, with random parameters, its own buffers, and no hooks.

    What it drops out in training is nothing. Args:
        shape_of: the shape a parameter has in the copy; numbers: gives what is in it.
    """
    generator = torch.Generator().manual_seed(0)
    if numbers is None:

        def numbers(shape: tuple[int, ...]) -> torch.Tensor:
            return torch.rand(shape, generator=generator, dtype=dtype) + 0.5

    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        shape = shape_of(parameter)
        if parameter.is_floating_point():
            memo[id(parameter)] = nn.Parameter(numbers(shape))
        else:
            whole = torch.zeros(shape, dtype=parameter.dtype)
            memo[id(parameter)] = nn.Parameter(whole, requires_grad=False)
    for value in (value for inner in module.modules() for value in held_by(inner)):
        if id(value) not in memo:
            memo[id(value)] = buffer_like(value, generator, dtype)
    twin = copy.deepcopy(module, memo)
    without_hooks(twin)
    keep_in_tables(twin, module)
    for inner in twin.modules():
        if isinstance(inner, DROPOUT):
            inner.p = 0.0
    return twin


def held_by(module: nn.Module) -> Iterator[torch.Tensor]:
    """The tensors that a module itself holds: parameters, buffers, attributes, what is in these."""
    for table in (module._parameters, module._buffers):
        yield from (value for value in table.values() if value is not None)
    for _, value in attributes_of(module):
        yield from (held for held in tree_leaves(value) if isinstance(held, torch.Tensor))


def without_hooks(model: nn.Module) -> None:
    """Take the hooks off a copy: they are for the user's runs, and may keep what they see."""
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            hooks.clear()
        vars(module).pop(_CAPTURING, None)


def buffer_like(
    value: torch.Tensor, generator: torch.Generator, dtype: torch.dtype
) -> torch.Tensor:
    """A copy of a buffer on the CPU; where it has no numbers, some that a model could have."""
    if not value.is_meta:
        copied = value.detach().cpu().clone()
        return copied.to(dtype) if copied.is_floating_point() else copied
    if value.is_floating_point() or value.is_complex():
        wide = value.dtype if value.is_complex() else dtype
        return torch.rand(value.shape, generator=generator, dtype=wide)
    if value.dtype == torch.bool:
        return torch.ones(value.shape, dtype=torch.bool)
    counted = torch.arange(value.shape[-1] if value.dim() else 1)
    return counted.to(value.dtype).expand(value.shape or 1).clone().view(value.shape)


def keep_in_tables(twin: nn.Module, model: nn.Module) -> None:
    """Keep ids within the tables of a copy whose integer buffers are made up.

    They are where the model's have no numbers, on the meta device (BERT's kinds of tokens).
    """
    buffers = [b for b in model.buffers() if b.is_meta and not b.is_floating_point()]
    if any(b.dtype != torch.bool for b in buffers):
        for module in twin.modules():
            if isinstance(module, nn.Embedding):
                within = _InTable(module.num_embeddings)
                module.register_forward_pre_hook(within, prepend=True, with_kwargs=True)


class _InTable:
    """A forward pre-hook: ids that no row is for stand for one that there is."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda ids: ids.remainder(self.rows), (args, kwargs))


def called(module: nn.Module, call: Call, tensors: Mapping[int, torch.Tensor]) -> Any:
    """What ``module`` answers to a recorded call, with other tensors in it.

    Raises:
        KeyError: where the call has a tensor that is not among ``tensors``.
    """
    args, kwargs = tree_map_only(Numbered, lambda n: tensors[n.number], call.given)
    with by_itself():
        return module(*args, **kwargs)
