"""Who else holds a model's parameters: they are replaced there as well, or it is said.

New parameters take the place of the model's. What holds the old ones would go on with them: a list
that the model's own code reads, an optimizer, a module outside of the model that shares a weight.
Nearly always nobody does, which their reference counts tell at once.
"""

from __future__ import annotations

import collections
import functools
import gc
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from tpplan.language import Diagnostic, PlanError

# what the rewriting replaces itself
_REPLACED = frozenset({"_parameters", "_buffers", "_modules", "_tpplan", "_tpplan_plan"})
_ENTERED_NEVER = (type, types.ModuleType, torch.Tensor, nn.Module, torch.optim.Optimizer)
_RUNNING = (types.FrameType, types.GeneratorType, types.CoroutineType, types.TracebackType)
_DEEPEST = 50
_AT_ONCE = 1000

Undo = Callable[[], None]


def require_whole(model: nn.Module, outside: bool = True) -> frozenset[int]:
    """Refuse a model that shares a parameter with a module outside of it; name other holders.

    Args:
        outside: whether they are looked for at all.

    Returns:
        The ``id`` of every parameter that something else than the model's modules refers to.

    Raises:
        PlanError: by the names of the parameters.
    """
    names = _held(model)
    if not names or not outside:
        return frozenset(names)
    known = _Walk({}, [])
    known.enter(model)
    known.seen.update(id(module._parameters) for module in model.modules())
    # a script's variable is often left over from a loop
    known.seen.update(id(getattr(m, "__dict__", None)) for m in list(sys.modules.values()))
    tied, others = _outside(names, known.seen)
    if tied or others:
        gc.collect()  # what nobody can reach any more holds nothing
        tied, others = _outside(names, known.seen)
    if tied:
        raise PlanError(
            [
                Diagnostic(
                    f"{names[key]} is a parameter of another module too, of a "
                    f"{type(module).__name__} outside of the model; sharding would untie the two",
                    hint="parallelize the module that contains both, or tie them afterwards",
                )
                for module, key in tied
            ]
        )
    if others:
        warnings.warn(
            "parameters of the model are held elsewhere too, where they stay as they were, whole "
            "and untrained: " + "; ".join(dict.fromkeys(map(_described, others))),
            stacklevel=4,
        )
    return frozenset(names)


def replace(model: nn.Module, successors: Mapping[int, nn.Parameter], undo: list[Undo]) -> None:
    """Put new parameters into what the attributes of the model's modules hold.

    Args:
        successors: the new parameter for the ``id`` of each old one.
        undo: what puts each container back into its present state is added to it.
    """
    _Walk(successors, undo).enter(model)


def _held(model: nn.Module) -> dict[int, str]:
    tables = [module._parameters for module in model.modules()]
    times = collections.Counter(id(p) for table in tables for p in table.values())
    names = {id(p): name for name, p in model.named_parameters()}
    found = _references(list(model.parameters()))
    alone = {"probe": nn.Parameter(torch.empty(0))}  # what the counting itself refers to
    extra = _references(list(alone.values())).popitem()[1] - 1
    return {key: names[key] for key, count in found.items() if count > times[key] + extra}


def _references(parameters: list[nn.Parameter]) -> dict[int, int]:
    return {id(p): sys.getrefcount(p) for p in parameters}


