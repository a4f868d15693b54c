"""What a module computes, found by running it on random numbers: never by its class.

Norm classes come from everywhere. What matters is whether a module works on each position by
itself, and whether it is a norm that a fused kernel could serve.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from tpplan.kernels.forms import NormForm
from tpplan.kernels.norm import reference
from tpplan.observe.chance import DROPOUT
from tpplan.observe.likeness import identity, told
from tpplan.observe.trace import Call, Numbered, Trace, stream_input
from tpplan.observe.twins import called, twin_of
from tpplan.styles import Style, runs_as

_ROWS = 4
# a length that no number of ranks divides, and where it is cut
_LENGTH, _CUTS = 29, (0, 1, 6, 17, 29)
# to the last digits, of numbers that code may round to float32
_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-4}
_LARGE = 2**25
_HUGE = 1e3

Run = Callable[[nn.Module, torch.Tensor], Any]
"""Calls a module as the model did, with another stream."""


@dataclass(frozen=True)
class Finding:
    """What was found of one module.

    Attributes:
        mixes: its result at one position depends on other positions, or on which it is.
        kind: "layer_norm" or "rms_norm" where it computes one, else None.
        form: how exactly, if a kernel computes the very same; else None.
        offset, eps: of a norm, as in its form; names: of its scale and its shift, if it has them.
        exact: whether it is that norm to the last digits, gradients included.
        fails: why it could not be run on random numbers.
    """

    mixes: bool
    kind: str | None
    form: NormForm | None = None
    offset: bool = False
    eps: float = 0.0
    names: tuple[str, ...] = ()
    exact: bool = False
    fails: str | None = None


def probe_modules(
    model: nn.Module,
    styles: Mapping[str, Style],
    columns: Set[str],
    traces: Sequence[Trace],
    dim: int,
) -> dict[str, Finding]:
    """Probe the modules that are not projections; each distinct kind once.

    Modules that take more than the stream, or something other than activations, and very large
    ones are left out: they are taken at the plan's word.

    Args:
        traces: in evaluation and in training; dim: the sequence dimension.
    """
    trace, drawing = traces
    drawn = _drawing(drawing, model)
    known: dict[Hashable, Finding] = {}
    found = {}
    for path, style in styles.items():
        call = next((c for c in trace.calls if c.path == path), None)
        if not style.probed or path in columns or call is None:
            continue
        number = stream_input(trace, call)
        if number is None or len(call.arguments) != 1:
            continue
        module = model.get_submodule(path)
        if isinstance(module, nn.Embedding):
            continue  # of positions: what it is given only tells it how many
        if runs_as(module, nn.Linear):
            found[path] = Finding(False, None)
            continue
        if sum(p.numel() for p in module.parameters()) > _LARGE:
            continue
        key = identity(module, path), _given(call, number), trace.shapes[number], path in drawn
        if key not in known:
            modes = (False,) if path in drawn else (False, True)
            known[key] = _probe(module, call, number, trace.shapes[number], dim, modes)
        found[path] = known[key]
    return found


def _given(call: Call, number: int) -> Hashable:
    """What a module is called with, besides the stream."""
    return told(tree_map_only(Numbered, lambda n: n.number == number, call.given))


def _drawing(trace: Trace, model: nn.Module) -> set[str]:
    """The modules inside of which random numbers are drawn, other than by a dropout module."""
    drawing = {op.call for op in trace.ops if op.random}
    return {
        around.path
        for index in drawing
        if not isinstance(model.get_submodule(trace.calls[index].path), DROPOUT)
        for around in trace.ancestors(index)
    }


def _probe(
    module: nn.Module,
    call: Call,
    number: int,
    shape: tuple[int, ...],
    dim: int,
    modes: Sequence[bool],
) -> Finding:
    def run(twin: nn.Module, x: torch.Tensor) -> Any:
        return called(twin, call, {number: x})

    failure = ""
    for dtype in _TOLERANCES:
        try:
            twins = (twin_of(module, dtype).train(mode) for mode in modes)
            found = Finding(any(_mixes(twin, run, shape, dim, dtype) for twin in twins), None)
        except Exception as error:  # code that minds its dtype, or the sizes
            failure = failure or f"{type(error).__name__}: {error}"
            continue
        try:
            return found if found.mixes else _norm(module, run, shape, found, modes, dtype)
        except Exception:
            return found
    # a replicated module of the sharded region may want its heads in a dimension of theirs
    return Finding(True, None, fails=failure)


def _random(dtype: torch.dtype, *size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(size, generator=generator, dtype=dtype) + 0.5


# --- does it mix positions


def _mixes(twin: nn.Module, run: Run, shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> bool:
    """Whether rows of the sequence, run by themselves, answer otherwise than among the others."""
    dim = min(dim, len(shape) - 2)
    if dim < 0:
        return False
    sizes = [min(n, 2) if d == 0 and len(shape) > 2 else n for d, n in enumerate(shape)]
    sizes[dim] = _LENGTH
    x = _random(dtype, *sizes).requires_grad_()
    with torch.enable_grad():
        whole = _rows(run(twin, x), dim, _LENGTH)
        if whole is None:
            return True
        cotangent = _random(whole.dtype, *whole.shape)
        pieces = [slice(a, b) for a, b in itertools.pairwise(_CUTS)]
        at = (slice(None),) * dim
        found = (_rows(run(twin, x[*at, s]), dim, s.stop - s.start) for s in pieces)
        parts = [p for p in found if p is not None]
        if [p.shape for p in parts] != [whole[*at, s].shape for s in pieces]:
            return True
        if not _equal(whole, torch.cat(parts, dim)):
            return True
        if not whole.requires_grad:
            return False
        leaves = [x, *(p for p in twin.parameters() if p.requires_grad)]
        one, other = (
            torch.autograd.grad(out, leaves, cotangent, allow_unused=True)
            for out in (whole, torch.cat(parts, dim))
        )
    return not all(a is b or _equal(a, b) for a, b in zip(one, other, strict=True))


def _rows(out: Any, dim: int, length: int) -> torch.Tensor | None:
    """All that a module gives, position by position; None where some of it has other positions."""
    tensors = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
    if not tensors or any(t.dim() <= dim or t.size(dim) != length for t in tensors):
        return None
    return torch.cat([t.reshape(*t.shape[: dim + 1], -1) for t in tensors], -1)


# --- is it a norm


def _norm(
    module: nn.Module,
    run: Run,
    shape: tuple[int, ...],
    found: Finding,
    modes: Sequence[bool],
    dtype: torch.dtype,
) -> Finding:
    """What was found, and which norm the module is, if any."""
    sizes = (1,) * (len(shape) - 2) + (_ROWS, shape[-1])
    x = _random(dtype, *sizes[-len(shape) :])
    twin = twin_of(module, dtype).eval()
    with torch.no_grad():
        # numbers so large that an eps does not show
        names = _names(twin, run, _HUGE * x)
        norm = _formula(twin, _HUGE * x, run(twin, _HUGE * x), names)
        if norm is None:
            return found
        norm = replace(norm, eps=_eps(twin, run, x, norm))
    exact = all(_exactly(twin.train(mode), run, x, norm) for mode in modes)
    with torch.no_grad():
        narrow = twin_of(module, torch.float32).eval()
        form = _form(narrow, run, x.float(), norm) if exact else None
    return Finding(found.mixes, norm.kind, form, norm.offset, norm.eps, names, exact)


@dataclass(frozen=True)
class _Norm:
    """Which norm it is, and of which parameters: none, a scale, a scale and a shift."""

    kind: str
    offset: bool
    names: tuple[str, ...]
    eps: float = 0.0

    def affine(self, module: nn.Module) -> tuple[torch.Tensor | float, torch.Tensor | float]:
        """By what it multiplies, and what it adds."""
        held = [module.get_parameter(name) for name in self.names]
        scale, shift = held[0] if held else 1.0, held[1] if len(held) > 1 else 0.0
        return (1 + scale if self.offset else scale), shift

    def of(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """What it makes of ``x``."""
        scale, shift = self.affine(module)
        return _unit(x, self.kind, self.eps) * scale + shift


def _names(module: nn.Module, run: Run, x: torch.Tensor) -> tuple[str, ...]:
    """The parameters that may scale and shift ``x``, a scale first: norms are odd but for a shift.

    In whichever order the module holds them: one that is put anew stands last.
    """
    found = [name for name, p in module.named_parameters() if p.shape == x.shape[-1:]]
    if len(found) == 2:
        here, there = run(module, x), run(module, -x)
        if isinstance(here, torch.Tensor) and isinstance(there, torch.Tensor):
            middle, first = (here + there) / 2, module.get_parameter(found[0])
            if _equal(middle, first.expand_as(middle), 1e-3):
                found.reverse()
    return tuple(found)


def _formula(
    module: nn.Module, x: torch.Tensor, result: torch.Tensor, names: tuple[str, ...]
) -> _Norm | None:
    """Which norm ``module`` is, if any; some models keep the scale as an offset from one."""
    if not isinstance(result, torch.Tensor) or len(names) > 2:
        return None
    for kind in ("layer_norm", "rms_norm"):
        for offset in (False, True):
            norm = _Norm(kind, offset, names)
            if _equal(result, norm.of(module, x), 1e-3):
                return norm
    return None


def _unit(x: torch.Tensor, kind: str, eps: float) -> torch.Tensor:
    top = x - x.mean(-1, keepdim=True) if kind == "layer_norm" else x
    return top * (top.pow(2).mean(-1, keepdim=True) + eps).rsqrt()


def _eps(module: nn.Module, run: Run, x: torch.Tensor, norm: _Norm) -> float:
    """What the norm adds to the mean of squares, from its answer to very small numbers.

    The module states it under one of many names: its attribute that is nearest is taken.
    """
    scale, shift = norm.affine(module)
    small = x * 1e-3
    result = run(module, small) - shift
    if norm.kind == "layer_norm":
        small = small - small.mean(-1, keepdim=True)
    root = (small * scale).abs().sum(-1) / result.abs().sum(-1)
    solved = float((root.square() - small.square().mean(-1)).mean())
    stated = [v for v in vars(module).values() if isinstance(v, float) and 0 < v < 1]
    return min(stated, key=lambda v: abs(v - solved), default=max(float(f"{solved:.5g}"), 0.0))


def _exactly(module: nn.Module, run: Run, x: torch.Tensor, norm: _Norm) -> bool:
    """Whether the module is the norm of that formula, gradients included."""
    vectors = [module.get_parameter(name) for name in norm.names]
    if len(vectors) != len(list(module.parameters())):
        return False
    cotangent = _random(x.dtype, *x.shape).flip(-1)
    for given in (x, x - 1, x * 1e-3):
        with torch.enable_grad():
            leaf = given.clone().requires_grad_()
            results = [
                (y, *torch.autograd.grad(y, [leaf, *vectors], cotangent, allow_unused=True))
                for y in (run(module, leaf), norm.of(module, leaf))
            ]
        if not all(_equal(a, b) for a, b in zip(*results, strict=True)):
            return False
    return True


def _form(module: nn.Module, run: Run, x: torch.Tensor, norm: _Norm) -> NormForm | None:
    """The form in which the kernel's formula answers as ``module`` does, also in bfloat16."""
    if not norm.names or any("." in name for name in norm.names):
        return None  # kernels scale by what the module itself holds
    weight, bias = (*norm.names, None)[:2]
    assert weight is not None
    centred, offset = norm.kind == "layer_norm", float(norm.offset)
    wide, narrow = module, copy.deepcopy(module).to(torch.bfloat16)
    for early in (False, True):
        form = NormForm(centred, norm.eps, offset, early, weight, bias)
        if all(
            _same(computed(twin, form, given), run(twin, given), tolerance)
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


def _equal(a: Any, b: Any, tolerance: float | None = None) -> bool:
    if a is None or b is None or a.shape != b.shape:
        return False
    tolerance = tolerance or _TOLERANCES.get(b.dtype, 0.0)
    return bool((a - b).abs().max() <= tolerance * b.abs().max())
