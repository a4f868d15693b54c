"""One step of a proof: forward, backward, and what of it a rank must have."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import keystr, tree_map_with_path

from tpplan.comm.placements import part_of
from tpplan.compat import local_of, unmoded
from tpplan.compiled import CompiledPlan
from tpplan.observe.calls import Call
from tpplan.observe.numbers import difference, largest
from tpplan.observe.trace import attributes_of
from tpplan.proof.calls import other_batch
from tpplan.proof.noted import Notes, noting

TOLERANCE = 1e-7
ROUNDING = 1e-4
"""What is beyond this is a mistake, whatever the model's own rounding is."""
TIMES = 10.0
"""Of the model's own rounding: what is below is no mistake."""
LOUD = 32.0
"""How much larger large numbers are; a power of two, which weights are divided by without loss."""


@dataclass(frozen=True)
class Scene:
    """One step: what the model is called with, and in which mode.

    ``scale``: of the activations. ``louder``: parameters that are ``LOUD`` times larger meanwhile:
    what enters regions through them may come from a norm, which takes a scale away. ``objective``:
    what is differentiated is that many times larger. ``optional``: whether the rewritten model may
    refuse it. ``plain``: the inputs, by place, of which no gradient is wanted: what the model's
    code does with them has none.
    """

    what: str
    call: Call
    training: bool = False
    scale: float = 1.0
    louder: frozenset[str] = frozenset()
    objective: float = 1.0
    optional: bool = False
    plain: frozenset[str] = frozenset()

    def on(self, number: int) -> Scene:
        """The same step of the rank of ep with that number, which has another batch."""
        return replace(self, call=other_batch(self.call, number)) if number else self


@dataclass
class Result:
    """What a step gave: outputs by place, gradients of parameters and inputs, buffers after it.

    ``written``: the parameters whose numbers are others after it. ``weights``: of the outputs in
    the objective. ``notes``: of the forward; ``later``: of the backward. ``scales``: the largest
    number of each tensor that others were compared with, by its ``id``.
    """

    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    inputs: dict[str, torch.Tensor | None] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    written: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    notes: Notes = field(default_factory=Notes)
    later: Notes = field(default_factory=Notes)
    scales: dict[int, float] = field(default_factory=dict)

    def largest(self, x: torch.Tensor) -> float:
        """The largest number of one of its outputs or gradients."""
        known = self.scales.get(id(x))
        if known is None:
            known = self.scales[id(x)] = _largest(x)
        return known

    def measure(self) -> None:
        """Look for the largest of each once, since all ranks ask for them."""
        for x in (*self.outputs.values(), *self.gradients.values(), *self.inputs.values()):
            if x is not None:
                self.largest(x)


def step(
    model: nn.Module,
    scene: Scene,
    seed: int = 0,
    due: Result | None = None,
    parts: Set[str] = frozenset(),
) -> Result:
    """Forward and backward; the objective weighs every element of every output differently.

    What modules keep as attributes, and is a function of parameters, is an output as well.

    ``due``: what the unsharded model gave, on a rank. ``parts``: attributes of which ranks have
    their parts.
    """
    model.train(scene.training)
    model.zero_grad(set_to_none=True)
    args, kwargs, given = leaves_of(scene.call, scene.plain)
    tables = () if scene.scale == 1.0 or given else _tables(model)
    with _times(scene.scale, tables), _times(LOUD, _named(model, scene.louder)):
        before, old = _sums(model), {id(t): t for t in _kept(model, parts).values()}
        with noting(model) as notes:
            found = outputs_of(model(*args, **kwargs))
        found.update((n, t) for n, t in _kept(model, parts).items() if id(t) not in old)
        weights = _drawn(found, seed) if due is None else due.weights
        outs, cotangents = _differentiated(found, weights, scene.objective)
        with noting(model) as later:
            if outs:
                # not a tensor's backward(), which is a function of torch's to a mode: what backward
                # recomputes would be left out of it
                torch.autograd.backward(outs, cotangents)
        result = Result(weights=weights, notes=notes, later=later)
        changed = {name for name, sums in _sums(model).items() if sums != before.get(name)}
        if due is not None:
            changed |= set(due.written)
        held = model.named_parameters()
        result.written = {n: p.detach().clone() for n, p in held if n in changed}
    result.outputs = {place: out.detach() for place, out in found.items()}
    result.gradients = {name: p.grad for name, p in model.named_parameters()}
    result.inputs = {name: leaf.grad for name, leaf in given.items()}
    result.buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
    return result


def _drawn(found: Mapping[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """A weight for every element of what gradients flow back from."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {}
    for place, out in sorted(found.items()):  # a model may give them in the order of a set
        if out.requires_grad:
            with unmoded():  # nothing is random to `exact`
                drawn[place] = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    return drawn


def _differentiated(
    found: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor], times: float
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What gradients flow back from, and the gradients: copies, which some code writes to."""
    outs, cotangents = [], []
    for place, out in sorted(found.items()):
        if out.requires_grad:
            out = out.full_tensor() if isinstance(out, DTensor) else out
            if place in weights and weights[place].shape == out.shape:
                outs.append(out)
                with unmoded():  # neither is in a graph of the model's
                    cotangents.append((weights[place] * times).to(out.dtype))
    return outs, cotangents


def parts_of(compiled: CompiledPlan) -> frozenset[str]:
    """The attributes in which each rank keeps its part of something."""
    return frozenset(
        f"{path}.{name}".lstrip(".")
        for path, plan in compiled.modules.items()
        for name in (*plan.cut, *(name for name, whole in plan.kept if not whole))
    )


def _kept(model: nn.Module, parts: Set[str]) -> dict[str, torch.Tensor]:
    """What modules keep as attributes that gradients flow back from."""
    found: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        for name, value in attributes_of(module):
            where = f"{path}.{name}".lstrip(".")
            if where not in parts:
                found.update(_tensors(value, f"the attribute {where}"))
    return {name: t for name, t in found.items() if t.grad_fn is not None}


def _sums(model: nn.Module) -> dict[str, tuple[float, float]]:
    """Numbers that are others where what a rank holds of a parameter was written to."""
    held = ((n, local_of(p) if isinstance(p, DTensor) else p) for n, p in model.named_parameters())
    with unmoded():
        numbers = ((n, torch.view_as_real(p) if p.is_complex() else p) for n, p in held)
        return {n: (float(p.detach().sum()), float(p.detach().abs().sum())) for n, p in numbers}


def _tables(model: nn.Module) -> list[torch.Tensor]:
    """What a model looks its ids up in: larger activations where it is given no others."""
    tables = {id(m.weight): m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    return list(tables.values())


def _named(model: nn.Module, names: Set[str]) -> list[torch.Tensor]:
    return [p for name, p in model.named_parameters() if name in names]


@contextlib.contextmanager
def _times(factor: float, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Within it, parameters are ``factor`` times as large."""
    try:
        with torch.no_grad():
            for parameter in parameters:
                parameter.mul_(factor)
        yield
    finally:
        with torch.no_grad():
            for parameter in parameters:
                parameter.div_(factor)


def leaves_of(
    call: Call, plain: Set[str] = frozenset()
) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, torch.Tensor]]:
    """A copy of the call whose floating tensors, but for ``plain``, want gradients, and those."""
    given: dict[str, torch.Tensor] = {}

    def fresh(x: Any, place: str) -> Any:
        if type(x) in (list, tuple, dict):
            return tree_map_with_path(lambda path, held: fresh(held, place + keystr(path)), x)
        if not isinstance(x, torch.Tensor):
            return copy.deepcopy(x)
        leaf = x.detach().clone()
        if leaf.is_floating_point() and leaf.dim() > 1 and place not in plain:
            given[place] = leaf.requires_grad_()
        return leaf

    args = tuple(fresh(x, f"argument {i}") for i, x in enumerate(call[0]))
    return args, {name: fresh(x, f"'{name}'") for name, x in call[1].items()}, given


def outputs_of(value: Any) -> dict[str, torch.Tensor]:
    """Every tensor of what a model gave, by where it is."""
    found = dict(_tensors(value, ""))
    if not found and hasattr(value, "__dict__"):  # an object of the user's own
        found = dict(_tensors(vars(value), ""))
    return found


def _tensors(value: Any, place: str) -> Iterable[tuple[str, torch.Tensor]]:
    """Every tensor of an output, with where it is."""
    if isinstance(value, torch.Tensor):
        yield place or "the output", value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{place}[{key!r}]" if place else f"output {key!r}")
    elif isinstance(value, tuple | list):
        for i, item in enumerate(value):
            yield from _tensors(item, f"{place}[{i}]" if place else f"output {i}")
    elif hasattr(value, "__dataclass_fields__"):
        yield from _tensors({n: getattr(value, n) for n in value.__dataclass_fields__}, place)


def are_comparable(results: Iterable[Result]) -> bool:
    """Whether what a step gave is finite, or some is not on purpose (a mask), by no overflow."""
    for result in results:
        finite = [t.isfinite() for t in result.outputs.values()]
        if all(bool(of.all()) for of in finite):
            continue
        gradients = (*result.gradients.values(), *result.inputs.values())
        if not any(bool(of.any()) for of in finite):
            return False
        if not all(bool(g.isfinite().all()) for g in gradients if g is not None):
            return False
    return True


def worst(
    due: Result, got: Result, rank: int, tp: int, own: Mapping[str, float], most: float = ROUNDING
) -> tuple[str, float] | None:
    """The first thing that differs, and by how much; outputs before gradients.

    Args:
        own: by how much the unsharded model differs from itself, its sums in another order.
        most: that is taken for rounding at all.
    """
    for name, error in errors(due, got, rank, tp):
        if not error <= max(TOLERANCE, min(TIMES * own.get(name, 0.0), most)):
            return name, error
    return None


def errors(due: Result, got: Result, rank: int, tp: int) -> Iterable[tuple[str, float]]:
    """What is compared, and by how much it differs."""
    for place, whole in due.outputs.items():
        if place in got.outputs:
            yield place, _error(whole, got.outputs[place], due.largest(whole), rank, tp)
        else:
            yield f"{place} is missing", float("inf")
    gradients = [g for g in (*due.gradients.values(), *due.inputs.values()) if g is not None]
    of_all = max(map(due.largest, gradients), default=0.0)
    for expected, found in ((due.gradients, got.gradients), (due.inputs, got.inputs)):
        for name, gradient in expected.items():
            scale = 1e-3 * of_all if gradient is None else max(due.largest(gradient), 1e-3 * of_all)
            error = _gradient_error(gradient, found.get(name), scale, rank, tp)
            yield f"the gradient of {name}", error
    for name, whole in due.buffers.items():
        ours = got.buffers.get(name)
        if ours is not None:
            whole = _heads_like(whole, ours, rank, tp)
        if ours is not None and ours.shape == whole.shape:
            yield f"the buffer {name} afterwards", _error(whole, ours, _largest(whole), rank, tp)
    for name, ours in got.written.items():
        theirs = due.written.get(name)
        error = float("inf")
        if theirs is not None:
            error = _error(theirs, ours, _largest(theirs), rank, tp)
        yield f"{name} afterwards", error


def _heads_like(whole: torch.Tensor, ours: torch.Tensor, rank: int, tp: int) -> torch.Tensor:
    """A rank's heads of a buffer, where it has no more."""
    dims = [d for d, (a, b) in enumerate(zip(whole.shape, ours.shape, strict=False)) if a != b]
    if whole.dim() != ours.dim() or len(dims) != 1:
        return whole
    heads = whole.size(dims[0])
    return whole.narrow(dims[0], rank * heads // tp, ours.size(dims[0]))


def _gradient_error(
    due: torch.Tensor | None, got: torch.Tensor | None, scale: float, rank: int, tp: int
) -> float:
    """By the metric used everywhere: of gradients that cancel to nothing only rounding is left."""
    if due is None or got is None:
        present = due if got is None else got
        return 0.0 if present is None or not _largest(present) else float("inf")
    return _error(due, got, scale, rank, tp)


def _largest(x: torch.Tensor) -> float:
    return largest(local_of(x) if isinstance(x, DTensor) else x)


def share(whole: torch.Tensor, dim: int, rank: int, tp: int) -> torch.Tensor:
    """What a rank has of a tensor that is cut evenly along ``dim``, the last ones less."""
    length, rows = whole.size(dim), -(-whole.size(dim) // tp)
    start, stop = min(rank * rows, length), min((rank + 1) * rows, length)
    return whole.narrow(dim, start, stop - start)


def _error(whole: torch.Tensor, ours: torch.Tensor, scale: float, rank: int, tp: int) -> float:
    """max|Δ| / ``scale`` of what a rank holds of ``whole``."""
    if whole.shape != ours.shape:
        return float("inf")
    if isinstance(ours, DTensor):
        if any(kind.is_partial() for kind in ours.placements):
            return _error(whole, ours.full_tensor(), scale, rank, tp)
        whole, ours = part_of(whole, ours), local_of(ours)
    if not whole.numel():
        return 0.0
    if not (whole.is_floating_point() or whole.is_complex()):
        return 0.0 if torch.equal(whole, ours) else float("inf")
    return difference(whole, ours, equal_nan=True) / max(scale, 1e-30)
