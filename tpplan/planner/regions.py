"""The proof of the sharded regions, and the sizes in their code that have to be a rank's own.

Code that computes with a number of heads, or with the width of its input, is right on a rank where
that number is the rank's own. Which numbers those are no name tells: a change is made where a
region is proved with it and not without, the fewest of them first.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tpplan.observe.calls import padded, shortened
from tpplan.planner.attributes import named_in_code
from tpplan.planner.events import Failure
from tpplan.planner.handed import Parts, leaving
from tpplan.planner.match import folded
from tpplan.planner.outcome import Outcome
from tpplan.planner.replay import prove
from tpplan.planner.unproved import Width, rule_near, say_unproved
from tpplan.styles import NONE, named

_CHANGES, _TRIES = 4, 80
# a cache is of a batch, its heads, positions and columns, in some order
_CACHED, _HEADS = 4, (1, 2, 0)
Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class _Change:
    """Something of regions that are alike: an attribute, all caches, or the inputs' width.

    Attributes:
        what: which of them: of an attribute its module's path in the region, and its name.
        values: of an attribute: module path -> (present value, value per rank).
        cut: of caches: module path -> name -> the dimension of heads, and how many.
        narrowed: the modules whose inputs are narrowed.
    """

    what: tuple[str, str]
    values: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    cut: Mapping[str, Mapping[str, tuple[int, int]]] = field(default_factory=dict)
    narrowed: Sequence[str] = ()


class Regions:
    """Proves what ``found`` says of the sharded regions, and adds to it what they need."""

    def __init__(self, found: Outcome) -> None:
        self.found = found
        self.shown: tuple[str, ...] = ()  # see ``Width``

    def check(self, given: Sequence[Call]) -> None:
        """Replay the regions on random numbers; say where that fails."""
        found = self.found
        calls = self._with_padding([shortened(call) for call in given])
        failure, settled = self._failure(calls), set[str]()
        if failure is not None and failure.rank is None:  # some code takes inputs of one size only
            calls = self._with_padding(given)
            failure = self._failure(calls)
        while failure is not None:
            region = self._region(failure.path)
            if region is None or folded(region) in settled:
                break
            settled.add(folded(region))
            failure = self._settle(region, failure, calls)
        if failure is not None:
            say_unproved(failure, found, self._width(failure, calls))
        elif places := leaving(found.trace, found.flow):
            parts = Parts(places, found.tp)
            if self._failure(calls, parts) is None:
                found.handed = parts.found()
            if parts.uneven:
                path = next(iter(parts.uneven))
                rule = rule_near(found.matches.modules, path)
                message = "gives what leaves the model, and ranks do not have equal parts of it"
                hint = "take a tp that divides its key-value heads, or let the model not return it"
                found.complaints.about(rule, parts.uneven, message, hint)

    def _with_padding(self, calls: Sequence[Call]) -> list[Call]:
        shared = any(rows.shared() for rows in self.found.sizes.layouts.values())
        return [*calls, *(padded(self.found.model, calls[0]) if shared else [])]

    def _failure(self, calls: Sequence[Call], parts: Parts | None = None) -> Failure | None:
        found = self.found
        plans, parameters = found.module_plans(), found.matches.parameters
        placement = found.placing.placement
        bare = {n: (r, placement(n)) for n, r in parameters.items() if named(r.style).sharded}
        columns = found.sizes.columns | found.multihead
        cut = (found.sizes.layouts, columns, bare, found.placing.lists)
        # parts in blocks are answered, for as many ranks as there are; others are computed
        every = any(r.summed is not None and not r.block for r in found.bare.values())
        how = every, found.known, {call.path for call in found.trace.calls}
        tried = (
            prove(found.model, plans, *cut, found.tp, call, *how, self.shown, parts)
            for call in calls
        )
        return next((failure for failure in tried if failure is not None), None)

    def _region(self, path: str) -> str | None:
        """The module around a path, or at it, that is given what enters a region.

        Where there is none, it enters at the projections, in the code of the module around them.
        """
        around = path
        while around not in self.found.boundaries or around in self.found.sizes.columns:
            if not around:
                return self._calling(path)
            around = around.rpartition(".")[0]
        return around

    def _calling(self, path: str) -> str | None:
        """The innermost module around a path, or at it, with projections inside."""
        while not any(_inside(other, path) for other in self.found.sizes.columns):
            if not path:
                return None
            path = path.rpartition(".")[0]
        return path

    def _alike(self, region: str) -> list[str]:
        called = dict.fromkeys(call.path for call in self.found.trace.calls)
        return [path for path in called if folded(path) == folded(region)]

    def _width(self, failure: Failure, calls: Sequence[Call]) -> Width | None:
        """Whether it would do to show the code a share of the width of what its modules give."""
        region, found = self._calling(failure.path), self.found
        if region is None or region in found.boundaries or failure.rank is None:
            return None
        entering: dict[str, list[str]] = {}  # what gives it -> the projections it enters at
        for call in found.trace.calls:
            for path in (p for p in found.boundaries if p in found.sizes.columns):
                inlined = folded(path.rpartition(".")[0]) == folded(region)
                if inlined and any(b.number in call.outputs for b in found.boundaries[path]):
                    entering.setdefault(call.path, []).append(path)
        if not entering:
            return None
        before, self.shown = found.sizes.attributes, tuple(entering)
        left = self._failure(calls)
        if left is not None:
            left = self._settle(region, left, calls)
        if left is None:
            self._show_fewer(calls)
        made, found.sizes.attributes = found.sizes.attributes, before
        names = {name for path in made for name in made[path].keys() - before.get(path, {}).keys()}
        layers = dict.fromkeys(path for maker in self.shown for path in entering[maker])
        return Width(self.shown, tuple(layers), tuple(sorted(names))) if left is None else None

    def _show_fewer(self, calls: Sequence[Call]) -> None:
        """Leave out the modules of which the code may be shown the whole as well."""
        for kind in dict.fromkeys(map(folded, self.shown)):
            shown = self.shown
            self.shown = tuple(path for path in shown if folded(path) != kind)
            if self._failure(calls) is not None:
                self.shown = shown

    def _settle(self, region: str, failure: Failure, calls: Sequence[Call]) -> Failure | None:
        """Make the fewest changes with which the regions like this one are proved, if any do."""
        found = self.found
        alike = self._alike(region)
        entered = [path for path in alike if path in found.boundaries]
        width = [_Change(("", "width"), narrowed=entered)] if entered else []
        changes = [*width, *self._attributes(alike)]
        # a rank's heads would be spread over a whole cache, if there are few enough of them
        first = [(cache,) for cache in self._caches(alike)]
        every = (
            (*cached, *chosen)
            for cached in (*first, ())
            for count in range(not cached, _CHANGES)
            for chosen in itertools.combinations(changes, count)
            if len({change.what for change in chosen}) == count
        )
        combinations = dict(enumerate(itertools.islice(every, _TRIES)))
        kinds = tuple(change.what for change in (*itertools.chain(*first), *changes))
        key, settled = (*self._hanging_on(alike), kinds), found.known.settled
        order = sorted(combinations, key=lambda n: n != settled.get(key, (None, 0))[1])
        before = found.boundaries, found.sizes.attributes, found.sizes.cut
        for n in order:
            for change in combinations[n]:
                self._make(change)
            left = self._failure(calls)
            if left is None or self._region(left.path) not in alike:
                settled[key] = found.model, n
                return left
            found.boundaries, found.sizes.attributes, found.sizes.cut = before
        return failure

    def _hanging_on(self, alike: Sequence[str]) -> tuple[Hashable, ...]:
        """Equal for regions of one model under the same rules: the same changes make them right."""
        found = self.found
        rules = {**found.matches.modules, **found.matches.parameters, **found.matches.buffers}
        told = tuple(
            (path, rule.style, repr(dict(rule.options)))
            for path, rule in rules.items()
            if any(path == region or _inside(path, region) for region in alike)
        )
        return id(found.model), found.tp, found.ep, tuple(alike), self.shown, told

    def _make(self, change: _Change) -> None:
        found = self.found
        narrowed = {
            path: tuple(replace(b, narrowed=True) for b in found.boundaries[path])
            for path in change.narrowed
        }
        found.boundaries = {**found.boundaries, **narrowed}
        stated, name = found.sizes.attributes, change.what[1]
        own = {path: {**stated.get(path, {}), name: v} for path, v in change.values.items()}
        found.sizes.attributes = {**stated, **own}
        found.sizes.cut = {**found.sizes.cut, **{p: dict(c) for p, c in change.cut.items()}}

    def _caches(self, alike: Sequence[str]) -> list[_Change]:
        """Tensors of the regions' modules that may hold keys or values, by their heads."""
        changes: list[_Change] = []
        for count, dim in itertools.product(("kv_heads", "heads"), _HEADS):
            cut: dict[str, dict[str, tuple[int, int]]] = {}
            for region in alike:
                heads = dict(self._sizes(region)).get(count, (0, 0))[0]
                inner = self.found.model.get_submodule(region).named_modules(prefix=region)
                for path, module in inner:
                    for name, value in {**vars(module), **module._buffers}.items():
                        held = isinstance(value, torch.Tensor) and value.dim() == _CACHED
                        if held and heads > 1 and value.size(dim) == heads:
                            cut.setdefault(path, {})[name] = (dim, heads)
            if cut and all(cut != other.cut for other in changes):
                changes.append(_Change(("", "caches"), cut=cut))
        return changes

    def _attributes(self, alike: Sequence[str]) -> list[_Change]:
        """Attributes that may hold a number of heads or of columns, as the regions' code uses."""
        made: dict[tuple[str, str, str], dict[str, tuple[int, int]]] = {}
        for region in alike:
            sizes = dict(self._sizes(region))
            for path, module in self.found.model.get_submodule(region).named_modules(prefix=region):
                style = self.found.styles.get(path, NONE)
                # what works on columns may count them; a projection's numbers are its own
                works = style.columns and path not in self.found.sizes.columns
                if style is not NONE and not (style.heads or works):
                    continue
                for name, value in named_in_code(module).items():
                    if name in self.found.sizes.attributes.get(path, {}):
                        continue
                    heads = dict(self._dividing(region, value))
                    for what, (whole, local) in {**sizes, **heads}.items():
                        if value == whole != local:
                            key = path.removeprefix(region), name, what
                            made.setdefault(key, {})[path] = (whole, local)
        different: list[_Change] = []
        for (owner, name, _), values in made.items():
            change = _Change((owner, name), values)
            if change not in different:
                different.append(change)
        return different

    def _dividing(self, region: str, value: int) -> Iterator[tuple[str, tuple[int, int]]]:
        """A number that may count the heads in a bare parameter, of which a trace shows none."""
        tp = self.found.tp
        if value > 1 and value % tp == 0:
            for leaf, (whole, _) in self._cut_sizes(region):
                if whole % value == 0:
                    yield f"of {leaf}", (value, value // tp)

    def _cut_sizes(self, region: str) -> Iterator[tuple[str, tuple[int, int]]]:
        """How much of each cut parameter of a region's own the model has, and a rank."""
        for leaf in self.found.model.get_submodule(region)._parameters:
            name = f"{region}.{leaf}".lstrip(".")
            if region in self.found.bare and name in self.found.matches.parameters:
                plan = self.found.parameter_plan((name,))
                for whole, own in zip(plan.shape, plan.local_shape, strict=True):
                    if whole != own:
                        yield leaf, (whole, own)

    def _sizes(self, region: str) -> Iterator[tuple[str, tuple[int, int]]]:
        """Numbers of heads and columns in a region: what -> the model's, and a rank's."""
        found = self.found
        geometry, tp = found.sizes.geometry, found.tp
        inner = [path for path in found.sizes.columns if _inside(path, region)]
        for group in dict.fromkeys(geometry.group_of(path) for path in inner):
            whole, own = geometry.groups[group].known(), geometry.groups[group].known(tp)
            if whole.keys() >= {"heads", "kv_heads"} and whole["kv_heads"]:
                sizes = (whole["heads"] // whole["kv_heads"], own["heads"] // own["kv_heads"])
                yield "group", sizes
            for count in ("heads", "kv_heads"):
                if count in whole:
                    yield count, (whole[count], own[count])
                if whole.keys() >= {count, "head_dim"}:
                    width = whole["head_dim"]
                    yield f"{count} * head_dim", (whole[count] * width, own[count] * width)
        yield from self._cut_sizes(region)
        for path in inner:
            outputs, rows = geometry.outputs(path), found.sizes.layouts.get(path)
            yield path.removeprefix(region), (outputs, rows.length() if rows else outputs // tp)


def _inside(path: str, outer: str) -> bool:
    return not outer or path.startswith(f"{outer}.")
