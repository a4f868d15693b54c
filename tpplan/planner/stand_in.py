"""The model that stands in where its code is run on real numbers, without its large weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from tpplan.observe.twins import buffer_like, without_hooks

_SMALL = 2**16


def stand_in(model: nn.Module, answering: set[str]) -> nn.Module:
    """A copy in float32 whose answering modules have no large weights, and the others random ones.

    Small ones have theirs, for code of other modules that reads them.
    """
    generator = torch.Generator().manual_seed(0)
    memo: dict[int, Any] = {}
    for path, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is None or id(parameter) in memo:
                continue
            if path in answering and parameter.numel() > _SMALL:
                twin = torch.empty(parameter.shape, dtype=torch.float32, device="meta")
            else:
                twin = torch.rand(parameter.shape, generator=generator) + 0.5
            memo[id(parameter)] = nn.Parameter(twin, requires_grad=False)
    for module in model.modules():
        for table in (module._buffers, vars(module)):
            for value in table.values():
                if isinstance(value, torch.Tensor) and id(value) not in memo:
                    memo[id(value)] = buffer_like(value, generator, torch.float32)
    twin_model = copy.deepcopy(model, memo).eval()
    without_hooks(twin_model)
    return twin_model
