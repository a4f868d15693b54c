"""A process as it was: what a model's code has put outside of the model's modules is put back.

Tables in a global dictionary, losses in a list, a tensor in a class: of a run on fake tensors, on
a miniature or on a simulated rank none of that may be met by another run, or by the user's own.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import operator
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tpplan.compat import is_fake
from tpplan.observe.caches import no_fakes_kept, passed_by
from tpplan.observe.chance import Chance, chance_of, chances
from tpplan.observe.outside import Namespace, Outside, outside_of

_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_CONTAINERS = frozenset({*_MAPPINGS, list, deque, set})
_NUMBERS = (int, float, complex)
_PLAIN = (*_NUMBERS, str, bytes, tuple, frozenset, torch.dtype, torch.device, type(None))
# of what is larger the elements are not looked into, and of all of them no more than the last
_LARGE, _MOST = 10_000, 100_000
_NONE = object()
_Entries = list[tuple[Any, Any]]

_now: ContextVar[Snapshot | None] = ContextVar("_now", default=None)


@dataclass(frozen=True)
class _Held:
    """A container or a namespace, and what was in it: ``before``."""

    thing: Any
    package: str
    before: Any

    def is_same(self) -> bool:
        now = self.thing.read() if isinstance(self.thing, Namespace) else self.thing
        return _alike(now, self.before)

    def differing(self) -> tuple[list[Any], list[Any]]:
        """What is in it now and was not, and what was and is no more; of a mapping, pairs."""
        now = _contents(self.thing)
        if isinstance(now, dict):
            return _others(now, self.before), _others(self.before, now)
        had, has = {id(x) for x in self.before}, {id(x) for x in now}
        gained = [x for x in now if id(x) not in had]
        return gained, [x for x in self.before if id(x) not in has]

    def put_back(self) -> None:
        """Make it as it was, but for code that was looked up or made meanwhile."""
        gained, _ = self.differing()
        if isinstance(self.before, dict):
            _fill(self.thing, {**self.before, **{k: v for k, v in gained if not _is_data(v)}})
        else:
            _fill(self.thing, self.before)


class Snapshot:
    """What was kept outside of a model's modules at one time.

    Attributes:
        users: what of it is of the user's own code, not of installed packages.
        touched: whether some run since then has changed it, or may have for a while: where the
            user's code has a container, that need not show afterwards.
        drawn: the random sequences of the process, torch's aside, that some run drew from.
    """

    def __init__(self, model: nn.Module) -> None:
        self.kinds = {type(module) for module in model.modules()}
        self.held = [*_held_in(outside_of(model))]
        self.held += [_Held(chance, "", chance.read()) for chance in chances()]
        self.users = [held for held in self.held if not held.package]
        self.drawn = frozenset[str]()
        self.touched = any(not isinstance(held.thing, Namespace) for held in self.users)

    def put_back(self, packages: bool = True) -> list[tuple[Any, Any]]:
        """Make all as it was; what was not, and what was in it.

        Args:
            packages: whether what is of installed packages, too.
        """
        changed = self.changed(self.held if packages else self.users)
        own = [(held.thing, _contents(held.thing)) for held in changed]
        for held in changed:
            held.put_back()
        self.touched |= bool(changed)
        sources = (held.thing for held in changed if isinstance(held.thing, Chance))
        self.drawn |= {source.name for source in sources if source.name}
        return own

    def changed(self, among: Iterable[_Held]) -> list[_Held]:
        """What is to be put back.

        What belongs together changes together: a table and the flag that says that there is one.
        Flags, names and functions alone are what code has found out about the process. So it is
        where nothing is a tensor of what a Python module of an installed package has changed, or
        the user's ones together, and of these no number either.
        """
        found: dict[str, list[_Held]] = {}
        for held in among:
            if not held.is_same():
                found.setdefault(held.package, []).append(held)
        return [
            held
            for package, several in found.items()
            if any(_counts(held, bool(package)) for held in several)
            for held in several
        ]


class View:
    """A context in which what is kept is that of one run, which may be entered again to go on."""

    def __init__(self, kept: Snapshot | None) -> None:
        self.kept = kept
        self.own: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        for thing, contents in self.own:
            _fill(thing, contents)

    def __exit__(self, *_: object) -> None:
        if self.kept is not None:
            self.own = self.kept.put_back()


@contextlib.contextmanager
def nothing_kept(
    model: nn.Module, foreign: Callable[[torch.Tensor], bool] = is_fake
) -> Iterator[None]:
    """``as_before``, of ``functools.lru_cache`` as well.

    Args:
        foreign: which tensors none of these may go on with.
    """
    with as_before(model), no_fakes_kept(foreign):
        yield


@contextlib.contextmanager
def as_before(model: nn.Module) -> Iterator[Snapshot]:
    """Within it, code of ``model`` runs; in the end what it keeps outside of it is as before."""
    around = _now.get()
    kinds = {type(module) for module in model.modules()}
    known = around is not None and kinds <= around.kinds
    kept = around if around is not None and known else Snapshot(model)
    token = _now.set(kept)
    try:
        yield kept
    finally:
        _now.reset(token)
        kept.put_back()


@contextlib.contextmanager
def by_itself(packages: bool = False) -> Iterator[None]:
    """Of the runs within ``as_before``, one of which the others meet nothing.

    Args:
        packages: whether that goes for what installed packages keep, which takes a millisecond;
            not needed where it is real numbers, and the others' are.
    """
    kept = _now.get()
    try:
        yield
    finally:
        if kept is not None:
            kept.put_back(packages)


@contextlib.contextmanager
def modules_as_before(model: nn.Module) -> Iterator[None]:
    """Within it, code of ``model`` runs; in the end its modules hold what they held.

    Counters, lists and caches, that is, and generators; what was written into tensors stays.
    """
    held = [*_held_in(Outside([Namespace(vars(module)) for module in model.modules()]))]
    try:
        yield
    finally:
        for one in held:
            if not one.is_same():
                one.put_back()


def view() -> View:
    """What one run keeps, of several that take turns within ``as_before``."""
    return View(_now.get())


def apart(run: Callable[[Sequence[View] | None], list[Any]], count: int) -> list[Any]:
    """``run`` of ``count`` ranks at once, or one at a time, given what each of them keeps.

    One at a time where the model's code keeps something, or may: they would find that of each
    other. Where that shows only afterwards, they are run again.
    """
    kept = _now.get()
    if kept is None:
        return run(None)
    if not kept.touched:
        try:
            found = run(None)
        except Exception:
            if not kept.put_back():
                raise
        else:
            if not kept.put_back():
                return found
    return run([View(kept) for _ in range(count)])


def _held_in(outside: Outside) -> Iterator[_Held]:
    """Every namespace and container, those in others too, the nearest first."""
    met: set[int] = set()
    waiting: deque[tuple[Any, str]] = deque((n, n.package) for n in outside.namespaces)
    waiting.extend((value, "") for value in outside.defaults if type(value) in _CONTAINERS)
    budget = _MOST
    while waiting:
        thing, package = waiting.popleft()
        key = id(thing.owner) if isinstance(thing, Namespace) else id(thing)
        if key in met:
            continue
        met.add(key)
        before = _contents(thing)
        yield _Held(thing, package, before)
        if len(before) > min(_LARGE, budget):
            continue
        budget -= len(before)
        for inner in _inside(before):
            kind = type(inner)
            if kind in _CONTAINERS or (kind is tuple and len(inner) <= _LARGE):
                waiting.append((inner, package))
            elif id(inner) not in met and (chance := chance_of(inner)):
                met.add(id(inner))
                yield _Held(chance, package, chance.read())
            elif kind.__module__ in outside.own and _has_attributes(inner):
                waiting.append((Namespace(inner.__dict__, package), package))


def _inside(before: Any) -> Iterator[Any]:
    """What is in a container or namespace, but for what Python keeps there for itself."""
    if isinstance(before, dict):
        return (v for k, v in before.items() if not (isinstance(k, str) and k[:2] == "__"))
    return iter(before)


def _has_attributes(thing: Any) -> bool:
    """Whether it is an object that may keep something; a global module's are its own matter."""
    own = not isinstance(thing, type | nn.Module)
    return own and type(getattr(thing, "__dict__", None)) is dict


