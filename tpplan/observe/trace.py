"""Abstract forward passes, recorded: which module got which tensor, and which op used it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tpplan.compat import (
    FakeTensor,
    FakeTensorMode,
    Site,
    draws,
    quiet,
    running,
    unfused,
    unobserved,
    written_by,
)
from tpplan.language import Diagnostic, PlanError
from tpplan.observe.calls import in_float32
from tpplan.observe.likeness import constant
from tpplan.observe.mates import with_mates
from tpplan.observe.untouched import by_itself
from tpplan.places import Argument, Place, tensors_in


@dataclass(frozen=True)
class Numbered:
    """Stands for a tensor in a call that was recorded."""

    number: int


@dataclass
class Call:
    """One call of a module: its place among the calls, what it got and what it gave.

    Tensors are numbered in the order they were first seen; two mentions of one number are one
    tensor object, which a module may have been given under several names. ``nested`` are those
    inside of arguments, ``parent`` is the index of the enclosing call, ``given`` everything it was
    called with, tensors as ``Numbered``, ``places`` where each of ``outputs`` is in what the module
    gave, ``site`` the place in the code that called it.
    """

    index: int
    path: str
    parent: int | None
    arguments: Mapping[int, tuple[Argument, ...]]
    nested: Mapping[int, tuple[Argument, ...]] = field(default_factory=dict)
    outputs: tuple[int, ...] = ()
    places: tuple[Place | None, ...] = ()
    first_op: int = 0
    last_op: int = 0
    given: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
    site: Site = ()

    def given_as(self, name: str) -> int | None:
        """The tensor that is an argument of this name."""
        for number, arguments in self.arguments.items():
            if any(a.name == name for a in arguments):
                return number
        return None

    def numbers_in(self, name: str) -> set[int]:
        """The tensors that are an argument of this name, or inside of it."""
        given = [*self.arguments.items(), *self.nested.items()]
        return {number for number, found in given if any(a.name == name for a in found)}

    def number_of(self, argument: Argument) -> int | None:
        """The tensor that was given as an argument, or inside of one."""
        if not argument.place:
            return self.given_as(argument.name)
        return next((n for n, given in self.nested.items() if argument in given), None)

    def output_at(self, place: Place) -> int | None:
        """The tensor that the module gave there."""
        return next((n for n, p in zip(self.outputs, self.places, strict=True) if p == place), None)


@dataclass(frozen=True)
class Op:
    """One ATen op: the tensors it read and made, and the innermost module call around it.

    ``scaled``: whether it multiplies what it adds by a number of its own; ``run``: what it is and
    what it was given, tensors as ``Numbered``, unless it acts on each number by itself;
    ``written``: the tensors among ``inputs`` that it writes to; ``site``: the place in the code, of
    one that is random; ``told``: what it was given, with nothing in the places of tensors.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    call: int
    random: bool
    pointwise: bool
    scaled: bool = False
    run: tuple[Any, Any] | None = None
    written: tuple[int, ...] = ()
    site: Site = ()
    told: tuple[Any, ...] = ()


@dataclass
class Trace:
    """Calls and ops of one forward pass, or of several, in order.

    ``computed``: whether it was run on numbers, on which its code may hang. ``kept``: the tensors
    that modules have as attributes after it, or after a call of theirs: the module, the place among
    these, and which. ``held``: those that were attributes before, by their names; ``constants``:
    those that the code has from elsewhere, by their numbers. ``alone``: what was found of an op
    that is run on random numbers, and so of all that are alike.
    """

    calls: list[Call] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    floating: set[int] = field(default_factory=set)
    complex: set[int] = field(default_factory=set)
    parameters: dict[int, str] = field(default_factory=dict)
    buffers: dict[int, str] = field(default_factory=dict)
    computed: bool = False
    kept: list[tuple[str, Place, int]] = field(default_factory=list)
    held: dict[int, str] = field(default_factory=dict)
    constants: dict[int, Hashable] = field(default_factory=dict)
    alone: dict[Hashable, bool] = field(default_factory=dict, repr=False, compare=False)

    def ancestors(self, call: int | None) -> Iterable[Call]:
        """The calls around ``call``, the innermost (itself) first."""
        while call is not None:
            yield self.calls[call]
            call = self.calls[call].parent

    def sizes(self, call: Call) -> Any:
        """What a module was called with, of tensors the shape, and whether they are floating."""

        def size(given: Numbered) -> tuple[tuple[int, ...], bool]:
            return self.shapes[given.number], given.number in self.floating

        return tree_map_only(Numbered, size, call.given)


