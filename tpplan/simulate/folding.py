"""Stacks of equal layers folded: a short model that stands for a long one, and the way back.

Executing 126 equal layers tells nothing that a few do not. What is kept of a stack is its
beginning, one period of what repeats, and its end; the elements that are kept stay where they
were, so that code which goes by an element's index finds the same.
"""

from __future__ import annotations

import copy
import functools
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from tpplan.compiled import Boundary, CompiledPlan, ModulePlan, ParameterPlan
from tpplan.language import FrozenMap
from tpplan.observe.likeness import identity, shared_tensors
from tpplan.observe.twins import held_by
from tpplan.planner.match import Matches

# boundaries of copied layers must not share a collective with those of the layer they copy
_NUMBERS = 10**9


@dataclass(frozen=True)
class Fold:
    """A list of modules at ``stack`` that repeats itself to its end.

    Attributes:
        length: how many elements the list has.
        start: the first element of those that repeat; period: after how many they do.
        kept: how many elements the shortest list has that stands for the whole one.
    """

    stack: str
    length: int
    start: int
    period: int
    kept: int

    @property
    def times(self) -> int:
        """How many periods the shortest list lacks."""
        return (self.length - self.kept) // self.period

    def shortened(self, more: int) -> Fold:
        """The fold of the list that is ``more`` periods longer than the shortest."""
        return replace(self, length=self.kept + more * self.period)

    def repeats(self, index: int) -> bool:
        """Whether an element of the shortest list is of the period that is left out elsewhere."""
        return self.start <= index < self.start + self.period

    def source(self, index: int) -> int:
        """The element of the shortest list that stands for an element of the whole one."""
        if index < self.start + self.period:
            return index
        if index < self.start + self.period * (self.times + 1):
            return self.start + (index - self.start) % self.period
        return index - self.times * self.period


def find_folds(model: nn.Module, matches: Matches) -> tuple[Fold, ...]:
    """The outermost lists of modules whose elements repeat often enough to leave some out.

    Elements are equal where they are alike, and have the same rules; see ``likeness``.
    """
    rules = {**matches.modules, **matches.parameters}
    shared = shared_tensors(model)
    found: list[Fold] = []
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{fold.stack}.") for fold in found)
        listed = path and isinstance(module, nn.ModuleList | nn.Sequential)
        if inside or not listed or len(module) < 8:
            continue
        if [name for name, _ in module.named_children()] != [str(i) for i in range(len(module))]:
            continue
        told = [identity(m, f"{path}.{n}", rules, shared) for n, m in module.named_children()]
        fold = _fold_of(path, told)
        if fold is not None:
            found.append(fold)
    return tuple(found)


def shortened_model(model: nn.Module, folds: Mapping[Fold, int]) -> nn.Module:
    """A copy of ``model``, on the very same tensors, with short lists of modules.

    Args:
        folds: which, and how many periods more than the shortest list each is to have.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        memo.update((id(tensor), tensor) for tensor in held_by(module))
    for fold, more in folds.items():
        stack = model.get_submodule(fold.stack)
        short = copy.copy(stack)
        kept = fold.kept + more * fold.period
        short._modules = dict(list(stack._modules.items())[:kept])
        memo[id(stack)] = copy.deepcopy(short, memo)
    return copy.deepcopy(model, memo)


def unfolded(short: CompiledPlan, folds: Sequence[Fold], model: nn.Module) -> CompiledPlan:
    """The plan of ``model`` from that of the shortest model that stands for it."""
    modules: dict[str, ModulePlan] = {}
    for path, _ in model.named_modules():
        source, rename = _source(path, folds)
        if source in short.modules:
            modules[path] = rename.apply(short.modules[source])
    parameters: dict[str, ParameterPlan] = {}
    for name, _ in model.named_parameters():
        source, rename = _source(name, folds)
        parameters[name] = rename.apply(short.parameters[source])
    return replace(short, modules=FrozenMap(modules), parameters=FrozenMap(parameters))


def unfolded_names(
    values: Mapping[str, int], folds: Sequence[Fold], model: nn.Module
) -> dict[str, int]:
    """What was found for each parameter of the shortest model, for those of ``model``."""
    sources = {name: _source(name, folds)[0] for name, _ in model.named_parameters()}
    return {name: values[source] for name, source in sources.items() if source in values}


class Rename:
    """Paths of one element of a stack, as those of another one."""

    def __init__(self, stack: str, source: int, target: int) -> None:
        self.source, self.target = source, target
        self._stack = stack
        self._pattern = re.compile(rf"(?<![\w.]){re.escape(stack)}\.{source}(?![\w])")
        self._text = f"{stack}.{target}"

    def text(self, text: str) -> str:
        """A text with the paths in it renamed."""
        if self.source == self.target or self._stack not in text:
            return text
        return self._pattern.sub(self._text, text)

    def apply(self, value: Any) -> Any:
        """Plain data with the paths in it renamed."""
        if self.source == self.target:
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, tuple) and type(value) is tuple:
            renamed = tuple(map(self.apply, value))
            return value if all(map(operator.is_, value, renamed)) else renamed
        if isinstance(value, Boundary):
            value = replace(value, number=value.number + _NUMBERS * self.target)
        if isinstance(value, ModulePlan | ParameterPlan | Boundary):
            changed = {}
            for name in value.__dataclass_fields__:
                held = getattr(value, name)
                if (renamed := self.apply(held)) is not held:
                    changed[name] = renamed
            return replace(value, **changed) if changed else value
        return value


def _source(path: str, folds: Sequence[Fold]) -> tuple[str, Rename]:
    for fold in folds:
        if path.startswith(f"{fold.stack}."):
            index = int(path[len(fold.stack) + 1 :].partition(".")[0])
            source = fold.source(index)
            back = _rename(fold.stack, index, source)
            return back.text(path), _rename(fold.stack, source, index)
    return path, _rename("", 0, 0)


_rename = functools.lru_cache(4096)(Rename)


def _fold_of(path: str, told: Sequence[object]) -> Fold | None:
    length = len(told)
    for period in range(1, length // 3 + 1):
        start = length - period
        while start > 1 and told[start - 1] == told[start - 1 + period]:
            start -= 1
        # the first of each kind may make what the others share, and free it
        start = max(start, period)
        least = start + period + 1
        kept = least + (length - least) % period
        if 2 * kept + period < length:  # what is executed
            return Fold(path, length, start, period, kept)
    return None
