"""The proof of the sharded regions, and the sizes in their code that have to be a rank's own.

Code that computes with a number of heads, or with the width of its input, is right on a rank where
that number is the rank's own. Which numbers those are no name tells: a change is made where a
region is proved with it and not without, the fewest of them first.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.tensor import Shard

from tpplan.observe.shadow import padded, shortened
from tpplan.planner.attributes import named_in_code
from tpplan.planner.match import folded
from tpplan.planner.outcome import Outcome
from tpplan.planner.replay import Failure, prove
from tpplan.planner.unproved import say_unproved
from tpplan.styles import NONE, named

_CHANGES, _TRIES = 3, 40
Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class _Change:
    """An attribute of regions that are alike, with its values; without a name, narrowed inputs.

    Attributes:
        owner: the path in the region of the module that has it.
        values: module path -> (present value, value per rank).
    """

    owner: str
    name: str
    values: Mapping[str, tuple[int, int]]


class Regions:
    """Proves what ``found`` says of the sharded regions, and adds to it what they need."""

    def __init__(self, found: Outcome) -> None:
        self.found = found

    def check(self, call: Call) -> None:
        """Replay the regions on random numbers; say where that fails."""
        found = self.found
        calls = [shortened(call)]
        if any(rows.shared() for rows in found.sizes.layouts.values()):
            calls += padded(found.model, calls[0])
        failure, settled = self._failure(calls), set[str]()
        while failure is not None:
            region = self._region(failure.path)
            if region is None or folded(region) in settled:
                break
            settled.add(folded(region))
            failure = self._settle(region, failure, calls)
        if failure is not None:
            say_unproved(failure, found)

    def _failure(self, calls: Sequence[Call]) -> Failure | None:
        found = self.found
        plans, parameters = found.module_plans(), found.matches.parameters
        bare = {n: r for n, r in parameters.items() if isinstance(named(r.style).bare, Shard)}
        columns = found.sizes.columns | found.multihead
        cut = (found.sizes.layouts, columns, bare, found.placing.lists)
        tried = (prove(found.model, plans, *cut, found.tp, call) for call in calls)
        return next((failure for failure in tried if failure is not None), None)

    def _region(self, path: str) -> str | None:
        """The module around a path, or at it, that is given what enters a region."""
        while path not in self.found.boundaries or path in self.found.sizes.columns:
            if not path:
                return None
            path = path.rpartition(".")[0]
        return path

    def _settle(self, region: str, failure: Failure, calls: Sequence[Call]) -> Failure | None:
        """Make the fewest changes with which the regions like this one are proved, if any do."""
        found = self.found
        alike = [path for path in found.boundaries if folded(path) == folded(region)]
        changes = [_Change("", "", dict.fromkeys(alike, (0, 0))), *self._attributes(alike)]
        combinations = (
            chosen
            for count in range(1, _CHANGES + 1)
            for chosen in itertools.combinations(changes, count)
            if len({(change.owner, change.name) for change in chosen}) == count
        )
        before = found.boundaries, found.sizes.attributes
        for chosen in itertools.islice(combinations, _TRIES):
            for change in chosen:
                self._make(change)
            left = self._failure(calls)
            if left is None or self._region(left.path) not in alike:
                return left
            found.boundaries, found.sizes.attributes = before
        return failure

    def _make(self, change: _Change) -> None:
        found = self.found
        if not change.name:
            narrowed = {
                path: tuple(replace(b, narrowed=True) for b in found.boundaries[path])
                for path in change.values
            }
            found.boundaries = {**found.boundaries, **narrowed}
            return
        stated = found.sizes.attributes
        own = {
            path: {**stated.get(path, {}), change.name: value}
            for path, value in change.values.items()
        }
        found.sizes.attributes = {**stated, **own}

    def _attributes(self, alike: Sequence[str]) -> list[_Change]:
        """Attributes that may hold a number of heads or of columns, as the regions' code uses."""
        made: dict[tuple[str, str, str], dict[str, tuple[int, int]]] = {}
        for region in alike:
            sizes = dict(self._sizes(region))
            for path, module in self.found.model.get_submodule(region).named_modules(prefix=region):
                style = self.found.styles.get(path, NONE)
                if style is not NONE and not style.heads:
                    continue
                for name, value in named_in_code(module).items():
                    if name in self.found.sizes.attributes.get(path, {}):
                        continue
                    for what, (whole, local) in sizes.items():
                        if value == whole != local:
                            key = path.removeprefix(region), name, what
                            made.setdefault(key, {})[path] = (whole, local)
        different: list[_Change] = []
        for (owner, name, _), values in made.items():
            change = _Change(owner, name, values)
            if change not in different:
                different.append(change)
        return different

    def _sizes(self, region: str) -> Iterator[tuple[str, tuple[int, int]]]:
        """Numbers of heads and columns in a region: what -> the model's, and a rank's."""
        found = self.found
        geometry, tp = found.sizes.geometry, found.tp
        inner = [path for path in found.sizes.columns if path.startswith(f"{region}.")]
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
        for path in inner:
            outputs, rows = geometry.outputs(path), found.sizes.layouts.get(path)
            yield path.removeprefix(region), (outputs, rows.length() if rows else outputs // tp)
