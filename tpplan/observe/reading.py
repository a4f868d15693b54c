"""Which attributes a model's code reads to decide or compute something, found in its bytecode.

Layers keep their own number to find their place in a cache: they hand it to methods of objects
they were given (``cache.update(k, v, self.layer_idx)``), or look things up in them
(``cache.layers[self.layer_idx]``). An attribute that is read for nothing else tells no layer from
another one. Whatever is not recognised as such bookkeeping counts as a decision.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_ON_TENSORS = frozenset(dir(torch.Tensor))
_PUSHING = frozenset({"LOAD_CONST", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_CLOSURE", "PUSH_NULL"})
_LOOKUPS = frozenset({"BINARY_SUBSCR", "STORE_SUBSCR"})
_NOTHING = frozenset({"KW_NAMES", "PRECALL", "RESUME", "CACHE", "EXTENDED_ARG", "NOP"})
# where descriptors, partials and bound methods keep the functions that they are made of
_WRAPPED: Sequence[tuple[Any, Sequence[str]]] = (
    (functools.partial | functools.cached_property | functools.partialmethod, ("func",)),
    (staticmethod | classmethod | types.MethodType, ("__func__",)),
    (functools._lru_cache_wrapper, ("__wrapped__",)),
    (property, ("fget", "fset")),
)
_UNREAD = frozenset({"__init__", "extra_repr", "__repr__"})


@dataclass(frozen=True)
class _Value:
    """What is on the stack: attributes of a local variable, the last of which was ``name``.

    ``method``: it stands for a method about to be called.
    """

    root: str = ""
    name: str = ""
    method: bool = False


_UNKNOWN = _Value()


def deciding(kinds: Iterable[type], functions: Iterable[Any] = ()) -> frozenset[str]:
    """The attributes that the methods of ``kinds``, and ``functions``, read but for bookkeeping.

    What they call by a global name is followed, except into torch.
    """
    pending = [*functions]
    bases = {base for kind in kinds for base in kind.__mro__} - {*nn.Module.__mro__}
    for base in bases:
        pending += (value for name, value in vars(base).items() if name not in _UNREAD)
    found: set[str] = set()
    met: set[int] = set()
    while pending:
        value = pending.pop()
        if id(value) in met:
            continue
        met.add(id(value))
        if not isinstance(value, types.FunctionType):
            names = (name for kind, names in _WRAPPED if isinstance(value, kind) for name in names)
            pending += (getattr(value, name) for name in names)
            continue
        decided, called = _read_by(value.__code__)
        found |= decided
        pending += (cell.cell_contents for cell in value.__closure__ or () if filled(cell))
        pending += vars(value).values()
        reached = (value.__globals__.get(name) for name in called)
        pending += (f for f in reached if isinstance(f, types.FunctionType) and not _of_torch(f))
    return frozenset(found)


def filled(cell: types.CellType) -> bool:
    """Whether a closure's cell holds anything yet."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _of_torch(function: types.FunctionType) -> bool:
    return str(function.__globals__.get("__name__")).partition(".")[0] == "torch"


@functools.lru_cache(maxsize=4096)
def _read_by(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The attributes that ``code`` decides by, and the global names it mentions."""
    # what getattr and vars are asked for is among the constants
    decided = {const for const in code.co_consts if isinstance(const, str)}
    called = set(code.co_names)
    decided |= _Reader(code).decided()
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            more, names = _read_by(inner)
            decided |= more
            called |= names
    return frozenset(decided), frozenset(called)


class _Reader:
    """Runs bytecode on a stack of what is known of its values; what it does not know is read."""

    def __init__(self, code: types.CodeType) -> None:
        self.instructions = list(dis.get_instructions(code))
        count = code.co_argcount + code.co_kwonlyargcount
        # the first one is self, or what stands for it
        self.arguments = set(code.co_varnames[1:count])
        self.stores: dict[str, set[str]] = {}
        self.stack: list[_Value] = []
        self.found: set[str] = set()

    def decided(self) -> set[str]:
        """The names of the attributes that are read for more than bookkeeping."""
        self.run()
        # a local variable that is always an argument, or an attribute of one, is as good as it
        given, known = {*self.arguments, *self.stores}, set[str]()
        while given != known:
            known = given
            given = {name for name in known if self.stores.get(name, set()) <= known}
        self.arguments = given
        self.found.clear()
        self.run()
        return self.found

    def run(self) -> None:
        """One pass over the instructions."""
        for instruction in self.instructions:
            if instruction.is_jump_target:
                self.read(*self.pop(len(self.stack)))
            self.step(instruction)

    def step(self, instruction: dis.Instruction) -> None:
        """One instruction."""
        name, value = instruction.opname, instruction.argval
        if name in _NOTHING:
            return
        if name.startswith("LOAD_FAST"):
            names = value if isinstance(value, tuple) else (value,)
            self.stack += (_Value(local) for local in names)
        elif name in _PUSHING:
            self.stack += [_UNKNOWN] * _effect(instruction)
        elif name in ("LOAD_ATTR", "LOAD_METHOD"):
            (owner,) = self.pop(1)
            self.read(owner)
            method = bool(_effect(instruction))
            self.stack += [_Value(owner.root, value, method)] * (1 + method)
        elif name == "CALL":
            called, _, *arguments = self.pop(int(value) + 2)
            self.read(*(a for a in arguments if not (called.method and self.keeps(called, a))))
            self.stack.append(_UNKNOWN)
        elif name in _LOOKUPS:
            *stored, table, key = self.pop(2 + (name == "STORE_SUBSCR"))
            self.read(*stored)
            if table.method or not self.keeps(table, key):
                self.read(key)
            self.stack += [_UNKNOWN] * (name != "STORE_SUBSCR")
        elif name == "STORE_FAST":
            (stored_value,) = self.pop(1)
            self.read(stored_value)
            self.stores.setdefault(value, set()).add(stored_value.root)
        elif name.startswith("BUILD_"):
            self.read(*self.pop(1 - _effect(instruction)))
            self.stack.append(_UNKNOWN)
        else:
            self.read(*self.pop(len(self.stack)))

    def pop(self, count: int) -> list[_Value]:
        """The uppermost values, of which those that are not known stand below."""
        known = self.stack[max(len(self.stack) - count, 0) :]
        del self.stack[len(self.stack) - len(known) :]
        return [_UNKNOWN] * (count - len(known)) + known

    def read(self, *values: _Value) -> None:
        """Values that something is done with."""
        self.found.update(value.name for value in values if value.name)

    def keeps(self, owner: _Value, key: _Value) -> bool:
        """Whether ``owner`` is of an object that is an argument, and nothing that a tensor has."""
        other = owner.root in self.arguments and owner.root != key.root
        return other and bool(owner.name) and owner.name not in _ON_TENSORS


def _effect(instruction: dis.Instruction) -> int:
    return dis.stack_effect(instruction.opcode, instruction.arg)
