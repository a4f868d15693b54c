"""What a module computes, found by running it on random numbers: never by its class.

Norm classes come from everywhere. What matters is whether a module works on each position by
itself, and whether it is a norm that a fused kernel could serve.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tpplan.planner.infer import stream_input
from tpplan.planner.trace import Trace

_ROWS = 4
_PROBED = frozenset({"sequence_parallel", "replicate", "colwise"})


@dataclass(frozen=True)
class Finding:
    """What was found of one module.

    Attributes:
        mixes: its result at one position depends on other positions.
        kind: "layer_norm" or "rms_norm" where it computes one, else None.
        offset: its scale is stored less one.
        eps: what the norm adds to the mean of squares.
    """

    mixes: bool
    kind: str | None
    offset: bool = False
    eps: float = 0.0


def probe_modules(
    model: nn.Module, styles: Mapping[str, str], columns: Set[str], trace: Trace
) -> dict[str, Finding]:
    """Probe the modules that are not projections; each distinct kind once.

    Modules that take more than the stream, or something other than activations, are left out:
    they are taken at the plan's word.
    """
    known: dict[Any, Finding] = {}
    found = {}
    for path, style in styles.items():
        call = next((c for c in trace.calls if c.path == path), None)
        if style not in _PROBED or path in columns or call is None:
            continue
        number = stream_input(trace, call)
        if number is None or len(call.arguments) != 1:
            continue
        module = model.get_submodule(path)
        if isinstance(module, nn.Embedding):
            continue  # of positions: what it is given only tells it how many
        width = trace.shapes[number][-1]
        shapes = tuple(tuple(p.shape) for p in module.parameters())
        key = (type(module), repr(module), shapes, width)
        if key not in known:
            known[key] = _probe(module, width)
        found[path] = known[key]
    return found


def _probe(module: nn.Module, width: int) -> Finding:
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.rand(size, generator=generator) + 0.5

    memo: dict[int, Any] = {
        id(p): nn.Parameter(random(*p.shape), requires_grad=False) for p in module.parameters()
    }
    twin = copy.deepcopy(module, memo).eval()
    x = random(1, _ROWS, width)
    with torch.no_grad():
        try:
            whole = twin(x)
        except (RuntimeError, ValueError, IndexError):
            # a replicated module of the sharded region may want its heads in a dimension of theirs
            return Finding(True, None)
        if not isinstance(whole, torch.Tensor):
            return Finding(False, None)
        rows = torch.cat([twin(x[:, i : i + 1]) for i in range(_ROWS)], dim=1)
    kind, offset = _kind(twin, x, whole)
    eps = 0.0 if kind is None else _eps(twin, x, kind, offset)
    return Finding(not _equal(whole, rows), kind, offset, eps)


def _kind(module: nn.Module, x: torch.Tensor, result: torch.Tensor) -> tuple[str | None, bool]:
    """Which norm ``module`` is: of its parameters, the first scales and a second one shifts."""
    vectors = [p for p in module.parameters() if p.shape == x.shape[-1:]]
    if not 1 <= len(vectors) <= 2:
        return None, False
    scale, shift = vectors[0], vectors[1] if len(vectors) == 2 else 0.0
    centred = x - x.mean(-1, keepdim=True)
    for kind, top in (("layer_norm", centred), ("rms_norm", x)):
        unit = top * top.pow(2).mean(-1, keepdim=True).rsqrt()
        # some models keep the scale as an offset from one
        for offset, factor in ((False, scale), (True, 1 + scale)):
            if _equal(result, unit * factor + shift):
                return kind, offset
    return None, False


def _eps(module: nn.Module, x: torch.Tensor, kind: str, offset: bool) -> float:
    """What the norm adds to the mean of squares, from its answer to very small numbers.

    The module states it under one of many names: its attribute that is nearest is taken.
    """
    if kind != "rms_norm":
        return 0.0
    small = x * 1e-3
    weight = next(p for p in module.parameters() if p.shape == x.shape[-1:])
    ratio = small * (1 + weight if offset else weight) / module(small)
    solved = float(
        (ratio.double().square() - small.double().square().mean(-1, keepdim=True)).mean()
    )
    stated = [v for v in vars(module).values() if isinstance(v, float) and 0 < v < 1e-2]
    return min(stated, key=lambda v: abs(v - solved), default=solved)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-3)
