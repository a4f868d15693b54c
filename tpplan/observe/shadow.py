"""A model's shadow: the same modules with fake parameters, to run at no cost and touch nothing."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tpplan.compat import FakeTensorMode
from tpplan.language import Diagnostic, PlanError
from tpplan.observe.twins import held_by, twin_of, without_hooks

# numbers that are held, and that are multiplied by
_HELD, _COMPUTED = 2**28, 2**36
_APART, _STEP = 4099, 61


def shadow_of(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy of ``model`` whose tensors are fake CPU tensors of the same shapes and ties.

    Raises:
        PlanError: where the model's own state cannot be copied.
    """
    memo: dict[int, Any] = {}
    for value in tree_leaves([[*vars(module).values()] for module in model.modules()]):
        if isinstance(value, torch.Generator):  # whose state is no tensor to be faked
            memo[id(value)] = copy.deepcopy(value)
    with mode:
        for tensor in (t for module in model.modules() for t in held_by(module)):
            if id(tensor) not in memo:
                memo[id(tensor)] = _fake(tensor)
        try:
            shadow = copy.deepcopy(model, memo)
        except Exception as error:
            raise not_copied(model, error) from error
    without_hooks(shadow)
    return shadow


def not_copied(model: nn.Module, error: Exception) -> PlanError:
    """What is said of a model that ``copy.deepcopy`` refused."""
    message = f"cannot copy the structure of {type(model).__name__}: {error}"
    hint = "a model must survive copy.deepcopy to be examined without being touched"
    return PlanError([Diagnostic(message, hint=hint)])


def computing_shadow_of(model: nn.Module) -> nn.Module | None:
    """A shadow with random numbers in float32; None of a model too large to compute with.

    The parameters of a large one have theirs in common, and of a large parameter its rows.
    """
    sizes = [p.numel() for p in model.parameters()]
    if sum(sizes) > _COMPUTED:
        return None
    if sum(sizes) <= _HELD:
        return twin_of(model, torch.float32)
    generator = torch.Generator().manual_seed(0)
    most = max(_span(tuple(p.shape)) for p in model.parameters())
    pool = torch.rand(most + _APART, generator=generator) - 0.5
    places = itertools.count()

    def numbers(shape: tuple[int, ...]) -> torch.Tensor:
        start = _STEP * next(places) % _APART
        if math.prod(shape) <= _HELD:
            return pool[start : start + math.prod(shape)].view(shape)
        row = torch.empty(shape, device="meta").stride()[1:]
        return pool.as_strided(shape, (_STEP, *row), start)

    return twin_of(model, torch.float32, numbers=numbers)


def _span(shape: tuple[int, ...]) -> int:
    """How many numbers in a row a parameter's are taken from."""
    size = math.prod(shape)
    return size if size <= _HELD else _STEP * shape[0] + size // shape[0]


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake
