"""Where a model's code may keep things outside of the model's modules: what is found by its code.

Namespaces (of Python modules, classes, functions, closures) and the arguments that functions have
by default. Of the user's own Python modules all that their functions mention is followed; of
installed packages only the modules in which the model's classes, and functions that these call,
are written.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

_NEVER = frozenset({"torch", "functorch", "triton", "numpy", "tpplan", *sys.stdlib_module_names})
_INSTALLED = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
_MOST = 256
# what a name of an installed package is for good, where it is that
_FIXED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, str)
_DUNDER = frozenset({"__builtins__", "__all__", "__path__", "__spec__", "__loader__"})
_WRAPPING = (staticmethod, classmethod, functools.cached_property, functools.partialmethod)


@dataclass(frozen=True)
class Namespace:
    """Names with values.

    Attributes:
        owner: a dictionary of names, a class, or the cell of a closure, whose one name is "".
        package: the installed one that it is of; "" of the user's own.
        names: those that count; None for all.
    """

    owner: Any
    package: str = ""
    names: frozenset[str] | None = None

    def read(self) -> dict[str, Any]:
        """What the names are now."""
        if isinstance(self.owner, types.CellType):
            try:
                return {"": self.owner.cell_contents}
            except ValueError:  # empty
                return {}
        table: Mapping[str, Any] = self.owner if type(self.owner) is dict else vars(self.owner)
        if self.names is None:
            return dict(table)
        return {name: table[name] for name in self.names if name in table}

    def write(self, name: str, value: Any) -> None:
        """Let a name be ``value``."""
        if isinstance(self.owner, types.CellType):
            self.owner.cell_contents = value
        elif type(self.owner) is dict:
            self.owner[name] = value
        else:
            setattr(self.owner, name, value)

    def drop(self, name: str) -> None:
        """Let there be no such name."""
        if isinstance(self.owner, types.CellType):
            del self.owner.cell_contents
        elif type(self.owner) is dict:
            del self.owner[name]
        else:
            delattr(self.owner, name)


@dataclass
class Outside:
    """What was found.

    Attributes:
        defaults: arguments that functions have by default.
        own: the names of the user's Python modules.
    """

    namespaces: list[Namespace] = field(default_factory=list)
    defaults: list[Any] = field(default_factory=list)
    own: set[str] = field(default_factory=set)


def outside_of(model: nn.Module) -> Outside:
    """Where the code of ``model`` may keep things outside of it."""
    finder = _Finder()
    for kind in {type(module) for module in model.modules()}:
        for base in kind.__mro__:
            finder.add_class(base)
    for module in model.modules():
        for value in vars(module).values():
            # of hooks, the values of their tables
            for one in value.values() if isinstance(value, dict) else (value,):
                finder.add_functions(one)
    return finder.found()


class _Finder:
    def __init__(self) -> None:
        self.classes: dict[int, type] = {}
        self.functions: dict[int, types.FunctionType] = {}
        self.tables: dict[int, dict[str, Any]] = {}
        self.mentioned: dict[int, set[str]] = {}
        self.waiting: list[dict[str, Any]] = []

    def add_class(self, kind: type) -> None:
        """A class, with what its methods use."""
        if id(kind) in self.classes or _top(kind.__module__) in _NEVER:
            return
        self.classes[id(kind)] = kind
        module = sys.modules.get(kind.__module__)
        if module is not None:
            self.add_table(vars(module))
        if not _package(vars(module) if module is not None else {}):
            for value in tuple(vars(kind).values()):
                if isinstance(value, type) and value.__module__ == kind.__module__:
                    self.add_class(value)
                self.add_functions(value)

    def add_functions(self, value: Any) -> None:
        """A function, or those in what is made of some."""
        for function in _functions_in(value):
            table = function.__globals__
            if id(function) in self.functions or _top(table.get("__name__")) in _NEVER:
                continue
            self.add_table(table)
            if not _package(table):
                self.functions[id(function)] = function
                self.mentioned[id(table)].update(_names_in(function.__code__))
                self.waiting.append(table)

    def add_table(self, table: dict[str, Any]) -> None:
        """The globals of a Python module."""
        known = id(table) in self.tables or len(self.tables) >= _MOST
        if not known and _top(table.get("__name__")) not in _NEVER:
            self.tables[id(table)], self.mentioned[id(table)] = table, set()
            self.waiting.append(table)

    def found(self) -> Outside:
        """All of it, when everything was followed."""
        for table in tuple(self.waiting):
            if _package(table):
                self.follow_package(table)
        while self.waiting:
            table = self.waiting.pop()
            if not _package(table):
                self.follow(table)
        return Outside([*self.namespaces()], [*self.defaults()], {*self.own()})

    def follow(self, table: dict[str, Any]) -> None:
        """What a Python module of the user's has, and what its functions mention of others."""
        name = table.get("__name__")
        for value in tuple(table.values()):
            if isinstance(value, type):
                if value.__module__ == name:
                    self.add_class(value)
            elif getattr(value, "__module__", None) == name:
                self.add_functions(value)
        mentioned = self.mentioned[id(table)]
        for word in tuple(mentioned):
            value = table.get(word)
            if isinstance(value, type):
                self.add_class(value)
            elif value is None or isinstance(value, types.ModuleType):
                # a module that is imported within a function is mentioned, too
                module = sys.modules.get(word) if value is None else value
                if module is not None and not _package(vars(module)):
                    self.add_table(vars(module))
            else:
                self.add_functions(value)

    def follow_package(self, table: dict[str, Any]) -> None:
        """The Python modules of the same package of whose functions one makes use."""
        for value in tuple(table.values()):
            if isinstance(value, types.FunctionType):
                theirs = value.__globals__
                if _top(theirs.get("__name__")) == _top(table.get("__name__")):
                    self.add_table(theirs)

    def namespaces(self) -> Iterator[Namespace]:
        for key, table in self.tables.items():
            package, names = _package(table), frozenset(self.mentioned[key])
            if package:
                names = frozenset(n for n, v in table.items() if not isinstance(v, _FIXED))
            anything = "globals" in names and not package
            yield Namespace(table, package, None if anything else names - _DUNDER)
        for kind in self.classes.values():
            module = sys.modules.get(kind.__module__)
            yield Namespace(kind, "" if module is None else _package(vars(module)))
        for function in self.functions.values():
            yield Namespace(vars(function))
            yield from map(Namespace, function.__closure__ or ())

    def defaults(self) -> Iterator[Any]:
        for function in self.functions.values():
            yield from function.__defaults__ or ()
            yield from (function.__kwdefaults__ or {}).values()

    def own(self) -> Iterator[str]:
        return (str(t.get("__name__")) for t in self.tables.values() if not _package(t))


