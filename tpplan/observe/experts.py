"""Stacked experts, run on random numbers for how their parameters belong together.

A mixture keeps one tensor for all of its experts: ``(E, 2I, H)`` and ``(E, H, I)``, or transposed,
interleaved, with biases. Which numbers of the one belong to inner column i of the other no shape
tells. With all but some columns of the parameter that makes the output set to zero, gradients reach
only what belongs to these columns. What is found so is then run: the parts of all ranks, from
slices, must sum up to the whole, gradients included.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_leaves, tree_map_only

from tpplan.kernels.experts import chosen_in, held_in, of_held, of_own, of_sizes
from tpplan.layout import own_part
from tpplan.observe.grouped import InAnyPrecision
from tpplan.observe.slices import hit, placement, same, slice_of, together
from tpplan.observe.thin_experts import NotStackedError, Stacked, Thin, WidthError, thinned
from tpplan.observe.trace import Call, Numbered, Trace
from tpplan.observe.twins import twin_of
from tpplan.observe.untouched import by_itself

_TRIES = 64
_SMALL = 2**20
_HIT = 4
Assign = Callable[[nn.Module, str, int], Callable[[], None]]


def shared_experts(
    module: nn.Module,
    call: Call,
    trace: Trace,
    numbers: Mapping[str, int],
    tp: int,
    set_to: Assign,
    whole: bool = False,
) -> Stacked:
    """How ``tp`` ranks share a module's experts: the inner columns of all, or whole ones.

    Args:
        call: how the module was called.
        numbers: the whole numbers that its code reads from its attributes, by name.
        set_to: changes such an attribute, and gives what undoes that.
        whole: whether each rank has some of the experts.

    Raises:
        NotStackedError: where they cannot; ``WidthError`` where only ``tp`` does not fit.
    """
    with InAnyPrecision(), torch.enable_grad():
        if sum(p.numel() for p in module.parameters()) <= _SMALL:
            return _shared(_Runner(module, call, trace, whole), numbers, tp, set_to)
        failure: NotStackedError | None = None
        for thin in itertools.islice(thinned(module, call, trace, numbers, tp), _TRIES):
            try:
                runner = _Runner(module, call, trace, whole, thin, set_to)
                found = _shared(runner, {**numbers, **thin.numbers}, tp, set_to)
                return thin.grown(found, module, numbers, tp)
            except WidthError:
                raise
            except NotStackedError as error:
                failure = failure or error
        raise failure or NotStackedError("its parameters are not of its input's width")


def _shared(runner: _Runner, numbers: Mapping[str, int], tp: int, set_to: Assign) -> Stacked:
    if runner.apart:
        return _shared_whole(runner, numbers, tp, set_to)
    refused: int | None = None
    for name, dim in runner.candidates():
        width = runner.parameters[name].shape[dim]
        found = runner.shares(name, dim, 2 if width % tp else tp)
        if found is None:
            continue
        if width % tp:
            refused = width
            continue
        for chosen in _attributes(numbers, width, tp):
            stacked = Stacked(width, *found, chosen)
            if runner.sums_up(stacked, tp, set_to):
                return stacked
    if refused is not None:
        raise WidthError(refused, tp)
    raise NotStackedError("no inner columns were found that each rank could have a part of")


def _shared_whole(runner: _Runner, numbers: Mapping[str, int], tp: int, set_to: Assign) -> Stacked:
    if runner.experts % tp:
        raise WidthError(runner.experts, tp, "experts there are")
    if any(p.shape[:1] != (runner.experts,) for p in runner.parameters.values()):
        raise NotStackedError("some of its parameters are not of one expert each")
    try:
        chosen_in(runner.given)
    except ValueError as error:
        raise NotStackedError(str(error)) from error
    cut: dict[str, Placement] = {name: Shard(0) for name in runner.parameters}
    for chosen in _attributes(numbers, runner.experts, tp):
        stacked = Stacked(runner.experts, cut, (), chosen, whole=True)
        if runner.sums_up(stacked, tp, set_to):
            return stacked
    raise NotStackedError("its experts do not add up to the whole, each for its own tokens")


def _attributes(
    numbers: Mapping[str, int], width: int, tp: int
) -> Iterator[dict[str, tuple[int, int]]]:
    """Which attributes may count inner columns: all that could, none, some."""
    alike = [name for name, n in numbers.items() if n and n % width == 0 and n // width in (1, 2)]
    sets = itertools.chain(
        [tuple(alike)], *(itertools.combinations(alike, n) for n in range(len(alike)))
    )
    for names in itertools.islice(dict.fromkeys(sets), _TRIES):
        yield {name: (numbers[name], numbers[name] // tp) for name in names}


class OfSizes:
    """The forward of a module of experts where only sizes are known."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.__signature__ = inspect.signature(module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """A tensor like the first one that it is given."""
        return of_sizes((args, kwargs), list(self.module.parameters()))


class _Runner:
    """A copy of the module in float64, and a call of it with numbers of its own."""

    def __init__(
        self,
        module: nn.Module,
        call: Call,
        trace: Trace,
        whole: bool,
        thin: Thin | None = None,
        set_to: Assign | None = None,
    ) -> None:
        names = {id(p): name for name, p in module.named_parameters()}
        shapes = {} if thin is None else thin.shapes
        self.module = twin_of(module, shape_of=lambda p: shapes.get(names[id(p)], tuple(p.shape)))
        if thin is not None and set_to is not None:
            for name, value in thin.numbers.items():
                set_to(self.module, name, value)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.module.parameters():
                if parameter.is_floating_point():
                    # positive and small: no activation is dead or saturates
                    parameter.uniform_(0.1, 1.0, generator=generator).div_(parameter.shape[-1])
        self.parameters = dict(self.module.named_parameters())
        experts = max((p.shape[0] for p in self.parameters.values() if p.dim() == 3), default=0)
        if not experts:
            raise NotStackedError("it has no parameter (experts, rows, columns)")
        widths = {} if thin is None else {thin.width: thin.hidden}
        self.experts, self.apart = experts, whole
        self.picks: tuple[int, int] | None = None
        self.held, self.first = held_in(self.parameters.values()), True
        few = experts if whole or self.held is not None else min(experts, _HIT)
        self.given = _numbers(call, trace, experts, few, generator, widths)
        self.inputs = [
            t
            for t in tree_leaves(self.given)
            if isinstance(t, torch.Tensor) and t.is_floating_point()
        ]
        out = self.run()
        if out.shape != self.inputs[0].shape:
            raise NotStackedError("what it gives has another shape than what it is given")
        self.weights = torch.randn(out.shape, generator=generator, dtype=out.dtype)
        self.whole = out.detach()
        self.gradients = self.differentiated(out)
        # experts that no token came to show nothing
        self.hit = {
            name: hit(gradient) for name, gradient in self.gradients.items() if gradient.dim()
        }

    def run(self) -> torch.Tensor:
        args, kwargs = self.given
        try:
            if self.held is not None and not self.first:
                args, kwargs = of_held(self.given, self.held)
            with by_itself():
                if self.picks is None:
                    out = self.module(*args, **kwargs)
                else:
                    out = of_own(self.module, (args, kwargs), *self.picks)
        except Exception as error:
            raise NotStackedError(
                f"it cannot be run on random numbers: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(out, torch.Tensor) or not out.is_floating_point():
            raise NotStackedError("it gives something else than one tensor")
        return out

    def differentiated(self, out: torch.Tensor) -> dict[str, torch.Tensor]:
        """The gradient of each parameter, and under "0", "1", ... of each input."""
        own = dict(self.module.named_parameters())
        named = {**own, **{str(i): x for i, x in enumerate(self.inputs)}}
        found = torch.autograd.grad(
            (out * self.weights).sum(), list(named.values()), allow_unused=True
        )
        return {
            name: torch.zeros_like(x) if gradient is None else gradient
            for (name, x), gradient in zip(named.items(), found, strict=True)
        }

    def candidates(self) -> Iterator[tuple[str, int]]:
        """Parameters that may make the output, and the dimension that it may sum over."""
        for name, parameter in self.parameters.items():
            if parameter.dim() == 3 and self.is_affine(parameter):
                yield from ((name, dim) for dim in (2, 1) if parameter.shape[dim] > 1)

    def is_affine(self, parameter: torch.Tensor) -> bool:
        """Whether the output is linear in a parameter, but for what is added to it."""
        before = parameter.detach().clone()
        outputs = [self.whole]
        with torch.no_grad():
            for factor in (0.0, 2.0):
                parameter.copy_(before * factor)
                outputs.append(self.run().detach())
            parameter.copy_(before)
        whole, none, twice = outputs
        return same(twice - whole, whole - none)

    def shares(
        self, name: str, dim: int, tp: int
    ) -> tuple[dict[str, Placement], tuple[str, ...]] | None:
        """What goes with each share of a dimension of a parameter; None where it is none."""
        size = self.parameters[name].shape[dim]
        edges = [size * rank // tp for rank in range(tp + 1)]
        supports = [
            self.support(name, dim, start, stop) for start, stop in itertools.pairwise(edges)
        ]
        cut: dict[str, Placement] = {name: Shard(dim)}
        added = []
        for other in self.parameters:
            if other == name:
                continue
            found = [slice_of(support[other], self.hit[other]) for support in supports]
            if any(f is None for f in found):
                return None
            along = {f[0] for f in found if f is not None}
            if along == {None}:
                added.append(other)
                continue
            rows = [f[1] for f in found if f is not None]
            shape = self.parameters[other].shape
            (place, *others) = along
            if others or place is None or sorted(itertools.chain(*rows)) != [*range(shape[place])]:
                return None
            cut[other] = placement(place, rows, shape[place])
        return (cut, tuple(added)) if len(cut) > 1 else None

    def support(self, name: str, dim: int, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Which numbers of the parameters matter for some inner columns."""
        parameter = self.parameters[name]
        before = parameter.detach().clone()
        with torch.no_grad():
            parameter.zero_()
            parameter.narrow(dim, start, stop - start).copy_(
                before.narrow(dim, start, stop - start)
            )
        found = self.differentiated(self.run())
        with torch.no_grad():
            parameter.copy_(before)
        return {other: gradient != 0 for other, gradient in found.items()}

    def sums_up(self, stacked: Stacked, tp: int, set_to: Assign) -> bool:
        """Whether the parts of all ranks are the whole, gradients included."""
        outputs, gradients = torch.zeros_like(self.whole), list[dict[str, torch.Tensor]]()
        for rank in range(tp):
            with self.as_rank(stacked, rank, tp, set_to):
                try:
                    out = self.run()
                    outputs = outputs + out.detach()
                    gradients.append(self.differentiated(out))
                except (NotStackedError, RuntimeError):
                    return False
        if not same(outputs, self.whole):
            return False
        # what is added once has its gradient from the first rank
        return all(
            same(
                together(
                    [g[name] for g in gradients[: 1 if name in stacked.added else tp]],
                    stacked.cut.get(name),
                    whole,
                ),
                whole,
            )
            for name, whole in self.gradients.items()
        )

    @contextlib.contextmanager
    def as_rank(self, stacked: Stacked, rank: int, tp: int, set_to: Assign) -> Iterator[None]:
        undo: list[Callable[[], None]] = []
        own = self.module._parameters
        self.first = rank == 0
        try:
            for name, whole in self.parameters.items():
                placed = stacked.cut.get(name)
                if placed is not None:
                    own[name] = nn.Parameter(own_part(whole.detach(), placed, rank, tp))
                elif rank:
                    own[name] = nn.Parameter(torch.zeros_like(whole))
            if stacked.whole:
                each = self.experts // tp
                self.picks = rank * each, each
            for name, (_, local) in stacked.attributes.items():
                undo.append(set_to(self.module, name, local))
            yield
        finally:
            own.update(self.parameters)
            self.picks, self.first = None, True
            for put_back in reversed(undo):
                put_back()


def _numbers(
    call: Call,
    trace: Trace,
    experts: int,
    few: int,
    generator: torch.Generator,
    widths: Mapping[int, int],
) -> Any:
    """What the module is called with: activations, weights, and choices of experts.

    Args:
        few: of how many experts some are chosen.
        widths: of activations -> how wide they are here.
    """

    def number(given: Numbered) -> torch.Tensor:
        shape = trace.shapes[given.number]
        if given.number in trace.floating:
            if len(shape) > 1 and shape[-1] in widths:
                shape = (*shape[:-1], widths[shape[-1]])
            drawn = torch.rand(shape, generator=generator, dtype=torch.float64)
            return (drawn + 0.1).requires_grad_()
        if not shape or shape[-1] > experts:
            raise NotStackedError(f"it is given whole numbers of shape {shape}, no choice of some")
        scores = torch.rand((*shape[:-1], max(few, shape[-1])), generator=generator)
        return scores.topk(shape[-1]).indices

    return tree_map_only(Numbered, number, call.given)
