"""A model that computes what the user's does, on numbers of its own, at a cost that does not grow.

The modules are copies of the user's, hooks included. Small tensors have random values in float64;
a large matrix has few rows or columns, whichever no rank cuts, and a fixed random factor beside it
that makes up for the size: its product is a product by a matrix of low rank, cut over the ranks as
the large one would be. Of equal elements of the stack two and the last are run.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.placement_types import Placement, Shard

from tpplan.compiled import CompiledPlan, Element, ModulePlan
from tpplan.language import FrozenMap
from tpplan.layout import Rows
from tpplan.observe.likeness import identity
from tpplan.observe.twins import buffer_like, held_by, keep_in_tables
from tpplan.places import taken, with_at
from tpplan.proof.thin_experts import Narrow, narrow_down, thin_experts, with_thin
from tpplan.styles import named

_LARGE = 2**16
_RANK = 8
# numbers of float64 that a proof may hold, the unsharded model and a copy on every rank: 8 GiB
_MOST = 2**30


class Thin:
    """A product by a matrix of low rank, of which one factor is fixed and the other a parameter.

    Attributes:
        factor: (in, rank) where it comes before the parameter, (rank, out) where it comes after.
        transposed: whether the parameter is stored (in, out).
    """

    def __init__(self, factor: torch.Tensor, before: bool, transposed: bool) -> None:
        self.factor, self.before, self.transposed = factor, before, transposed

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``x`` (..., in) times ``weight``, as it is stored, and the factor."""
        weight = weight.t() if self.transposed else weight
        out = (
            F.linear(x @ self.factor, weight) if self.before else F.linear(x, weight) @ self.factor
        )
        return out if bias is None else out + bias


class Wide:
    """Rows of a table, each a few numbers, made as wide as they are."""

    def __init__(self, factor: torch.Tensor) -> None:
        self.factor = factor

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """(..., rank) to (..., width)."""
        return rows @ self.factor


class Missed:
    """Whether other code looked for what an element that is not run has, or would keep."""

    def __init__(self) -> None:
        self.anything = False

    def __deepcopy__(self, memo: Any) -> Missed:
        return self


