"""What a model's code keeps of its runs: nothing of a run on fake tensors may stay there."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tpplan.compat import is_fake

_Cache = functools._lru_cache_wrapper
_PASSED = (type, types.ModuleType, types.FunctionType, types.CodeType, str, bytes, int, float)
# Python 3.12 begins with some hundreds of objects that are frozen; who freezes what has imported
# torch has a hundred thousand
_AT_START = 10_000
_DEPTH = 6
_known: weakref.WeakSet[_Cache[Any]] = weakref.WeakSet()
"""Caches that were met before: only calls since can have put something foreign into them."""
_FEW = 1_000


class _Searched:
    """What a search left.

    Attributes:
        others: the references to the type of the caches that were no known cache's; -1 where not
            all objects were searched. As long as these are as many, every cache is known.
        frozen: whether what is frozen was searched before.
    """

    others = -1
    frozen = False


@contextlib.contextmanager
def no_fakes_kept(foreign: Callable[[torch.Tensor], bool] = is_fake) -> Iterator[None]:
    """Empty, in the end, the caches (``functools.lru_cache``) that hold fake tensors.

    A model that keeps its masks in one would go on with fakes in the user's own runs.

    Args:
        foreign: which tensors the user's runs must not meet.
    """
    before = {cache: cache.cache_info() for cache in tuple(_known)}
    try:
        yield
    finally:
        _search()
        for cache in tuple(_known):
            info = cache.cache_info()
            if info.currsize and before.get(cache) != info and _holds(cache, foreign):
                cache.cache_clear()


@contextlib.contextmanager
def only_new_searched() -> Iterator[None]:
    """Within it, what was there before is neither searched for caches again nor for garbage.

    A process with torch and transformers has a million objects, and each search passes over all.
    """
    if gc.get_freeze_count() > _AT_START:  # within another, or the user's own, which stays
        yield
        return
    _search()
    gc.freeze()
    _Searched.frozen = True
    try:
        yield
    finally:
        _Searched.frozen = False
        gc.unfreeze()


def _search() -> None:
    """Have all caches among the known ones. Each refers to its type."""
    if _others() != _Searched.others:
        complete = _Searched.frozen or gc.get_freeze_count() <= _AT_START
        # asked of all objects at once, where all cost as much
        _known.update(thing for thing in gc.get_referrers(_Cache) if type(thing) is _Cache)
        few = 0 <= _others() < _FEW  # an interpreter may not count references to types
        _Searched.others = _others() if complete and few else -1


def _others() -> int:
    return sys.getrefcount(_Cache) - len(_known)


def _holds(cache: object, foreign: Callable[[torch.Tensor], bool]) -> bool:
    met: set[int] = set()
    found = [cache]
    for _ in range(_DEPTH):
        inner = [thing for thing in gc.get_referents(*found) if id(thing) not in met]
        if any(isinstance(thing, torch.Tensor) and foreign(thing) for thing in inner):
            return True
        met.update(map(id, inner))
        found = [thing for thing in inner if not passed_by(thing)]
    return False


def passed_by(thing: object) -> bool:
    """Whether what a thing refers to is not looked into for tensors."""
    return isinstance(thing, (*_PASSED, torch.Tensor))
