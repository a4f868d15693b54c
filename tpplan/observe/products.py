"""Which modules do nothing but multiply by their weight, shown by numbers, gradients included."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Hashable

import torch
import torch.nn.functional as F
from torch import nn

from tpplan.observe.likeness import identity
from tpplan.observe.trace import Call, Trace, stream_input
from tpplan.observe.twins import called, twin_of
from tpplan.styles import runs_as

_SMALL, _LARGE = 2**18, 2**24
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5}
# sizes of a large module's narrow copy
_IN, _OUT = 24, 40
_SCALES = (1.0, 100.0)


class Products:
    """Finds how projections are stored; each kind of module is run once."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._known: dict[Hashable, str | None] = {}

    def orientation(self, trace: Trace, path: str) -> str | None:
        """How a module multiplies by its weight: "linear" (out, in), "transposed", or None.

        None where it computes anything else, in training or in evaluation.
        """
        module = self.model.get_submodule(path)
        if runs_as(module, nn.Linear):
            return "linear"
        call = next((c for c in trace.calls if c.path == path), None)
        number = None if call is None else stream_input(trace, call)
        weight = module._parameters.get("weight")
        if call is None or number is None or weight is None or weight.dim() != 2:
            return None
        if any(True for _ in module.children()) or set(module._parameters) - {"weight", "bias"}:
            return None
        dims = len(trace.shapes[number])
        key = identity(module, path), dims
        if key not in self._known:
            self._known[key] = _orientation(module, call, number, dims)
        return self._known[key]


def _orientation(module: nn.Module, call: Call, number: int, dims: int) -> str | None:
    weight = module._parameters["weight"]
    assert weight is not None
    tried = [_narrow(module)] if weight.numel() > _SMALL else []
    if weight.numel() <= _LARGE:
        tried.append(lambda dtype: twin_of(module, dtype))  # code that minds the sizes
    for make, dtype in itertools.product(tried, _TOLERANCES):
        answers: dict[str, bool] = {}
        for kind in ("linear", "transposed"):
            with contextlib.suppress(Exception):  # it cannot be called so
                twin, modes = make(dtype), (False, True)
                answers[kind] = all(_multiplies(twin, kind, call, number, dims, t) for t in modes)
        found = next((kind for kind, fits in answers.items() if fits), None)
        if found is not None or (answers and dtype is torch.float64):
            return found
    return None


def _narrow(module: nn.Module) -> Callable[[torch.dtype], nn.Module]:
    """Makes a copy with small sizes in the place of the weight's, wherever they stand."""
    weight = module._parameters["weight"]
    assert weight is not None
    sizes = dict(zip(weight.shape, (_OUT, _IN), strict=True))

    def shape_of(parameter: nn.Parameter) -> tuple[int, ...]:
        return tuple(sizes.get(n, n) for n in parameter.shape)

    def make(dtype: torch.dtype) -> nn.Module:
        twin = twin_of(module, dtype, shape_of)
        for name, value in vars(twin).items():
            if type(value) is int and value in sizes:
                object.__setattr__(twin, name, sizes[value])
        return twin

    return make


def _multiplies(
    twin: nn.Module, kind: str, call: Call, number: int, dims: int, training: bool
) -> bool:
    weight, bias = twin._parameters["weight"], twin._parameters.get("bias")
    assert weight is not None
    matrix = weight if kind == "linear" else weight.t()
    generator = torch.Generator().manual_seed(1)
    shape = (*(2, 3, 2, 2)[: dims - 1], matrix.shape[1])
    with torch.enable_grad():
        for scale in _SCALES:
            x = scale * torch.randn(shape, generator=generator, dtype=weight.dtype)
            x.requires_grad_()
            wanted = F.linear(x, matrix, bias)
            out = called(twin.train(training), call, {number: x})
            if not isinstance(out, torch.Tensor) or out.shape != wanted.shape:
                return False
            leaves = [t for t in (x, weight, bias) if t is not None]
            cotangent = torch.randn(out.shape, generator=generator, dtype=wanted.dtype)
            pairs = [(out, wanted)]
            given, due = (
                torch.autograd.grad(y, leaves, cotangent, allow_unused=True) for y in (out, wanted)
            )
            pairs += zip(given, due, strict=True)
            if not all(_equal(a, b) for a, b in pairs):
                return False
    return True


def _equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None or a.dtype != b.dtype:
        return False
    return bool((a - b).abs().max() <= _TOLERANCES[b.dtype] * b.abs().max())
