"""Gated RMSNorms over columns of which a rank will have some, found by running them."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping, Set

import torch
from torch import nn

from tpplan.compiled import WidthNorm
from tpplan.kernels.gated_norm import ACTIVATIONS, GatedForm, gated_norm, grouped_means
from tpplan.observe.likeness import identity
from tpplan.observe.trace import Call, Trace
from tpplan.observe.twins import called, twin_of
from tpplan.styles import Style

_ROWS = 3
_TOLERANCE = 1e-5  # of code that rounds to float32
_HUGE, _SMALL = 1e4, 1e-3
_GROUPS = 128


def gated_norms(
    model: nn.Module, styles: Mapping[str, Style], columns: Set[str], trace: Trace, tp: int
) -> dict[str, WidthNorm]:
    """The modules that are to run on columns and are such norms, each distinct kind run once.

    Left out are those whose own code is right on the columns of one of ``tp`` ranks, and those of
    several groups of which ranks would have parts: their code is found wrong on these.

    Args:
        columns: projections, which are none.
    """
    known: dict[Hashable, WidthNorm | None] = {}
    found: dict[str, WidthNorm] = {}
    for call in trace.calls:
        style = styles.get(call.path)
        if style is None or not (style.columns and style.probed) or call.path in {*columns, *found}:
            continue
        given = [n for n in call.arguments if n in trace.floating]
        shapes = {trace.shapes[n] for n in given}
        if len(given) != 2 or len(call.arguments) != 2 or len(shapes) != 1:
            continue
        (shape,) = shapes
        module = model.get_submodule(call.path)
        if [tuple(p.shape) for p in module.parameters()] != [shape[-1:]]:
            continue
        key = identity(module, call.path), str(call.given), shape
        if key not in known:
            known[key] = _Probe(module, call, given, shape, tp).found()
        norm = known[key]
        if norm is not None:
            found[call.path] = norm
    return found


class _Probe:
    """One module, on random numbers."""

    def __init__(
        self, module: nn.Module, call: Call, given: list[int], shape: tuple[int, ...], tp: int
    ) -> None:
        self.module, self.call, self.given, self.tp = module, call, given, tp
        self.width = shape[-1]
        sizes = (*(1 for _ in shape[:-2]), _ROWS, self.width)[-len(shape) :]
        generator = torch.Generator().manual_seed(2)
        self.twin = twin_of(module).eval()
        (self.weight,) = self.twin.parameters()
        dtype = self.weight.dtype
        self.x, self.gate, self.cotangent = (
            torch.randn(sizes, generator=generator, dtype=dtype) for _ in range(3)
        )

    def found(self) -> WidthNorm | None:
        try:
            for x, gate in itertools.permutations(self.given):
                norm = self._normalising(x, gate)
                if norm is not None:
                    form, eps, offset = norm
                    fits = form.groups % self.tp == 0 or self.tp % form.groups == 0
                    if not fits or self._serves():
                        return None
                    takes = self.call.arguments[x][0], self.call.arguments[gate][0]
                    return WidthNorm(self.width, eps, offset, gated=form, takes=takes)
        except Exception:  # code that minds its dtype, or the sizes
            return None
        return None

    def _normalising(self, x: int, gate: int) -> tuple[GatedForm, float, bool] | None:
        """What the norm is if it normalises the tensor ``x`` of its call, and ``gate`` gates it."""
        numbers = x, gate
        # of numbers so large that an eps does not show
        likely = [
            (form, offset)
            for form, offset in _forms(self.width)
            if self._is(numbers, _HUGE, form, 0.0, offset, False)
        ]
        stated = [v for v in vars(self.twin).values() if isinstance(v, float) and 0 < v < 1]
        for (form, offset), eps in itertools.product(likely, [*stated, 1e-5, 1e-6]):
            if all(self._is(numbers, size, form, eps, offset, True) for size in (1.0, _SMALL)):
                return form, eps, offset
        return None

    def _is(
        self,
        numbers: tuple[int, int],
        size: float,
        form: GatedForm,
        eps: float,
        offset: bool,
        deep: bool,
    ) -> bool:
        """Whether it computes that of numbers of a size; ``deep``: and sends back its gradients."""
        leaves = (self.x * size).requires_grad_(), self.gate.clone().requires_grad_()
        factor = 1 + self.weight if offset else self.weight

        def means(squares: torch.Tensor) -> torch.Tensor:
            return grouped_means(squares, form.groups)

        with torch.enable_grad():
            own = called(self.twin, self.call, dict(zip(numbers, leaves, strict=True)))
            theirs = gated_norm(*leaves, factor, form, means, eps)
            if not isinstance(own, torch.Tensor) or not _equal(own, theirs):
                return False
            wanted = [*leaves, self.weight] if deep else []
            sent = (
                torch.autograd.grad(y, wanted, self.cotangent) if deep else ()
                for y in (own, theirs)
            )
        return all(_equal(a, b) for a, b in zip(*sent, strict=True))

    def _serves(self) -> bool:
        """Whether its own code does with a rank's columns what it does with all of them."""
        twin = twin_of(self.module).eval()
        ((name, weight),) = twin.named_parameters()
        own = self.width // self.tp
        tensors = dict(zip(self.given, (self.x, self.gate), strict=True))
        parts = {n: x[..., -own:].contiguous() for n, x in tensors.items()}
        with torch.no_grad():
            whole = called(twin, self.call, tensors)
            owner, _, leaf = name.rpartition(".")
            twin.get_submodule(owner)._parameters[leaf] = nn.Parameter(weight[-own:].clone())
            try:
                part = called(twin, self.call, parts)
            except Exception:  # it counts on all groups
                return False
        return _equal(part, whole[..., -own:])


def _forms(width: int) -> Iterator[tuple[GatedForm, bool]]:
    groups = [n for n in range(1, min(width // 2, _GROUPS) + 1) if width % n == 0]
    for count, activation, first in itertools.product(groups, ACTIVATIONS, (True, False)):
        yield from ((GatedForm(count, activation, first), offset) for offset in (False, True))


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= _TOLERANCE * b.abs().max())
