"""Whether a module may run on a part of the sequence: proved on random numbers."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tpplan.planner.infer import stream_input
from tpplan.planner.trace import Trace

_ROWS = 4


def mixing_modules(model: nn.Module, styles: Mapping[str, str], trace: Trace) -> list[str]:
    """Modules under ``sequence_parallel`` whose result at a position depends on other positions.

    Each distinct kind of module is run once, with random weights, on a short sequence and on its
    positions one by one. Modules that take more than the stream are taken at the plan's word.
    """
    verdicts: dict[Any, bool] = {}
    mixing = []
    for path, style in styles.items():
        if style != "sequence_parallel":
            continue
        call = next((c for c in trace.calls if c.path == path), None)
        entry = None if call is None else stream_input(trace, call)
        if call is None or entry is None or len(call.arguments) != 1:
            continue
        module = model.get_submodule(path)
        shape = trace.shapes[entry[0]]
        shapes = tuple(tuple(p.shape) for p in module.parameters())
        key = (type(module), shapes, repr(module), shape[-1])
        if key not in verdicts:
            verdicts[key] = _mixes(module, shape)
        if verdicts[key]:
            mixing.append(path)
    return mixing


def _mixes(module: nn.Module, shape: tuple[int, ...]) -> bool:
    generator = torch.Generator().manual_seed(0)

    def random(size: tuple[int, ...]) -> torch.Tensor:
        return torch.rand(size, generator=generator) + 0.5

    memo: dict[int, Any] = {
        id(p): nn.Parameter(random(tuple(p.shape)), requires_grad=False)
        for p in module.parameters()
    }
    probe = copy.deepcopy(module, memo).eval()
    x = random((1, _ROWS, shape[-1]))
    with torch.no_grad():
        whole = probe(x)
        rows = [probe(x[:, i : i + 1]) for i in range(_ROWS)]
    if not isinstance(whole, torch.Tensor):
        return False
    return not torch.allclose(whole, torch.cat(rows, dim=1), rtol=1e-4, atol=1e-5)
