"""A model's anatomy: the slots that a plan has to decide on, from the module tree and a trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from tpplan.observe.trace import Call, Trace
from tpplan.planner.views import KEEPING, VIEWS
from tpplan.styles import runs_as
from tpplan.styles.vocab import VOCAB
from tpplan.suggestion.bench import Bench
from tpplan.suggestion.cuts import Cuts, roles_of
from tpplan.suggestion.draft import WHOLE, Decision, Slot
from tpplan.suggestion.layouts import GATHERED, ON_ROWS, Layouts
from tpplan.suggestion.regions import ElementParts, Reader, element_calls, mixing, streamed
from tpplan.suggestion.units import Kind, Units

_SMALL = 0.005
_HANDING_ON = VIEWS | KEEPING | {"cat", "slice", "split", "where", "masked_fill"}
"""What ids go through unchanged, beside a prompt's for instance, or in part."""
_FIRST = 3
"""Of attention the likeliest layouts, tried before what its numbers show."""
_SHARDED = Decision(VOCAB.name)
_TOGETHER = Decision(VOCAB.name, {"output": "gather"})


@dataclass(frozen=True)
class Anatomy:
    """What was found of a model.

    Attributes:
        slots: in the order of the model's modules.
        elements: the paths of the layers of its stacks; empty where it has none.
    """

    slots: tuple[Slot, ...]
    elements: tuple[str, ...]


def anatomy_of(model: nn.Module, trace: Trace, tp: int, bench: Bench | None) -> Anatomy:
    """Everything with parameters that a rule has to be found for.

    Args:
        tp: the ranks that are to share it; bench: what regions are run on, if they can be.
    """
    return _Builder(model, trace, tp, bench).build()


