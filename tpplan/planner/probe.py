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

from tpplan.kernels.norm import reference
from tpplan.planner.forms import NormForm
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
        form: how exactly, if a kernel computes the very same; else None.
        offset, eps: of a norm, as in its form.
    """

    mixes: bool
    kind: str | None
    form: NormForm | None = None
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
        mixes = not _equal(whole, rows)
        if kind is None or mixes:
            return Finding(mixes, kind)
        eps = _eps(twin, x, kind, offset)
        return Finding(mixes, kind, _form(twin, x, kind, offset, eps), offset, eps)


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
    weight, *shift = (p for p in module.parameters() if p.shape == x.shape[-1:])
    small = (x * 1e-3).double()
    if kind == "layer_norm":
        small = small - small.mean(-1, keepdim=True)
    result = module(x * 1e-3).double() - (shift[0] if shift else 0.0)
    root = (small * (1 + weight if offset else weight)).abs().sum() / result.abs().sum()
    solved = float(root.square() - small.square().mean())
    stated = [v for v in vars(module).values() if isinstance(v, float) and 0 < v < 1e-2]
    return min(stated, key=lambda v: abs(v - solved), default=max(solved, 0.0))


def _form(
    module: nn.Module, x: torch.Tensor, kind: str, offset: bool, eps: float
) -> NormForm | None:
    """The form in which the kernel's formula answers as ``module`` does, also in bfloat16."""
    own = {name: p for name, p in module.named_parameters() if p.shape == x.shape[-1:]}
    if any("." in name for name in own) or len(own) != len(list(module.parameters())):
        return None
    names = (*own, None)[:2]
    wide, narrow = (copy.deepcopy(module).to(dtype) for dtype in (torch.float32, torch.bfloat16))
    for early in (False, True):
        form = NormForm(kind == "layer_norm", eps, float(offset), early, names[0], names[1])
        if all(
            _same(computed(twin, form, given), twin(given), tolerance)
            for twin, given, tolerance in (
                (wide, x - 1, 1e-5),
                (wide, x * 1e-3, 1e-5),
                (narrow, x.bfloat16(), 0.0),
            )
        ):
            return form
    return None


def computed(module: nn.Module, form: NormForm, x: torch.Tensor) -> torch.Tensor:
    """What the kernel of ``form`` makes of ``x`` with the parameters of ``module``."""
    weight, bias = (None if n is None else module.get_parameter(n) for n in form.names)
    return reference(x, weight, bias, form.eps, form.centred, form.offset, form.early)[0]


def _same(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    """Whether two results agree; in 16 bits nearly all numbers have to be the same."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if tolerance:
        return bool((a - b).abs().max() <= tolerance * b.abs().max())
    return bool((a == b).float().mean() >= 0.97)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-3)