class Passing:
    """The forward of an element that is not run: the stream as it came, the rest as it was before.

    ``last``: what an element like it gave; ``missed``: of all that are not run.
    """

    def __init__(self, element: Element, last: list[Any], missed: Missed) -> None:
        self.element, self.last, self.missed = element, last, missed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the caller of the element gets."""
        stream = taken(self.element.argument, args, kwargs)
        return with_at(self.last[0], self.element.output, stream) if self.element.output else stream


class _Kept:
    """A forward hook that keeps what an element gave."""

    def __init__(self, last: list[Any]) -> None:
        self.last = last

    def __call__(self, module: nn.Module, args: Any, out: Any) -> None:
        self.last[:] = [out]


class TooLargeError(ValueError):
    """The model holds tensors that no factor can stand for."""


def miniature(
    model: nn.Module, compiled: CompiledPlan, skip: bool = True, thin: bool = True
) -> tuple[nn.Module, CompiledPlan]:
    """A model to prove ``compiled`` on, and the plan for it; ``model`` is not changed.

    Args:
        skip: whether equal elements of the stack are passed by.
        thin: whether large matrices have a low rank.

    Raises:
        TooLargeError: where it would not fit.
    """
    generator = torch.Generator().manual_seed(0)
    skipped, lasts = _skipped(model, compiled) if skip else ({}, {})
    memo: dict[int, Any] = {}
    missed = Missed()
    for path, last in skipped.items():
        original = model.get_submodule(path)
        element = compiled.modules[path].element
        assert element is not None
        memo[id(original)] = _passing(original, Passing(element, last, missed))
    modules = {
        path: module
        for path, module in model.named_modules()
        if not any(path == s or path.startswith(f"{s}.") for s in skipped)
    }
    narrow = _thin(modules, compiled) if thin else {}
    budget = _MOST // (compiled.tp * compiled.ep + compiled.ep + 1)
    experts = thin_experts(modules, compiled) if thin else {}
    for path, few in experts.items():
        for leaf, shape in few.shapes.items():
            value = modules[path].get_parameter(leaf)
            memo[id(value)] = _twin(value, None, generator, shape)
    for value in (value for module in modules.values() for value in held_by(module)):
        if id(value) not in memo:
            dim = narrow.get(id(value)) if isinstance(value, nn.Parameter) else None
            budget -= value.numel() if dim is None else value.numel() // value.shape[dim]
            if budget < 0:
                raise TooLargeError("its tensors are too large to compute with")
            memo[id(value)] = _twin(value, dim, generator)
    twin_model = copy.deepcopy(model, memo)
    keep_in_tables(twin_model, model)
    for path, module in modules.items():
        _factor(
            module, twin_model.get_submodule(path), compiled.modules.get(path), narrow, generator
        )
    for path, few in experts.items():
        narrow_down(twin_model.get_submodule(path), few, generator)
    for path, last in lasts.items():
        twin_model.get_submodule(path).register_forward_hook(_Kept(last))
    plans = {p: _of_kept(q, modules) for p, q in compiled.modules.items() if p in modules}
    kernels = dict.fromkeys(compiled.kernels, "torch")
    small = replace(compiled, modules=FrozenMap(plans), kernels=FrozenMap(kernels))
    return twin_model, with_thin(small, experts)


def _skipped(
    model: nn.Module, compiled: CompiledPlan
) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """The elements that are passed by, and those whose results they give, with where they are."""
    rules = {path: plan.rule for path, plan in compiled.modules.items() if plan.rule is not None}
    alike: dict[Any, list[str]] = {}
    for path, plan in compiled.modules.items():
        if plan.element is not None and path:
            key = (identity(model.get_submodule(path), path, rules), plan.element)
            alike.setdefault(key, []).append(path)
    skipped: dict[str, list[Any]] = {}
    lasts: dict[str, list[Any]] = {}
    for paths in alike.values():
        # where what they do hangs on more than what they are, all are run
        if len(paths) > 3 and len({compiled.modules[path].ran for path in paths[1:]}) == 1:
            last: list[Any] = []
            skipped.update((path, last) for path in paths[2:-1])
            lasts[paths[1]] = last
    return skipped, lasts


def _of_kept(plan: ModulePlan, kept: Mapping[str, nn.Module]) -> ModulePlan:
    """A module's plan among the modules that are there, by torch's own operators."""
    boundaries = (
        replace(
            boundary,
            consumers=tuple(path for path in boundary.consumers if path in kept),
            shared=tuple(path for path in boundary.shared if path in kept),
        )
        for boundary in plan.boundaries
    )
    return replace(plan, kernel=None, boundaries=tuple(b for b in boundaries if b.consumers))


def _passing(module: nn.Module, forward: Passing) -> nn.Module:
    twin = copy.copy(module)
    for table in ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"):
        object.__setattr__(twin, table, type(vars(module)[table])())
    twin.forward = forward  # type: ignore[method-assign]
    kind = type(module)

    def missing(self: nn.Module, name: str) -> Any:
        forward.missed.anything |= not name.startswith("_")
        return kind.__getattr__(self, name)

    own = {"__getattr__": missing, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    twin.__class__ = type(kind.__name__, (kind,), own)
    return twin


def misses(small: nn.Module) -> bool:
    """Whether code read of an element that is not run what only one that is has."""
    forwards = (vars(module).get("forward") for module in small.modules())
    return any(isinstance(f, Passing) and f.missed.anything for f in forwards)


def _thin(modules: Mapping[str, nn.Module], compiled: CompiledPlan) -> dict[int, int]:
    """The large matrices that can be thin, by identity: along which dimension."""
    wanted: dict[int, set[int | None]] = {}
    for path, module in modules.items():
        plan = compiled.modules.get(path)
        around = compiled.modules.get(path.rpartition(".")[0])
        apart = around is not None and around.multihead  # which reads its projection's weight
        for leaf, parameter in module._parameters.items():
            if parameter is not None and parameter.dim() == 2 and parameter.numel() > _LARGE:
                dim = None
                if leaf == "weight" and not apart:
                    name = f"{path}.{leaf}" if path else leaf
                    dim = _uncut(module, plan, compiled.parameter(name).placement)
                wanted.setdefault(id(parameter), set()).add(dim)
    return {key: dims.pop() for key, dims in wanted.items() if len(dims) == 1 and None not in dims}  # type: ignore[misc]


def _uncut(module: nn.Module, plan: ModulePlan | None, placement: Placement) -> int | None:
    """The dimension of a module's weight that no rank cuts; None where it is not a mere product."""
    if plan is not None and named(plan.style).multiplies(plan, module):
        out, into = module._parameters["weight"].shape  # type: ignore[union-attr]
        return int(into >= out)
    # the others run their own code on the weight as it is
    if plan is None or not (plan.projection or named(plan.style).answers):
        return None
    cut = placement.dim if isinstance(placement, Shard | Rows) else 0
    return None if isinstance(module, nn.Embedding) and cut else 1 - cut