class _Builder:
    def __init__(self, model: nn.Module, trace: Trace, tp: int, bench: Bench | None) -> None:
        self.model, self.trace, self.tp, self.bench = model, trace, tp, bench
        self.units = Units(model, trace)
        calls = element_calls(trace, self.units)
        self.root = not calls
        self.calls = calls or trace.calls[:1]
        self.tensors = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self.tensors |= {name for name, _ in model.named_buffers()}
        self.modules = {path for path, _ in model.named_modules()}
        self.total = sum(p.numel() for p in model.parameters())
        self.slots: dict[object, Slot] = {}
        self.sizes: dict[object, int] = {}
        self.taken: set[str] = set()
        self.beside: dict[object, set[str]] = {}

    def build(self) -> Anatomy:
        holders = self._holders()
        found = [Reader(self.trace, self.units, call, self.root).read() for call in self.calls]
        layouts = [
            Layouts(self.model, self.trace, call, region)
            for call, parts in zip(self.calls, found, strict=True)
            for region in parts.regions
            if not self._is_head(region.rows[0] if region.rows else "")
        ]
        around = Counter(layout.around for layout in layouts)
        for layout in layouts:
            self._add_region(layout, around[layout.around] == 1)
        for call, parts in zip(self.calls, found, strict=True):
            self._add_stream(call, parts)
        inside = tuple(dict.fromkeys(call.path for call in self.calls if call.path))
        for path, kind in self.units.kinds.items():
            if path in self.taken:
                continue
            within = next((e for e in inside if path.startswith(f"{e}.")), None)
            variants = self._within(path) if within else self._outside(path, kind, holders)
            self._add(
                ("unit", starred(path, within or "")), {starred(path, within or ""): path}, variants
            )
        self._add_norms(inside)
        self._add_held(holders)
        self._add_left(inside)
        order = {path: i for i, (path, _) in enumerate(self.model.named_modules())}
        slots = sorted(
            self.slots.values(),
            key=lambda s: min(order.get(_owner(p, order), 0) for p in s.paths),
        )
        return Anatomy(tuple(slots), inside)

    # --- slots

    def _add_region(self, layouts: Layouts, alone: bool) -> None:
        """``alone``: whether no other region is in the module around it."""
        call, region = layouts.element, layouts.region
        paths = region.everything()
        # where one layer makes a table for all of them, these are one region still
        ends = {"rows", "columns", "stacked", "multihead", "whole"}
        roles = region.roles()
        key = tuple((role, starred(path, call.path)) for role, path in roles if role in ends)
        known = self.slots.get(key)
        if known is None or len(paths) > self.sizes[key]:
            self.sizes[key] = len(paths)
            seen = self._seen(layouts)
            first = _FIRST if layouts.shapes.attends else 0
            beside = sorted(roles_of(seen) - {*paths})
            norms = [path for path in beside if self.units.kinds.get(path) is Kind.SCALES]
            usual = [{**dict.fromkeys(norms, ON_ROWS), **one} for one in layouts.sharded()]
            sharded = [*usual[:first], *seen, *usual[first:]]
            self.beside[key] = {starred(path, call.path) for path in beside}
            variants = tuple(
                {starred(path, call.path): decision for path, decision in one.items()}
                for one in (*sharded, *layouts.left_whole(alone, beside))
            )
            around = "/".join(starred(p, call.path) for p in (region.rows or paths)[:2])
            members = {} if known is None else known.members
            self.slots[key] = Slot(around, members, variants, len(sharded))
        slot = self.slots[key]
        held_by = {role: list(held) for role, held in slot.members.items()}
        for variant in slot.variants:
            for role in variant:
                path = _unstarred(role, call.path)
                those = held_by.setdefault(role, [])
                if path not in those and self._exists(path):
                    those.append(path)
        slot.members = {role: tuple(held) for role, held in held_by.items()}
        self.taken.update(paths, (_unstarred(role, call.path) for role in self.beside[key]))

    def _seen(self, layouts: Layouts) -> list[dict[str, Decision]]:
        """The ways to shard a region that its numbers show."""
        if self.bench is None:
            return []
        return Cuts(layouts, self.units, self.bench, self.tp).variants()

    def _exists(self, path: str) -> bool:
        return path in self.tensors or path in self.modules

    def _add(self, key: object, members: Mapping[str, str], variants: Sequence[Decision]) -> None:
        """A slot of modules that all get the same style, or more members of one."""
        slot = self.slots.get(key)
        if slot is None:
            name = next(iter(members))
            made = tuple(dict.fromkeys(members, decision) for decision in variants)
            slot = self.slots[key] = Slot(name, {}, made)
        held = dict(slot.members)
        for role, path in members.items():
            known = held.get(role, ())
            held[role] = known if path in known else (*known, path)
            self.taken.add(path)
        slot.members = held
        slot.variants = tuple(
            {role: self._fitting(decision, held[role][0]) for role in held}
            for decision in (next(iter(variant.values())) for variant in slot.variants)
        )

    def _fitting(self, decision: Decision, path: str) -> Decision:
        """What is decided for a table, for what shares its parameter."""
        kind = self.units.kinds.get(path)
        if decision == _TOGETHER and kind is not Kind.TABLE:
            return _SHARDED
        bare = path in self.tensors
        return WHOLE if decision == ON_ROWS and bare else decision

    def _add_stream(self, call: Call, parts: ElementParts) -> None:
        for path in parts.stream:
            if (
                path in self.taken
                or self._is_head(path)
                or self.units.kinds.get(path) is Kind.TABLE
            ):
                continue
            if self.root and self.units.kinds.get(path) is not Kind.SCALES:
                continue
            role = starred(path, call.path)
            self._add(("stream", role), {role: path}, (ON_ROWS, GATHERED, WHOLE))

    def _add_norms(self, inside: Iterable[str]) -> None:
        """Modules without parameters around the stacks that do more than number by number."""
        layers = tuple(f"{path}." for path in inside)
        for call in self.trace.calls:
            given = streamed(self.trace, call)
            within = any(c.path in self.units.kinds for c in self.trace.ancestors(call.index))
            if within or call.path in self.taken or call.path.startswith(layers) or given is None:
                continue
            ops = self.trace.ops[call.first_op : call.last_op]
            if any(mixing(self.model, self.trace, op) == call.path for op in ops):
                self._add(("unit", call.path), {call.path: call.path}, (ON_ROWS, WHOLE))

    def _within(self, path: str) -> Sequence[Decision]:
        return (WHOLE, GATHERED, ON_ROWS)

    def _outside(
        self, path: str, kind: Kind, holders: Mapping[int, list[str]]
    ) -> Sequence[Decision]:
        """What may become of a module before, between or after the stacks."""
        module = self.model.get_submodule(path)
        if kind is Kind.TABLE:
            weight = module._parameters["weight"]
            assert weight is not None
            tied = len(holders.get(id(weight), ())) > 1
            large = weight.numel() > _SMALL * self.total
            if self._of_inputs(path) and (tied or large):
                return (_SHARDED, _TOGETHER, ON_ROWS, WHOLE)
            return (_SHARDED, _TOGETHER, ON_ROWS, WHOLE) if tied else (ON_ROWS, WHOLE)
        if self._is_head(path):
            return (_SHARDED, WHOLE) if self._is_wide(path) else (WHOLE,)
        return (ON_ROWS, WHOLE) if kind in (Kind.PRODUCT, Kind.SCALES) else (WHOLE, ON_ROWS)

    def _add_held(self, holders: Mapping[int, list[str]]) -> None:
        """Modules and names that hold what others compute with: the same style as these."""
        for names in holders.values():
            owners = [name.rpartition(".")[0] for name in names]
            known = next((o for o in owners if o in self.taken and o in self.units.kinds), None)
            if known is None or len(names) < 2:
                continue
            slot = next(s for s in self.slots.values() if known in s.paths)
            variants = [next(iter(v.values())) for v in slot.variants if len(v)]
            if slot.region:
                continue
            for name, owner in zip(names, owners, strict=True):
                module = self.model.get_submodule(owner)
                alike = isinstance(module, nn.Embedding | nn.Linear)
                path = owner if alike or owner in self.units.kinds else name
                if path in self.taken and path not in slot.paths:
                    self._merge(slot, path)
                elif path not in self.taken:
                    key = next(k for k, s in self.slots.items() if s is slot)
                    self._add(key, {path: path}, variants)

    def _merge(self, slot: Slot, path: str) -> None:
        """One slot of two whose modules share a parameter."""
        key, other = next((k, s) for k, s in self.slots.items() if path in s.paths)
        own = next(k for k, s in self.slots.items() if s is slot)
        if other.region:
            return
        if next(iter(slot.variants[0].values())) != _SHARDED:
            (key, other), (own, slot) = (own, slot), (key, other)
        decisions = [next(iter(v.values())) for v in slot.variants]
        for role, paths in other.members.items():
            for held in paths:
                self._add(own, {role: held}, decisions)
        del self.slots[key]

    def _add_left(self, inside: Iterable[str]) -> None:
        """What no call came to, and matrices that code computes with by itself: whole."""
        for name, parameter in self.model.named_parameters():
            owner = name.rpartition(".")[0]
            around = owner.split(".")
            held = (".".join(around[:n]) for n in range(1, len(around) + 1))
            if parameter.dim() < 2 or name in self.taken or any(p in self.taken for p in held):
                continue
            module = self.model.get_submodule(owner)
            own = not any(True for _ in module.children()) and owner
            path = owner if own else name
            within = next((e for e in inside if path.startswith(f"{e}.")), "")
            role = starred(path, within)
            self._add(("left", role), {role: path}, (WHOLE,))

    # --- what is seen of them

    def _holders(self) -> dict[int, list[str]]:
        """All names of each parameter."""
        found: dict[int, list[str]] = {}
        for path, module in self.model.named_modules():
            for leaf, parameter in module._parameters.items():
                if parameter is not None:
                    found.setdefault(id(parameter), []).append(f"{path}.{leaf}".lstrip("."))
        return found

    def _of_inputs(self, path: str) -> bool:
        """Whether a table is given what the model was given, or that beside others."""
        given = set(self.trace.calls[0].arguments)
        calls = list(self.units.calls(path))
        ops = [op for c in calls for op in self.trace.ops[c.first_op : c.last_op]]
        taken = {n for op in ops if "embedding" in op.name for n in op.inputs}
        for op in self.trace.ops:
            name = op.name.removeprefix("aten.").split(".")[0]
            if name in _HANDING_ON and not given.isdisjoint(op.inputs):
                given.update(op.outputs)
        return not given.isdisjoint(taken)

    def _is_head(self, path: str) -> bool:
        """Whether a product makes what the model gives, and is in no layer."""
        if self.units.kinds.get(path) is not Kind.PRODUCT:
            return False
        if any(path.startswith(f"{call.path}.") for call in self.calls if call.path):
            return False
        given = set(self.trace.calls[0].outputs)
        first = min((c.last_op for c in self.units.calls(path)), default=0)
        for op in reversed(self.trace.ops[first:]):
            around = {c.path for c in self.trace.ancestors(op.call)}
            own = around & self.units.kinds.keys() - {path}
            if not given.isdisjoint(op.outputs) and not own:
                given.update(op.inputs)
        return any(n in given for call in self.units.calls(path) for n in call.outputs)

    def _is_wide(self, path: str) -> bool:
        """Whether a head makes as much as a table has rows, or more than it is given."""
        module = self.model.get_submodule(path)
        weight = module._parameters["weight"]
        assert weight is not None
        out, into = weight.shape
        tables = [m for m in self.model.modules() if isinstance(m, nn.Embedding)]
        rows = {int(m.num_embeddings) for m in tables}
        return runs_as(module, nn.Linear) and (out in rows or out >= into)


def starred(path: str, element: str) -> str:
    """A path with ``*`` for the number of the layer that it is in."""
    if not element:
        return path
    steps = element.split(".")
    at = next(i for i, step in enumerate(steps) if step.isdigit())
    return ".".join([*steps[:at], "*", *path.split(".")[at + 1 :]])


def _unstarred(role: str, element: str) -> str:
    steps = role.split(".")
    if element:
        at = next(i for i, step in enumerate(element.split(".")) if step.isdigit())
        steps[at] = element.split(".")[at]
    return ".".join(steps)


def _owner(path: str, order: Mapping[str, int]) -> str:
    return path if path in order else path.rpartition(".")[0]
