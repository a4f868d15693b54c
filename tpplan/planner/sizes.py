"""What each rank has of the sharded layers: rows, heads, attributes; and whether tp fits them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from tpplan.language import Rule
from tpplan.layout import MisfitError, Part, Rows, rows_of
from tpplan.observe.likeness import identity
from tpplan.observe.products import Products
from tpplan.observe.thin_experts import NotStackedError, Stacked, WidthError
from tpplan.observe.trace import Trace
from tpplan.places import Argument
from tpplan.planner.complaints import Complaints
from tpplan.planner.geometry import Geometry
from tpplan.planner.known import Known
from tpplan.planner.match import fold
from tpplan.planner.parts import packed_heads
from tpplan.planner.sharing import NotOverEpError, Sharing
from tpplan.planner.views import head_views
from tpplan.styles import divisors, named
from tpplan.styles.replicate import REPLICATE
from tpplan.styles.style import Misfits


class Sizes:
    """Filled in from a trace, first by ``orient``, then by ``lay_out``.

    Attributes:
        columns: column-parallel layers that multiply their input by their weight.
        transposed: layers whose weight is stored (in, out).
        layouts: the rows of each rank, of layers that are not simply cut evenly.
        geometry: the heads.
        attributes: module path -> attribute -> (present value, value per rank).
        cut: module path -> tensor of its own -> the dimension of its heads, and how many.
        buffers: module path -> buffer of its own -> what each rank computes with of it.
        parameters: the rows of parameters that have rules of their own, with sized parts.
        stacked: module path -> how the ranks share the experts that it holds.
        head_inputs: module path -> arguments of which each rank takes its heads.
    """

    geometry: Geometry

    def __init__(
        self,
        model: nn.Module,
        tp: int,
        multihead: set[str],
        complaints: Complaints,
        ep: int,
        known: Known,
    ) -> None:
        self.model, self.tp, self.ep, self.multihead = model, tp, ep, multihead
        self.known = known
        self.complaints, self.rules = complaints, complaints.matches.modules
        self.products = Products(model)
        self._shared: dict[Any, Stacked | NotStackedError] = {}
        self._not_over_ep: dict[str, dict[str, str]] = {}
        self.columns: set[str] = set()
        self.transposed: set[str] = set()
        self.layouts: dict[str, Rows] = {}
        self.parameters: dict[str, Rows] = {}
        self.stacked: dict[str, Stacked] = {}
        self.attributes: dict[str, dict[str, tuple[int, int]]] = {}
        self.cut: dict[str, dict[str, tuple[int, int]]] = {}
        self.buffers: dict[str, dict[str, Rows]] = {}
        self.head_inputs: dict[str, tuple[tuple[Argument, int], ...]] = {}

    def orient(self, trace: Trace) -> None:
        """Which sharded layers are projections, and how their weights are stored."""
        self.columns.clear()
        called = {call.path for call in trace.calls}
        refused, stored = {}, {}
        for path, rule in self.rules.items():
            style = named(rule.style)
            if not (style.columns or style.sums) or path not in called:
                continue
            if self.model.get_submodule(path)._parameters.get("weight") is None:
                continue  # said before
            found = self.products.orientation(trace, path)
            stated = rule.options.get("transposed")
            if found is None:
                if style.sums or isinstance(self.model.get_submodule(path), nn.Linear):
                    refused[path] = f"{rule.style}: it does not just multiply by its weight"
                continue
            if stated is not None and stated != (found == "transposed"):
                is_ = "(in, out)" if found == "transposed" else "(out, in)"
                stored[path] = f"transposed: its weight is stored {is_}"
            if found == "transposed":
                self.transposed.add(path)
            if style.columns:
                self.columns.add(path)
        self._orient_tied(called)
        whole = f"make it {REPLICATE.name}, with what belongs to its region"
        self.complaints.by_rule(refused, whole)
        self.complaints.by_rule(stored, "leave 'transposed' out: it is seen in what the layer does")

    def _orient_tied(self, called: set[str]) -> None:
        """Modules that only hold what others compute with lie as those do."""
        held = {
            path: self.model.get_submodule(path)._parameters.get("weight") for path in self.rules
        }
        mates = {id(weight): path for path, weight in held.items() if path in called}
        for path, weight in held.items():
            mate = mates.get(id(weight)) if weight is not None and path not in called else None
            if mate is not None and self.rules[mate].options == self.rules[path].options:
                self.columns |= {path} if mate in self.columns else set()
                self.transposed |= {path} if mate in self.transposed else set()

    def lay_out(self, trace: Trace) -> None:
        """Head geometry, the rows of each rank, the per-rank attributes."""
        seen = head_views(trace, self.columns)
        wrong, adapted = self.complaints.wrong, self.complaints.matches.adapted
        self.geometry = Geometry(self.model, self.rules, seen, self.transposed, wrong, adapted)
        self.attributes, self.trace = {}, trace
        misfits: Misfits = {}
        for path, rule in self.rules.items():
            try:
                named(rule.style).lay_out(self, path, rule, misfits)
            except MisfitError as error:
                fit, view = self.geometry.fitting(path), self.geometry.parts_seen(path)
                said = f"{rule.style}: {error}"
                if view:
                    said += f", but viewed as {view} it looks like {view[0]} parts side by side"
                    fit = f"{fit}; if they are parts, say so with {packed_heads(view[0])}"
                misfits.setdefault(fit, {})[path] = said
        self._size_parameters(misfits)
        self._size_buffers(misfits)
        for fit, found in misfits.items():
            whole = f"make it {REPLICATE.name}, with what belongs to its block"
            self.complaints.by_rule(found, f"tp may be {fit}" if fit else whole)
        for hint, found in self._not_over_ep.items():
            self.complaints.by_rule(found, hint)
        for path, stated in self.geometry.attributes(self.tp).items():
            self.attributes[path] = {**stated, **self.attributes.get(path, {})}
        self.head_inputs = {
            path: self._own_heads(trace, path, rule)
            for path, rule in self.rules.items()
            if rule.options.get("head_inputs")
        }

    def _size_parameters(self, misfits: Misfits) -> None:
        """The parts of bare parameters whose rules say how large each is."""
        for name, rule in self.complaints.matches.parameters.items():
            packed = rule.options.get("packed")
            if isinstance(packed, Mapping) and "sizes" in packed:
                rows = self.sized_rows(name, rule, self.model.get_parameter(name), misfits)
                if rows is not None:
                    self.parameters[name] = rows

    def sized_rows(
        self, name: str, rule: Rule, held: torch.Tensor, misfits: Misfits, dim: int | None = None
    ) -> Rows | None:
        """What each rank has of a tensor in parts of stated sizes; None where that was refused.

        Args:
            dim: along which they lie, where it is not the rule that says it.
        """
        parts = self.geometry.sized(rule, name.rpartition(".")[0])
        if dim is None:
            dim = int(rule.options.get("dim", 0)) % held.dim()  # type: ignore[call-overload]
        total = sum(part.size for part in parts)
        if total != held.shape[dim]:
            said = f"packed: the parts are {total}, not the {held.shape[dim]}"
            where = rule.option_positions.get("packed", rule.position)
            self.complaints.say(f"{fold([name])}: {said} of dimension {dim}", where)
            return None
        try:
            return rows_of(parts, 1, self.tp, dim)
        except MisfitError as error:
            fit = divisors(*(part.units for part in parts))
            misfits.setdefault(fit, {})[name] = f"{rule.style}: {error}"
            return None

    def _size_buffers(self, misfits: Misfits) -> None:
        """What each rank has of buffers that have rules."""
        for name, rule in self.complaints.matches.buffers.items():
            style, (owner, _, leaf) = named(rule.style), name.rpartition(".")
            if style.bare is None or not style.columns:
                continue  # whole, or said before
            held, packed = self.model.get_buffer(name), rule.options.get("packed")
            rows: Placement | None
            if isinstance(packed, Mapping) and "sizes" in packed:
                rows = self.sized_rows(name, rule, held, misfits)
            else:
                try:
                    rows = style.place(held, rule, self.tp)
                except MisfitError:
                    continue  # said before
                if isinstance(rows, Shard):
                    size = held.shape[rows.dim]
                    rows = rows_of([Part(leaf, size, size)], 1, self.tp, rows.dim)
            if isinstance(rows, Rows):
                self.buffers.setdefault(owner, {})[leaf] = rows

    def share_experts(self, path: str, rule: Rule, misfits: Misfits) -> None:
        """What each rank has of stacked experts; those of modules that are alike, once."""
        call = next((c for c in self.trace.calls if c.path == path), None)
        module = self.model.get_submodule(path)
        if call is None or named(rule.style).complaint(module, self.tp) is not None:
            return  # no example call comes to it, or said before
        if self.tp == self.ep == 1:
            return
        key = identity(module, path, {path: rule}), str(self.trace.sizes(call))
        try:
            if key not in self._shared:
                whole = named(rule.style).keeps_whole(rule.options)
                shared = Sharing(module, call, self.trace, self.tp, self.ep, self.known)
                self._shared[key] = shared.found(whole)
        except NotStackedError as error:
            self._shared[key] = error
        found = self._shared[key]
        if isinstance(found, Stacked):
            self.stacked[path] = found
            self.attributes[path] = {**self.attributes.get(path, {}), **found.attributes}
        elif isinstance(found, NotOverEpError):
            self._not_over_ep.setdefault(found.hint, {})[path] = f"{rule.style}: {found}"
        else:
            # of tp 1 to 64 those that would fit, or none
            fit = divisors(found.width) if isinstance(found, WidthError) else ""
            misfits.setdefault(fit, {})[path] = f"{rule.style}: {found}"

    def over_ep(self, path: str) -> Shard | None:
        """How the parameters of a module are placed over the ranks of ep; None where whole."""
        return Shard(0) if self.ep > 1 and path in self.stacked else None

    def _own_heads(self, trace: Trace, path: str, rule: Rule) -> tuple[tuple[Argument, int], ...]:
        asked = rule.options["head_inputs"]
        assert isinstance(asked, Mapping)
        calls = [c for c in trace.calls if c.path == path]
        given = {a.name: a for c in calls for names in c.arguments.values() for a in names}
        where = rule.option_positions.get("head_inputs", rule.position)
        signature = inspect.signature(self.model.get_submodule(path).forward).parameters.values()
        takes = [p.name for p in signature]
        positional = [p.name for p in signature if p.kind <= p.POSITIONAL_OR_KEYWORD]
        for name in takes:  # it may be given in a call that no example is of
            index = positional.index(name) if name in positional else None
            given.setdefault(name, Argument(name, index))
        for name in asked:
            if name not in given:
                known = f"it takes {', '.join(takes)}"
                self.complaints.say(f"{fold([path])}: has no argument '{name}'", where, known)
        if not self.geometry.groups[path].heads:
            hint = "state 'heads:' on this rule"
            self.complaints.say(f"{fold([path])}: its number of heads is not known", where, hint)
        return tuple((given[name], int(dim)) for name, dim in asked.items() if name in given)