def _top(name: Any) -> str:
    return str(name).partition(".")[0]


def _package(table: Mapping[str, Any]) -> str:
    """The installed package that a Python module is of; "" of one of the user's own."""
    file = table.get("__file__")
    return str(table.get("__name__")) if str(file).startswith(_INSTALLED) else ""


def _functions_in(value: Any) -> Iterable[types.FunctionType]:
    """A function, those that it wraps, and those of what else a class has."""
    found: dict[int, types.FunctionType] = {}
    waiting = [value]
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, types.FunctionType):
            if id(thing) in found:
                continue
            found[id(thing)] = thing
            cells = (Namespace(cell).read() for cell in thing.__closure__ or ())
            waiting += [inner for cell in cells for inner in cell.values()]
        elif isinstance(thing, types.MethodType | _Cache):
            waiting.append(getattr(thing, "__func__", None) or getattr(thing, "__wrapped__", None))
        elif isinstance(thing, property):
            waiting += [thing.fget, thing.fset]
        elif isinstance(thing, functools.partial):
            waiting += [thing.func, *thing.args, *thing.keywords.values()]
        elif isinstance(thing, _WRAPPING):
            waiting.append(getattr(thing, "__func__", None) or getattr(thing, "func", None))
    return found.values()


_Cache = functools._lru_cache_wrapper


def _names_in(code: types.CodeType) -> Iterator[str]:
    """The names that a function's code mentions: of globals, attributes and modules."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)