def _factor(
    module: nn.Module,
    twin: nn.Module,
    plan: ModulePlan | None,
    thin: Mapping[int, int],
    generator: torch.Generator,
) -> None:
    weight = module._parameters.get("weight")
    dim = thin.get(id(weight))
    if dim is None or weight is None:
        return

    def drawn(rows: int, columns: int) -> torch.Tensor:
        drawn = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
        return drawn.div_(rows**0.5)

    size = weight.shape[dim]
    if isinstance(module, nn.Embedding):
        vars(twin)["_tpplan_widen"] = Wide(drawn(_RANK, size))
        return
    transposed = plan is not None and plan.transposed
    before = dim == (0 if transposed else 1)
    factor = drawn(size, _RANK) if before else drawn(_RANK, size)
    vars(twin)["_tpplan_project"] = Thin(factor, before, transposed)


def _twin(
    value: torch.Tensor,
    dim: int | None,
    generator: torch.Generator,
    shaped: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """A tensor of the same kind with numbers of its own, thin along ``dim``, or ``shaped`` so."""
    if not isinstance(value, nn.Parameter):
        return _copied(value, generator)
    shape = list(value.shape if shaped is None else shaped)
    if dim is not None:
        shape[dim] = _RANK
    if not (value.is_floating_point() or value.is_complex()):
        return nn.Parameter(_copied(value, generator), requires_grad=False)
    dtype = torch.complex128 if value.is_complex() else torch.float64
    if value.dim() >= 2:
        drawn = torch.randn(shape, generator=generator, dtype=dtype)
        drawn /= max(1, drawn.numel() // shape[0]) ** 0.5
    else:
        drawn = torch.rand(shape, generator=generator, dtype=dtype) + 0.5
    twin = nn.Parameter(drawn, requires_grad=value.requires_grad)
    vars(twin).update(vars(value))
    for hook in (value._backward_hooks or {}).values():
        if value.requires_grad:
            twin.register_hook(hook)
    return twin


def _copied(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The values of a buffer, or likely ones where it is on the meta device."""
    copied = buffer_like(value, generator, torch.float64)
    return copied.to(torch.complex128) if copied.is_complex() and not value.is_meta else copied


def on_rank(model: nn.Module, compiled: CompiledPlan) -> nn.Module:
    """A copy to be rewritten: at tp 1, where experts alone are, other thin modules are as whole."""
    return copy.deepcopy(model) if compiled.tp > 1 else unsharded(model, experts=False)


def unsharded(model: nn.Module, experts: bool = True) -> nn.Module:
    """A copy whose thin modules compute by themselves: the model before any rank has a part.

    ``experts``: whether thin experts are among them.
    """
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if isinstance(vars(module).get("_tpplan_project"), Thin):
            module.__class__ = type(type(module).__name__, (_Product, type(module)), {})
        elif experts and "_tpplan_narrow" in vars(module):
            kind = type(module)
            module.__class__ = type(kind.__name__, (_Narrowed, kind), {})
        elif "_tpplan_widen" in vars(module):
            own = () if type(module) is nn.Embedding else (type(module),)
            module.__class__ = type(type(module).__name__, (*own, _Table), {})
    return twin


class _Product(nn.Module):
    _tpplan_project: Thin
    bias: torch.Tensor | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self._parameters["weight"]
        assert weight is not None
        return self._tpplan_project(input, weight, self._parameters.get("bias"))


class _Narrowed(nn.Module):
    _tpplan_narrow: Narrow

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._tpplan_narrow(super().forward, (args, kwargs))


class _Table(nn.Embedding):
    _tpplan_widen: Wide

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self._tpplan_widen(F.embedding(input, self.weight, self.padding_idx))