def stream_input(trace: Trace, call: Call) -> int | None:
    """The first floating tensor a module was given."""
    return next((number for number in call.arguments if number in trace.floating), None)


# the attributes that every module has
_OF_MODULES = frozenset(vars(nn.Module()))


def attributes_of(module: nn.Module) -> Iterable[tuple[str, Any]]:
    """The attributes of a module's own in which tensors may be."""
    for name, value in vars(module).items():
        if name not in _OF_MODULES and isinstance(value, torch.Tensor | list | tuple | dict):
            yield name, value


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.trace = Trace()
        self.stack: list[int] = []
        self._numbers: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []
        self._kept: set[tuple[str, Place | None, int | None]] = set()
        self._held: dict[int, str] = {}
        # what ops made, and what the model has and is given
        self.known: set[int] = set()

    def number(self, tensor: torch.Tensor) -> int:
        shape = tuple(int(n) for n in tensor.shape)
        number = self._numbers.get(id(tensor))
        # one that is turned around in place is another from then on
        if number is None or self.trace.shapes[number] != shape:
            number = self._numbers[id(tensor)] = len(self._alive)
            self._alive.append(tensor)
            self.trace.shapes[number] = shape
            if tensor.is_floating_point():
                self.trace.floating.add(number)
            if tensor.is_complex():
                self.trace.complex.add(number)
        return number

    def numbers(self, values: Any) -> tuple[int, ...]:
        return tuple(self.number(t) for t in tree_leaves(values) if isinstance(t, torch.Tensor))

    def numbered(self, values: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda t: Numbered(self.number(t)), values)

    def note_held(self, shadow: nn.Module) -> None:
        """What the model has before it is run: where a tensor is from, if no op made it."""
        for name, parameter in shadow.named_parameters(remove_duplicate=False):
            self.trace.parameters.setdefault(self.number(parameter), name)
        for name, buffer in shadow.named_buffers():
            self.trace.buffers[self.number(buffer)] = name
        self.known.update(self.trace.parameters, self.trace.buffers)
        for path, module in shadow.named_modules():
            for name, value in attributes_of(module):
                for place, tensor in tensors_in(value, (path, name)):
                    self._held.setdefault(id(tensor), ".".join(map(str, place or (path, name))))

    def note_constants(self, numbers: Iterable[int]) -> None:
        """The values of what the code made of plain numbers, or has outside of the model.

        Of a run on numbers not of integers, which may hang on these: how many rows there are.
        """
        for number in {*numbers} - self.known:
            tensor = self._alive[number]
            if id(tensor) in self._held:
                self.trace.held[number] = self._held[id(tensor)]
            elif not isinstance(tensor, FakeTensor):
                counted = not tensor.is_floating_point() and tensor.dtype != torch.bool
                if not (self.trace.computed and counted):
                    with unobserved():
                        self.trace.constants[number] = constant(tensor)
            self.known.add(number)

    def note_kept(self, modules: Mapping[str, nn.Module]) -> None:
        """What modules keep of what was made: a training loop may read it, or the model's code."""
        for path, module in modules.items():
            for name, value in attributes_of(module):
                for place, tensor in tensors_in(value, (name,)):
                    number = self._numbers.get(id(tensor))
                    kept = path, place, number
                    if place is not None and number is not None and kept not in self._kept:
                        self._kept.add(kept)
                        self.trace.kept.append((path, place, number))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = self.numbers(written_by(func, args, kwargs))
        leaves, pointwise = tree_leaves((args, kwargs)), torch.Tag.pointwise in func.tags
        inputs = tuple(self.number(t) for t in leaves if isinstance(t, torch.Tensor))
        told = *("" if isinstance(x, torch.Tensor) else x for x in leaves), *kwargs
        self.note_constants(inputs)
        run = None if pointwise else (func, self.numbered((args, kwargs)))
        out = func(*args, **kwargs)
        made = self.numbers(out)
        self.known.update(made)
        if self.stack and (made or written):
            random, scaled = draws(func, args, kwargs), kwargs.get("alpha", 1) != 1
            where = running().site if random else ()
            called = (
                inputs,
                made,
                self.stack[-1],
                random,
                pointwise,
                scaled,
                run,
                written,
                where,
                told,
            )
            self.trace.ops.append(Op(str(func), *called))
        return out


