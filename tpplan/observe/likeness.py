"""What a module is: equal for modules that compute the same, told apart wherever that is in doubt.

Types, plain attributes, functions by their code and what they closed over, hooks, the shapes of
parameters, the numbers in buffers, ties, the rules of a plan: nothing by a name or a ``repr``. A
layer's own number is left out where the code reads it for bookkeeping only (see ``reading``).
"""

from __future__ import annotations

import ctypes
import enum
import hashlib
import types
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from tpplan.compat import FakeTensor
from tpplan.language import Rule
from tpplan.observe.reading import deciding, filled

_PLAIN = frozenset(
    {int, bool, str, bytes, complex, type(None), type(...), torch.Size, torch.device, torch.dtype}
)
_TENSORS = (torch.Tensor, nn.Parameter)
# what every module has: tables and hooks, which are mostly empty
_TABLES = frozenset(vars(nn.Module())) - {"training"}
_HOOKS = frozenset(k for k, v in vars(nn.Module()).items() if isinstance(v, OrderedDict))
# hooks that only saving and loading call
_UNCALLED = frozenset(name for name in _HOOKS if "state_dict" in name)
_LARGE = 2**26
_MANY = 50_000


class _Same:
    """Equal to itself alone."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"{type(self.value).__name__} at {id(self.value)}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class _Number:
    """An integer that may be a layer's own number: the same in two layers where it is that in both.

    Attributes:
        places: of the numbers in the layer's path, those it is.
    """

    __slots__ = ("name", "places", "value")

    def __init__(self, name: str, value: int, places: frozenset[int]) -> None:
        self.name, self.value, self.places = name, value, places

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Number):
            return False
        return self.value == other.value or not self.places.isdisjoint(other.places)

    def __hash__(self) -> int:
        return hash(self.name)


def identity(
    module: nn.Module,
    path: str = "",
    rules: Mapping[str, Rule] | None = None,
    shared: Collection[int] = frozenset(),
) -> Hashable:
    """What ``module`` is: two of them that are equal compute the same, by the same rules.

    Args:
        path: where it is in the model; the numbers in it are its own.
        rules: by the paths of modules and parameters in the model.
        shared: the ids of tensors that are used elsewhere too: equal to themselves alone.
    """
    return _Teller(module, path, rules or {}, shared).told()


def told(value: object) -> Hashable:
    """What plain data is, by its contents."""
    return _Teller(nn.Module(), "", {}, ()).tell(value)


def constant(tensor: torch.Tensor) -> Hashable:
    """What a tensor of the code's own is: its numbers; where none can be read, it is itself."""
    plain = type(tensor) in _TENSORS and tensor.layout == torch.strided
    known = plain and not tensor.is_quantized and not tensor.is_meta
    return tensor.dtype, tuple(tensor.shape), _values(tensor) if known else _Same(tensor)


def shared_tensors(model: nn.Module) -> frozenset[int]:
    """The ids of the parameters and buffers that several modules of ``model`` hold."""
    met: set[int] = set()
    again: set[int] = set()
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            (again if id(tensor) in met else met).add(id(tensor))
    return frozenset(again - {id(None)})


class _TooMuch(Exception):
    pass