class _Walk:
    """Through everything that can be reached from the attributes of a model's modules."""

    def __init__(self, successors: Mapping[int, nn.Parameter], undo: list[Undo]) -> None:
        self.successors, self.undo = successors, undo
        self.seen: set[int] = set()

    def enter(self, model: nn.Module) -> None:
        """All modules of the model, one after the other."""
        for module in model.modules():
            attributes = vars(module)
            self.seen.update((id(module), id(attributes)))
            for name in attributes.keys() - _REPLACED:
                new = self.renewed(attributes[name], 0)
                if new is not attributes[name]:
                    attributes[name] = new

    def renewed(self, value: Any, depth: int) -> Any:
        """``value`` with the new parameters in it: itself where it can be changed."""
        if id(value) in self.successors:
            return self.successors[id(value)]
        never = issubclass(type(value), _ENTERED_NEVER)
        if never or id(value) in self.seen or depth > _DEEPEST:
            return value
        self.seen.add(id(value))
        if isinstance(value, dict):
            keys = self._all(value.keys(), depth)
            values = self._all(value.values(), depth)
            self._refill(value, list(value.items()), list(zip(keys, values, strict=True)))
        elif isinstance(value, list | set | collections.deque):
            self._refill(value, list(value), self._all(value, depth))
        elif isinstance(value, tuple | frozenset):
            items = self._all(value, depth)
            if not _equal(items, value):
                return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        else:
            self._inside(value, depth + 1)
        return value

    def _all(self, values: Iterable[Any], depth: int) -> list[Any]:
        return [self.renewed(x, depth + 1) for x in list(values)]

    def _refill(self, value: Any, before: list[Any], after: list[Any]) -> None:
        if isinstance(value, dict):
            same = all(_equal(new, old) for new, old in zip(after, before, strict=True))
        else:
            same = _equal(after, before)
        if not same:
            fill = value.extend if isinstance(value, list | collections.deque) else value.update
            value.clear()
            fill(after)
            self.undo.append(lambda: (value.clear(), fill(before))[1])

    def _inside(self, value: Any, depth: int) -> None:
        """What functions and plain objects hold on to."""
        if isinstance(value, types.FunctionType):
            for cell in value.__closure__ or ():
                self._cell(cell, depth)
            self.renewed(value.__defaults__, depth)
        elif isinstance(value, types.MethodType):
            self.renewed(value.__self__, depth)
        elif isinstance(value, functools.partial):
            self.renewed(value.func, depth)
            self.renewed(value.keywords, depth)
        elif type(value).__dictoffset__:
            self.renewed(object.__getattribute__(value, "__dict__"), depth)

    def _cell(self, cell: types.CellType, depth: int) -> None:
        self.seen.add(id(cell))
        try:
            before = cell.cell_contents
        except ValueError:  # nothing in it yet
            return
        new = self.renewed(before, depth)
        if new is not before:
            cell.cell_contents = new
            self.undo.append(lambda: setattr(cell, "cell_contents", before))


def _equal(values: Iterable[Any], others: Iterable[Any]) -> bool:
    return all(x is y for x, y in zip(values, others, strict=True))


def _outside(
    names: Mapping[int, str], known: set[int]
) -> tuple[list[tuple[nn.Module, int]], list[Any]]:
    """Modules that share a parameter, and all else that holds one, that is not ``known``."""
    tied: list[tuple[nn.Module, int]] = []
    others: list[Any] = []
    objects = gc.get_objects()
    optimizers = [o for o in objects if issubclass(type(o), torch.optim.Optimizer)]
    groups = {id(g["params"]): o for o in optimizers for g in o.param_groups}
    groups |= {id(o.state): o for o in optimizers}
    for start in range(0, len(objects), _AT_ONCE):
        some = objects[start : start + _AT_ONCE]
        if names.keys().isdisjoint(map(id, gc.get_referents(*some))):
            continue
        for holder in some:
            if id(holder) in known or isinstance(holder, _RUNNING):
                continue
            shared = names.keys() & set(map(id, gc.get_referents(holder)))
            if not shared:
                continue
            module = _module_of(holder)
            if module is None:
                others.append(groups.get(id(holder), holder))
            else:
                tied += [(module, key) for key in shared]
    return tied, others


def _module_of(table: Any) -> nn.Module | None:
    """The module whose parameters ``table`` is."""
    if type(table) is not dict:
        return None
    for owner in gc.get_referrers(table):
        for module in (owner, *gc.get_referrers(owner)) if type(owner) is dict else (owner,):
            if isinstance(module, nn.Module) and module._parameters is table:
                return module
    return None


def _described(holder: Any) -> str:
    kind = type(holder).__name__
    if isinstance(holder, torch.optim.Optimizer):
        return f"in {kind}, made before the model was parallelized: make it afterwards"
    if isinstance(holder, list | tuple | set | dict):
        return f"in a {kind} of {len(holder)}"
    return f"in a {kind}"
