"""What each rank has of the sharded layers: rows, heads, attributes; and whether tp fits them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from torch import nn

from tpplan.language import Rule
from tpplan.layout import MisfitError, Part, Rows, rows_of
from tpplan.observe.places import Argument
from tpplan.observe.products import Products
from tpplan.observe.trace import Trace
from tpplan.planner import infer
from tpplan.planner.complaints import Complaints
from tpplan.planner.geometry import Geometry
from tpplan.planner.match import fold
from tpplan.planner.styles import divisors, placement_in, runs_as

_FUSED = ("activation_relu_or_gelu", "use_nested_tensor")


class Sizes:
    """Filled in from a trace, first by ``orient``, then by ``lay_out``.

    Attributes:
        columns: column-parallel layers that multiply their input by their weight.
        transposed: layers whose weight is stored (in, out).
        layouts: the rows of each rank, of layers that are not simply cut evenly.
        geometry: the heads.
        attributes: module path -> attribute -> (present value, value per rank).
        head_inputs: module path -> arguments of which each rank takes its heads.
    """

    geometry: Geometry

    def __init__(
        self, model: nn.Module, tp: int, multihead: set[str], complaints: Complaints
    ) -> None:
        self.model, self.tp, self.multihead = model, tp, multihead
        self.complaints, self.rules = complaints, complaints.matches.modules
        self.products = Products(model)
        self.columns: set[str] = set()
        self.transposed: set[str] = set()
        self.layouts: dict[str, Rows] = {}
        self.attributes: dict[str, dict[str, tuple[int, int]]] = {}
        self.head_inputs: dict[str, tuple[tuple[Argument, int], ...]] = {}

    def orient(self, trace: Trace) -> None:
        """Which sharded layers are projections, and how their weights are stored."""
        self.columns.clear()
        called = {call.path for call in trace.calls}
        refused = {}
        for path, rule in self.rules.items():
            if rule.style not in ("colwise", "rowwise") or path not in called:
                continue
            if self.model.get_submodule(path)._parameters.get("weight") is None:
                continue  # said before
            found = self.products.orientation(trace, path)
            stated = rule.options.get("transposed")
            if found is None:
                if rule.style == "rowwise" or isinstance(self.model.get_submodule(path), nn.Linear):
                    refused[path] = f"{rule.style}: it does not just multiply by its weight"
                continue
            if stated is not None and stated != (found == "transposed"):
                is_ = "(in, out)" if found == "transposed" else "(out, in)"
                refused[path] = f"transposed: its weight is stored {is_}"
            if found == "transposed":
                self.transposed.add(path)
            if rule.style == "colwise":
                self.columns.add(path)
        self.complaints.by_rule(refused)

    def lay_out(self, trace: Trace) -> None:
        """Head geometry, the rows of each rank, the per-rank attributes."""
        seen = infer.head_views(trace, self.columns)
        self.geometry = Geometry(
            self.model, self.rules, seen, self.transposed, self.complaints.wrong
        )
        misfits: dict[str, dict[str, str]] = {}
        for path, rule in self.rules.items():
            try:
                if path in self.columns:
                    rows = self.geometry.rows(path, self.tp)
                    if rows is not None:
                        self.layouts[path] = rows
                elif rule.style == "colwise":
                    self._inside(path, misfits)
                elif rule.style == "rowwise":
                    weight = self.model.get_submodule(path)._parameters.get("weight")
                    if weight is None or weight.dim() != 2:
                        continue  # said before
                    width = int(weight.shape[0 if path in self.transposed else 1])
                    if width % self.tp:
                        fit = divisors(width)
                        message = f"rowwise: tp {self.tp} does not divide its {width} inputs"
                        misfits.setdefault(fit, {})[path] = message
                    outputs = int(weight.numel()) // width
                    if rule.options.get("output") == "shard" and outputs % self.tp:
                        message = f"output: tp {self.tp} does not divide its {outputs} outputs"
                        misfits.setdefault(divisors(outputs), {})[path] = message
            except MisfitError as error:
                fit = self.geometry.fitting(path)
                misfits.setdefault(fit, {})[path] = f"colwise: {error}"
        for fit, found in misfits.items():
            self.complaints.by_rule(found, f"tp may be {fit}")
        for path in self.multihead if not self.complaints.wrong else ():
            self._multihead(path)
        self.attributes = {**self.geometry.attributes(self.tp), **self._groups()}
        for path, module in self.model.named_modules():
            # torch's fused layers would read the sharded weights
            for name in _FUSED:
                inside = any(p.startswith(f"{path}.") for p in self.multihead)
                if inside and self.tp > 1 and isinstance(getattr(module, name, None), bool | int):
                    present = getattr(module, name)
                    self.attributes.setdefault(path, {})[name] = (present, 0)
        self.head_inputs = {
            path: self._own_heads(trace, path, rule)
            for path, rule in self.rules.items()
            if rule.options.get("head_inputs")
        }

    def _inside(self, path: str, misfits: dict[str, dict[str, str]]) -> None:
        """A module on sharded columns or heads: of its parameters every rank has as many rows."""
        module = self.model.get_submodule(path)
        for leaf, parameter in module._parameters.items():
            if parameter is None:
                continue
            dim = placement_in("colwise", leaf, module, False, None).dim  # type: ignore[attr-defined]
            size = int(parameter.shape[dim]) if parameter.dim() else 1
            if size % self.tp:
                message = f"colwise: tp {self.tp} does not divide the {size} rows of its {leaf}"
                misfits.setdefault(divisors(size), {})[path] = message

    def _groups(self) -> dict[str, dict[str, tuple[int, int]]]:
        """torch's norm over groups of channels counts them: each rank has its own."""
        found = {}
        for path, rule in self.rules.items():
            module = self.model.get_submodule(path)
            if rule.style != "colwise" or not runs_as(module, nn.GroupNorm):
                continue
            groups, channels = int(module.num_groups), int(module.num_channels)  # type: ignore[arg-type]
            if groups % self.tp:
                message = f"colwise: tp {self.tp} does not divide its {groups} groups"
                self.complaints.by_rule({path: message}, f"tp may be {divisors(groups)}")
                continue
            found[path] = {
                "num_groups": (groups, groups // self.tp),
                "num_channels": (channels, channels // self.tp),
            }
        return found

    def _multihead(self, path: str) -> None:
        module = self.model.get_submodule(path)
        width, heads = int(module.embed_dim), int(module.num_heads)  # type: ignore[arg-type]
        if module._parameters.get("in_proj_weight") is not None and self.tp > 1:
            parts = [Part(name, width, heads) for name in ("q", "k", "v")]
            self.layouts[path] = rows_of(parts, 1, self.tp)

    def _own_heads(self, trace: Trace, path: str, rule: Rule) -> tuple[tuple[Argument, int], ...]:
        asked = rule.options["head_inputs"]
        assert isinstance(asked, Mapping)
        calls = [c for c in trace.calls if c.path == path]
        given = {a.name: a for c in calls for names in c.arguments.values() for a in names}
        where = rule.option_positions.get("head_inputs", rule.position)
        takes = list(inspect.signature(self.model.get_submodule(path).forward).parameters)
        for name in asked:
            if name not in given and name not in takes:
                known = f"it takes {', '.join(takes)}"
                self.complaints.say(f"{fold([path])}: has no argument '{name}'", where, known)
        if not self.geometry.groups[path].heads:
            hint = "state 'heads:' on this rule"
            self.complaints.say(f"{fold([path])}: its number of heads is not known", where, hint)
        return tuple((given[name], int(dim)) for name, dim in asked.items() if name in given)