class _Teller:
    def __init__(
        self, root: nn.Module, path: str, rules: Mapping[str, Rule], shared: Collection[int]
    ) -> None:
        self.root, self.path, self.rules, self.shared = root, path, rules, shared
        self.names = {id(module): name for name, module in root.named_modules()}
        self.places = [int(part) for part in path.split(".") if part.isdigit()]
        # what was told already, which is kept alive so that its id stays its own
        self.seen: dict[int, int] = {}
        self.kept: list[object] = []
        self.numbers: list[_Number] = []
        self.functions: list[Any] = []

    def told(self) -> Hashable:
        """The whole of it."""
        try:
            told = self.module(self.root)
        except (_TooMuch, RecursionError):
            return _Same(self.root)
        if self.numbers:
            kinds = {type(module) for module in self.root.modules()}
            decided = deciding(kinds, self.functions)
            for number in self.numbers:
                if number.name in decided:
                    number.places = frozenset()
        return told

    def tell(self, value: Any) -> Hashable:
        """Any value, hashable; the second time that it is met, by its place among those met."""
        kind = type(value)
        if kind in _PLAIN:
            return kind, value
        if kind is float:
            return kind, value.hex()
        known = self.seen.get(id(value))
        if known is not None:
            return "again", known
        if len(self.kept) > _MANY:
            raise _TooMuch
        self.seen[id(value)] = len(self.kept)
        self.kept.append(value)
        return self.content(value, kind)

    def each(self, values: Iterable[Any]) -> tuple[Hashable, ...]:
        return tuple([self.tell(value) for value in values])

    def content(self, value: Any, kind: type) -> Hashable:
        """What a value that is not plain consists of."""
        if kind is tuple or kind is list:
            return kind, self.each(value)
        if kind is dict or kind is OrderedDict:
            return kind, self.each(value), self.each(value.values())
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if isinstance(value, nn.Module):
            return self.module(value) if id(value) in self.names else _Same(value)
        if isinstance(value, types.FunctionType):
            return self.function(value)
        if isinstance(value, types.MethodType):
            return kind, self.tell(value.__func__), self.tell(value.__self__)
        if isinstance(value, types.CellType):
            return kind, *((self.tell(value.cell_contents),) if filled(value) else ())
        if kind is set or kind is frozenset:
            return kind, frozenset(self.tell(item) for item in value)
        if isinstance(value, type | enum.Enum | types.ModuleType | types.BuiltinFunctionType):
            return _Same(value)
        return self.thing(value, kind)

    def thing(self, value: Any, kind: type) -> Hashable:
        """An object by its class and what it would be pickled as; else equal to itself alone."""
        # a way of its own to be pickled may leave something out; asking for it may make it
        own = getattr(value, "__dict__", None)
        try:
            made = value.__reduce_ex__(2)
        except Exception:  # it cannot be taken apart
            return _Same(value)
        if isinstance(made, str):
            return _Same(value)  # a global by that name
        parts = [tuple(p) if place > 2 and p is not None else p for place, p in enumerate(made)]
        return kind, self.each(parts), None if own is None else self.each((*own, *own.values()))

    def function(self, function: types.FunctionType) -> Hashable:
        self.functions.append(function)
        parts = (
            function.__defaults__,
            function.__kwdefaults__,
            function.__closure__,
            vars(function) or None,
        )
        return function.__code__, _Same(function.__globals__), self.each(parts)

    def tensor(self, tensor: torch.Tensor) -> Hashable:
        kind = type(tensor)
        fake = isinstance(tensor, FakeTensor)
        if id(tensor) in self.shared or not (kind in _TENSORS or fake):
            return _Same(tensor)
        if tensor.layout != torch.strided or tensor.is_quantized:
            return _Same(tensor)
        looks = (kind, tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        hooks = [
            tuple(found.values())
            for found in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)  # type: ignore[attr-defined]
            if found
        ]
        more = self.each((hooks, vars(tensor))) if hooks or vars(tensor) else ()
        parameter = isinstance(tensor, nn.Parameter)
        values = None if parameter or fake or tensor.is_meta else _values(tensor)
        return *looks, tensor.requires_grad, tensor.grad_fn is None, more, values

    def module(self, module: nn.Module) -> Hashable:
        name = self.names[id(module)]
        full = ".".join(part for part in (self.path, name) if part)
        told: list[Any] = [type(module)]
        for key, value in sorted(vars(module).items()):
            if key in _UNCALLED or (key in _TABLES and not value):
                continue
            if key in _HOOKS:
                told.append((key, self.each(value.values())))
            elif type(value) is int and value in self.places:
                places = frozenset(i for i, n in enumerate(self.places) if n == value)
                self.numbers.append(_Number(key, value, places))
                told.append((key, self.numbers[-1]))
            elif type(value) is int:
                told.append((key, _Number(key, value, frozenset())))
            else:
                told.append((key, self.tell(value)))
        if self.rules:
            names = (full, *(f"{full}.{leaf}" if full else leaf for leaf in module._parameters))
            found = (self.rules.get(path) for path in names)
            told.append(tuple([rule and (rule.style, _options(rule.options)) for rule in found]))
        return tuple(told)


def _options(value: object) -> Hashable:
    """A rule's options, whose values are compared, not the objects they are in."""
    if isinstance(value, Mapping):
        return frozenset((key, _options(item)) for key, item in value.items())
    if isinstance(value, tuple | list):
        return tuple(_options(item) for item in value)
    return type(value), value


def _values(tensor: torch.Tensor) -> Hashable:
    """The numbers of a tensor; of a very large one, that it is itself."""
    size = tensor.numel() * tensor.element_size()
    if size > _LARGE:
        return _Same(tensor)
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return hashlib.blake2b(ctypes.string_at(plain.data_ptr(), size)).digest() if size else b""