class Numbers(contextlib.nullcontext[None]):
    """In the place of a fake mode, for code that hangs on numbers: tensors are what they are."""

    def from_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy, in the precision of what computes in the model's place."""
        single: torch.Tensor = in_float32(tensor)
        return single.clone()


def record(
    shadow: nn.Module,
    mode: FakeTensorMode | Numbers,
    calls: Iterable[tuple[tuple[Any, ...], Mapping[str, Any]]],
) -> Trace:
    """Run ``shadow`` on fake tensors, in the mode (train or eval) it is in, call after call.

    On numbers, of what its code chooses from all is run; see ``with_mates``.

    Whatever the model's forward raises on these inputs is raised.

    Raises:
        PlanError: where it has other modules after it.
    """
    recorder, own = _Recorder(), dict(shadow.named_modules())
    recorder.trace.computed = isinstance(mode, Numbers)
    recorder.note_held(shadow)
    calls = with_mates(shadow, calls) if recorder.trace.computed else calls
    with contextlib.ExitStack() as hooks:
        for path, module in shadow.named_modules():
            before, after = _hooks(recorder, path, module)
            first = module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
            hooks.enter_context(first)
            hooks.enter_context(module.register_forward_hook(after))
        with by_itself(packages=True), mode, torch.no_grad(), quiet(), unfused(), recorder:
            for args, kwargs in calls:
                fake_args, fake_kwargs = fake_inputs(mode, (args, dict(kwargs)))
                shadow(*fake_args, **fake_kwargs)
                recorder.note_kept(own)
    left = dict(shadow.named_modules())
    for path, module in own.items():
        if left.get(path) is not module:
            message = (
                "the model puts another module in this one's place as it runs on example inputs"
            )
            hint = "call it once before, or give inputs= on which it does not"
            raise PlanError([Diagnostic(f"{path}: {message}", hint=hint)])
    return recorder.trace


def fake_inputs(
    mode: FakeTensorMode | Numbers, values: Any, keep_ids: bool = False, device: str = "cpu"
) -> Any:
    """``values`` with every tensor in it fake, on ``device``.

    Args:
        keep_ids: whether those that are not floating stay real, as copies on the CPU.
    """

    def fake(value: torch.Tensor) -> torch.Tensor:
        local = value.detach().cpu()
        real = keep_ids and not (value.is_floating_point() or value.is_complex())
        return local.clone() if real else mode.from_tensor(local).to(device)

    return tree_map_only(torch.Tensor, fake, values)


def _hooks(
    recorder: _Recorder, path: str, module: nn.Module
) -> tuple[Callable[..., None], Callable[..., None]]:
    signature = inspect.signature(module.forward)

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        trace = recorder.trace
        arguments: dict[int, tuple[Argument, ...]] = {}
        nested: dict[int, tuple[Argument, ...]] = {}
        for argument, tensor in _tensors(signature, args, kwargs):
            number, found = recorder.number(tensor), nested if argument.place else arguments
            found[number] = (*found.get(number, ()), argument)
        call = Call(
            index=len(trace.calls),
            path=path,
            parent=recorder.stack[-1] if recorder.stack else None,
            arguments=arguments,
            nested=nested,
            first_op=len(trace.ops),
            given=recorder.numbered((args, kwargs)),
            site=running().site,
        )
        if call.parent is None:
            recorder.known.update(arguments, nested)
        trace.calls.append(call)
        recorder.stack.append(call.index)

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        trace = recorder.trace
        call = trace.calls[recorder.stack.pop()]
        found = list(tensors_in(output))
        call.places = tuple(place for place, _ in found)
        call.outputs = tuple(recorder.number(tensor) for _, tensor in found)
        call.last_op = len(trace.ops)
        recorder.note_kept({path: module})  # of a module that is called again, what it has now

    return before, after


def _tensors(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterable[tuple[Argument, torch.Tensor]]:
    """The tensors among a call's arguments, and inside of them, named as the forward names them."""
    names = [
        p.name
        for p in signature.parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    given: list[tuple[Argument, Any]] = [
        (Argument(names[index] if index < len(names) else "", index), value)
        for index, value in enumerate(args)
    ]
    for name, value in kwargs.items():
        given.append((Argument(name, names.index(name) if name in names else None), value))
    for argument, value in given:
        for place, tensor in tensors_in(value):
            if place is not None:
                yield replace(argument, place=place), tensor
