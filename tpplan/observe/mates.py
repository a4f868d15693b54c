"""Modules of a list that code chooses from as it runs, as experts: each of them is called."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from torch import nn

from tpplan.observe.likeness import identity

LISTS = (nn.ModuleList, nn.ModuleDict)
"""Modules of which code calls the members, one or another."""
_ROUNDS = 64
T = TypeVar("T")


class _Mates:
    """The alike members of a list: what code does with one, on other numbers it does with another.

    Attributes:
        reached: which were called; latest: the places of those that the last call reached.
    """

    def __init__(self, members: dict[str, Any]) -> None:
        self.members = members
        self.before = {name: module for name, module in members.items() if module is not None}
        # before they are watched: hooks are a part of what they are
        self.alike: dict[str, Hashable] = {n: identity(m) for n, m in self.before.items()}
        self.reached: set[nn.Module] = set()
        self.latest: list[str] = []

    def watched(self, module: nn.Module) -> contextlib.AbstractContextManager[object]:
        """Note the calls of a member."""

        def note(*_: object) -> None:
            self.reached.add(module)
            self.latest += [name for name, at in self.members.items() if at is module]

        return module.register_forward_pre_hook(note)

    def trade(self) -> bool:
        """Put those that no call reached in the place of those that the last one did."""
        latest, self.latest = dict.fromkeys(self.latest), []
        waiting = [name for name in self.alike if self.members[name] not in self.reached]
        traded = False
        for name in waiting:
            mate = next((at for at in latest if self.alike[at] == self.alike[name]), None)
            if mate is not None:
                del latest[mate]
                self.members[name], self.members[mate] = self.members[mate], self.members[name]
                self.alike[name], self.alike[mate] = self.alike[mate], self.alike[name]
                traded = True
        return traded


def with_mates(model: nn.Module, calls: Iterable[T]) -> Iterator[T]:
    """``calls``, and the first of them again until it has reached every member of a list.

    Where it reached some, others that are like these are in their places then: as if the numbers
    were others that the code chooses by. In the end ``model`` is as it was.
    """
    return _run([_Mates(m._modules) for m in model.modules() if isinstance(m, LISTS)], calls)


def _run(found: Sequence[_Mates], calls: Iterable[T]) -> Iterator[T]:
    with contextlib.ExitStack() as hooks:
        for mates in found:
            hooks.callback(mates.members.update, mates.before)
            for module in mates.before.values():
                hooks.enter_context(mates.watched(module))
        first = None
        for call in calls:
            first = first or call
            yield call
        reached = -1
        for _ in range(_ROUNDS):
            before, reached = reached, sum(len(mates.reached) for mates in found)
            traded = [mates.trade() for mates in found]
            if first is None or reached == before or True not in traded:
                return
            yield first