def _contents(thing: Any) -> Any:
    """A copy of what is in a container or namespace: a dictionary, a set or a list."""
    if isinstance(thing, Namespace):
        return thing.read()
    if isinstance(thing, dict):
        return dict(thing)
    return set(thing) if isinstance(thing, set) else list(thing)


def _alike(now: Any, before: Any) -> bool:
    """Whether two have the same objects in the same order, where there is one."""
    if len(now) != len(before):
        return False
    if isinstance(now, dict):
        return _same(now, before) and _same(now.values(), before.values())
    return bool(now == before) if isinstance(now, set) else _same(now, before)


def _same(some: Iterable[Any], others: Iterable[Any]) -> bool:
    return all(map(operator.is_, some, others))


def _others(some: Mapping[Any, Any], than: Mapping[Any, Any]) -> _Entries:
    return [(key, value) for key, value in some.items() if than.get(key, _NONE) is not value]


def _fill(thing: Any, contents: Any) -> None:
    """Make the contents of a container or namespace these."""
    if isinstance(thing, Namespace):
        now = thing.read()
        for name, _ in _others(now, contents):
            if name not in contents:
                thing.drop(name)
        for name, value in _others(contents, now):
            thing.write(name, value)
    elif isinstance(thing, list):
        thing[:] = contents
    elif isinstance(thing, deque):
        thing.clear()
        thing.extend(contents)
    else:
        thing.clear()
        # not as a Counter's, which adds
        (dict if isinstance(thing, dict) else set).update(thing, contents)  # type: ignore[attr-defined]


def _counts(held: _Held, packaged: bool) -> bool:
    """Whether what has changed there are tensors or, in the user's code, numbers."""
    changed = list(itertools.chain(*held.differing()))
    if _holds_tensor(changed):
        return True
    values = [value for _, value in changed] if isinstance(held.before, dict) else changed
    return not packaged and _holds_number(values)


def _is_data(value: Any) -> bool:
    return isinstance(value, _PLAIN) or type(value) in _CONTAINERS or _holds_tensor([value])


def _holds_number(value: Any, depth: int = 6) -> bool:
    """Whether a number is in a container, at some depth; a flag is none."""
    if isinstance(value, _NUMBERS):
        return not isinstance(value, bool)
    if not depth or not (type(value) in _CONTAINERS or isinstance(value, tuple)):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return any(_holds_number(x, depth - 1) for x in itertools.islice(inner, _LARGE))


def _holds_tensor(values: list[Any], depth: int = 6) -> bool:
    """Whether a tensor is among ``values`` or in what they refer to."""
    met: set[int] = set()
    inner = values
    for _ in range(depth):
        if any(isinstance(thing, torch.Tensor) for thing in inner):
            return True
        met.update(map(id, inner))
        found = [thing for thing in inner if not passed_by(thing)][:_MOST]
        inner = [t for t in gc.get_referents(*found) if id(t) not in met] if found else []
    return False
