"""The model that stands in where its code is run on real numbers, without its large weights."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import torch
from torch import nn

from tpplan.observe.twins import buffer_like, keep_in_tables, without_hooks
from tpplan.planner.known import Known

_SMALL = 2**16
_ONCE = 2**20
_LAYER = re.compile(r"(^|\.)\d+(?=\.|$)")


def stand_in(model: nn.Module, answering: set[str], known: Known) -> nn.Module:
    """A copy in float32 whose answering modules have no large weights, and the others random ones.

    Small ones have theirs, for code of other modules that reads them. ``known``: has the weights of
    other copies of it, which serve again.
    """
    about, key = (model, *model.parameters()), ("weights", frozenset(answering))
    weights, state = known.once(about, key, lambda: _weights(model, answering))
    generator = torch.Generator()
    generator.set_state(state)
    memo: dict[int, Any] = dict(weights)
    for module in model.modules():
        for table in (module._buffers, vars(module)):
            for value in table.values():
                if isinstance(value, torch.Tensor) and id(value) not in memo:
                    memo[id(value)] = buffer_like(value, generator, torch.float32)
    twin_model = copy.deepcopy(model, memo).eval()
    without_hooks(twin_model)
    keep_in_tables(twin_model, model)
    return twin_model


def _weights(model: nn.Module, answering: set[str]) -> tuple[dict[int, nn.Parameter], torch.Tensor]:
    """The copies' parameters by the ids of the model's, and the state of what they are drawn of."""
    generator = torch.Generator().manual_seed(0)
    found: dict[int, nn.Parameter] = {}
    alike: dict[tuple[str, str, torch.Size], torch.Tensor] = {}
    for path, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            if parameter is None or id(parameter) in found:
                continue
            if path in answering and parameter.numel() > _SMALL:
                # of no memory; code asks where a table is (ids.to(table.weight.device)) and may
                # write to others, but no code has numbers of either
                table = torch.full((), torch.nan).expand(parameter.shape)
                twin = table if isinstance(module, nn.Embedding) else table.to("meta")
            elif parameter.numel() > _ONCE:  # for all layers of a stack
                key = _LAYER.sub(r"\1*", path, count=1), leaf, parameter.shape
                if key not in alike:
                    alike[key] = _drawn(parameter.shape, generator)
                twin = alike[key]
            else:
                twin = _drawn(parameter.shape, generator)
            found[id(parameter)] = nn.Parameter(twin, requires_grad=False)
    return found, generator.get_state()


def _drawn(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Numbers for a parameter, of which products do not grow with its width."""
    if len(shape) < 2:
        return torch.rand(shape, generator=generator) + 0.5
    width = max(1, math.prod(shape[1:]))
    return torch.randn(shape, generator=generator).div_(math.sqrt(width))
