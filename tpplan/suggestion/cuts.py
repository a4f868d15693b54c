"""Ways to shard a region as its numbers hang together, whatever its code does with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.nn.modules.conv import _ConvNd

from tpplan.planner.attributes import integers
from tpplan.styles.attention import ATTENTION
from tpplan.styles.colwise import COLWISE
from tpplan.styles.rowwise import ROWWISE
from tpplan.suggestion.bench import Bench, tensors_of
from tpplan.suggestion.draft import WHOLE, Decision
from tpplan.suggestion.hanging import Cut, Hanging, hanging
from tpplan.suggestion.layouts import Layouts
from tpplan.suggestion.share import Change, by_heads, changes_for, heads_of, unseen_cuts
from tpplan.suggestion.units import Kind, Units

_STATED = 4


class Cuts:
    """What is seen of one region, as decisions by path."""

    def __init__(self, layouts: Layouts, units: Units, bench: Bench, tp: int) -> None:
        self.layouts, self.units, self.bench, self.tp = layouts, units, bench, tp
        self.around, region = layouts.around, layouts.region
        # all that it has is given the stream, or gives it back
        self.plain = not (region.bare or region.whole or region.scales)
        self.inner = {
            path.removeprefix(f"{self.around}."): kind
            for path, kind in units.kinds.items()
            if path.startswith(f"{self.around}.")
        }

    def variants(self) -> list[dict[str, Decision]]:
        """The likeliest first; none where there is nothing to see."""
        region = self.layouts.region
        if region.stacked or not region.rows or not self.around:
            return []
        if self.plain and not self._takes_turns():
            return []
        given = self.bench.given(self.around)
        if given is None:
            return []
        module, end = self.bench.model.get_submodule(self.around), region.rows[0]
        end = end.removeprefix(f"{self.around}.")
        norms = self._norms()
        products = [p for p, kind in self.inner.items() if kind is Kind.PRODUCT and p != end]
        readings = hanging(module, given, end, norms, [] if self.plain else products)
        readings = [seen for seen in readings if not self.plain or seen.rounds > 1]
        told = [changes_for(module, given, end, seen, norms, self.tp) for seen in readings]
        if all(changes is None for changes in told):
            return [] if not readings else list(self._written(readings[-1], (), end))
        return [
            variant
            for seen, changes in zip(readings, told, strict=True)
            if changes is not None
            for variant in self._written(seen, changes, end)
        ]

    def _takes_turns(self) -> bool:
        """Whether there are fewer keys than queries, which these may take in turns."""
        shapes = self.layouts.shapes
        return shapes.attends and any(n % shapes.width for n in shapes.outputs.values())

    def _norms(self) -> list[str]:
        """Modules with a number for each column of what they are given, heads not told apart."""
        found = []
        for path, kind in self.inner.items():
            trace = self.layouts.trace
            call = self.layouts.calls.get(f"{self.around}.{path}")
            given = next((n for n in call.arguments if n in trace.floating), -1) if call else -1
            shape = trace.shapes.get(given, ())
            own = self.units.model.get_submodule(f"{self.around}.{path}").parameters()
            if kind is Kind.SCALES and len(shape) == 3 and all(p.numel() == shape[-1] for p in own):
                found.append(path)
        return found

    # --- as decisions

    def _written(
        self, seen: Hanging, changes: tuple[Change, ...], end: str
    ) -> Iterator[dict[str, Decision]]:
        names = [f"part{n + 1}" for n in range(seen.rounds)]
        rounds: dict[str, object] = {"packed": names} if len(names) > 1 else {}
        rules = {f"{self.around}.{end}": Decision(ROWWISE.name, rounds)}
        for path, cut in seen.inside.items():
            output = "inside" if cut is None else "shard"
            rules[f"{self.around}.{path}"] = Decision(ROWWISE.name, {"output": output})
        heads = heads_of(seen)
        for name, found in {**seen.cuts, **unseen_cuts(seen)}.items():
            path, decision = self._rule(name, found, heads)
            rules.setdefault(f"{self.around}.{path}", decision)
        for name in seen.whole:
            path = self._of_module(name) or name
            if path == name and len(self._shape(name)) < 2:
                continue
            rules.setdefault(f"{self.around}.{path}", WHOLE)
        told: dict[str, dict[str, object]] = {}
        for change in changes:
            path = f"{self.around}.{change.module}".rstrip(".")
            told.setdefault(path, {})[change.name] = change.text
        stated = {
            path: Decision(ATTENTION.name, {"attributes": some}) for path, some in told.items()
        }
        entered = {} if self.plain else self.layouts.entry()
        # a norm that is cut counts its heads by itself
        counted = {path: decision for path, decision in stated.items() if path not in rules}
        for some in (counted, stated) if counted != stated else (stated,):
            for path, decision in entered.items():
                both = {**decision.options, **(some[path].options if path in some else {})}
                yield {**rules, **some, path: Decision(ATTENTION.name, both)}
            yield {**rules, **some}
            if self.around not in some:
                yield {**rules, **some, self.around: Decision(ATTENTION.name)}

    def _rule(self, name: str, cut: Cut, heads: int) -> tuple[str, Decision]:
        """The path of the module that has a parameter, or its own, and its rule."""
        path = self._of_module(name)
        options: dict[str, Any] = {"dim": cut.dim} if cut.dim and not path else {}
        if len(cut.parts) > 1:
            options["packed"] = self._packed(name, cut, heads)
        return path or name, Decision(COLWISE.name, options)

    def _of_module(self, name: str) -> str:
        """The module that a rule can be for instead of its parameters; "" for none."""
        path = name.rpartition(".")[0]
        kind = self.inner.get(path)
        if kind is Kind.OTHER:
            module = self.units.model.get_submodule(f"{self.around}.{path}")
            return path if isinstance(module, _ConvNd) else ""
        return path if kind in (Kind.PRODUCT, Kind.SCALES) else ""

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(tensors_of(self.bench.of.get_submodule(self.around))[name].shape)

    def _packed(self, name: str, cut: Cut, heads: int) -> object:
        """Equal parts by their names alone, others with their sizes."""
        names = [f"part{n + 1}" for n in range(len(cut.parts))]
        if len({part.units * part.width for part in cut.parts}) == 1 and all(
            part.units == cut.parts[0].units for part in cut.parts
        ):
            return names
        parts = [by_heads(part, heads) for part in cut.parts]
        total = self._shape(name)[cut.dim]
        own = self._names_within(name)
        # a model that was made small has the names of what is larger in the model itself
        for pick in range(_STATED):
            sizes = [
                (self._named(part.units, pick, own), self._named(part.width, pick, own))
                for part in parts
            ]
            if sum(units * width for (_, units), (_, width) in sizes) == total:
                return {
                    n: [units, width]
                    for n, ((units, _), (width, _)) in zip(names, sizes, strict=True)
                }
        return {n: [part.units, part.width] for n, part in zip(names, parts, strict=True)}

    def _names_within(self, name: str) -> set[str]:
        """What a rule for a parameter takes from the modules inside the region that hold it."""
        at, found = self.bench.model.get_submodule(self.around), set[str]()
        for step in name.split(".")[:-1]:
            at = at.get_submodule(step)
            found |= integers(vars(at)).keys()
        return found

    def _named(self, number: int, pick: int, other: set[str]) -> tuple[object, int]:
        """A number by an attribute around the region, and what that is in the model itself.

        Args:
            other: names that are something else where it is stated.
        """
        if number == 1:
            return 1, 1
        small = integers(vars(self.bench.model.get_submodule(self.around)))
        large = integers(vars(self.bench.of.get_submodule(self.around)))
        names = [name for name, n in small.items() if n == number and name in large.keys() - other]
        if not names or (small == large and len(names) > 1):
            return number, number
        name = names[min(pick, len(names) - 1)]
        return name, large[name]


def roles_of(variants: Sequence[Mapping[str, Decision]]) -> set[str]:
    """What they have rules for, but for what is around others."""
    found = {path for one in variants for path in one}
    return {path for path in found if not any(p.startswith(f"{path}.") for p in found)}
