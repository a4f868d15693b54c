"""What may become of a sharded region: the ways in which its projections may hold their heads.

The first is what most models are; the compiler's proof says which of them is right.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from torch import nn

from tpplan.observe.trace import Call, Trace
from tpplan.planner.attributes import integers, named_in_code
from tpplan.planner.views import KEEPING, VIEWS, head_views
from tpplan.styles.attention import ATTENTION
from tpplan.styles.colwise import COLWISE
from tpplan.styles.experts import EXPERTS
from tpplan.styles.replicate import REPLICATE
from tpplan.styles.rowwise import ROWWISE
from tpplan.styles.sequence_parallel import SEQUENCE_PARALLEL
from tpplan.suggestion.draft import WHOLE, Decision
from tpplan.suggestion.held import Held, opposite
from tpplan.suggestion.regions import Region, Shapes, shared_steps, streamed

_TURNS = frozenset({"transpose", "permute", "t"})
_SCORES = frozenset({"_softmax", "_safe_softmax"})
_FUSED = ("_attention", "_attention_for_cpu")
_HALVES = ("gate", "up")
_BLOCKS = (4, 2, 8)
_MOST = 24
_WIDEST = 5
GATHERED = Decision(REPLICATE.name, {"input": "gather"})
HERE = Decision(EXPERTS.name, {"reduce": "here"})
ON_ROWS = Decision(SEQUENCE_PARALLEL.name)
Packed = Mapping[str, object]


class Layouts:
    """The variants of one region of an element, as decisions by path."""

    def __init__(self, model: nn.Module, trace: Trace, element: Call, region: Region) -> None:
        self.model, self.trace, self.element = model, trace, element
        self.calls = {c.path: c for c in reversed(trace.calls)}
        self.region = region
        self.region = self._entered_once()
        self.around = self._around()
        self.shapes = self._shapes()

    def sharded(self) -> list[dict[str, Decision]]:
        """The likeliest first."""
        found: list[dict[str, Decision]] = []
        bases = list(self._bases())
        for base, packed in itertools.product(bases, self._packings()):
            found.append({**base, **packed})
            found += [{**base, **packed, **entered} for entered in self._entered(base)]
            found += [{**base, **packed, **stated} for stated in self._stated(packed)]
        # what becomes of a mixture's sum in its block may not be the same of parts of it
        found += [{**one, **dict.fromkeys(self.region.stacked, HERE)} for one in found]
        return list(_distinct(found))[:_MOST]

    def left_whole(self, alone: bool, beside: Iterable[str] = ()) -> list[dict[str, Decision]]:
        """With the stream gathered, of single modules on a rank's rows first.

        Args:
            alone: whether no other region is in the module around it; beside: what else of the
                region has rules where it is sharded.
        """
        if alone and self.around and self.around != self.element.path:
            return [{self.around: decision} for decision in (GATHERED, WHOLE)]
        found = dict.fromkeys((*self.region.everything(), *beside))
        held = [path for path in found if path not in self.region.bare]
        # of a module's own rule they are, or there is none for them
        bare = [name for name in self.region.bare if name.rpartition(".")[0] not in held]
        return [
            {**dict.fromkeys(held, decision), **dict.fromkeys(bare, WHOLE)}
            for decision in (ON_ROWS, GATHERED, WHOLE)
        ]

    # --- what a trace shows

    def _entered_once(self) -> Region:
        """The region without what is before the module that its columns are in.

        That is where that module is given the stream: a norm may have products of its own.
        """
        region = self.region
        columns = () if region.stacked else region.columns
        around = ".".join(shared_steps([*region.rows, *columns])) if columns else ""
        if not self._streams(around):
            return region
        kept = {
            name: [path for path in getattr(region, name) if path.startswith(f"{around}.")]
            for name in ("whole", "scales")
        }
        return replace(region, **kept)

    def _around(self) -> str:
        """The innermost module around all of the region that is called, "" for none."""
        paths = [*self.region.rows, *self.region.columns, *self.region.stacked, *self.region.whole]
        if not paths:
            return self.region.multihead[0]
        steps = shared_steps(paths)
        while steps and ".".join(steps) not in self.calls:
            steps.pop()
        return ".".join(steps)

    def _shapes(self) -> Shapes:
        width = heads = head_dim = 0
        if self.region.rows:
            given = self._given(self.region.rows[0])
            width = self.trace.shapes[given][-1]
            heads, head_dim = self._heads_before(given, width)
        outputs = {
            path: self.trace.shapes[self.calls[path].outputs[0]][-1]
            for path in self.region.columns
            if self.calls[path].outputs
        }
        return Shapes(width, heads, head_dim, self._attends(), outputs)

    def _given(self, path: str) -> int:
        """What a projection multiplies."""
        return next(n for n in self.calls[path].arguments if n in self.trace.floating)

    def _attends(self) -> bool:
        """Whether what becomes of the columns, until they are summed, goes through attention."""
        ends = {*self.region.rows, *self.region.columns}
        made = {n for path in self.region.columns for n in self.calls[path].outputs}
        for op in self.trace.ops[self.element.first_op : self.element.last_op]:
            around = {call.path for call in self.trace.ancestors(op.call)}
            if made.isdisjoint(op.inputs) or not ends.isdisjoint(around):
                continue
            made.update(op.outputs)
            name = op.name.removeprefix("aten.").split(".")[0]
            if name in _SCORES or name.rstrip("_").endswith(_FUSED):
                return True
        return False

    def _heads_before(self, number: int, width: int) -> tuple[int, int]:
        """Into how many heads of which width a tensor's columns were put together from."""
        for op in reversed(self.trace.ops):
            name = op.name.removeprefix("aten.").split(".")[0]
            if number not in op.outputs:
                continue
            if op.pointwise or not (name in VIEWS or name in KEEPING or name in _TURNS):
                return 0, 0
            number = op.inputs[0]
            shape = self.trace.shapes[number]
            if len(shape) >= 3 and shape[-1] != width and shape[-1] * shape[-2] == width:
                return shape[-2], shape[-1]
        return 0, 0

    # --- what follows from it

    def _bases(self) -> Iterator[dict[str, Decision]]:
        """All but how packed weights lie; scales and tables in the likelier ways first."""
        region = self.region
        fixed = dict.fromkeys(region.rows, Decision(ROWWISE.name))
        fixed |= dict.fromkeys(region.columns, Decision(COLWISE.name))
        fixed |= dict.fromkeys(region.whole, WHOLE)
        fixed |= dict.fromkeys(region.stacked, Decision(EXPERTS.name))
        fixed |= dict.fromkeys(region.multihead, Decision(ATTENTION.name))
        held = Held(self.model, region, self.shapes)
        own, bare = {**held.tables(), **held.scales()}, held.bare()
        other = {path: opposite(decision) for path, decision in own.items()}
        for entry, scales in itertools.product(self._entries(), _distinct([own, other])):
            yield {**fixed, **entry, **scales, **bare}
            if bare:
                yield {**fixed, **entry, **scales}

    def _entries(self) -> list[dict[str, Decision]]:
        """Where the stream may be gathered: with what all products take, or further out.

        What is before these, a norm, runs on rows then, and its gradient is of one sum less.
        """
        if self.region.stacked or not (self.region.whole or self._others()):
            return [{}]
        further = self.entry()
        given = {self._given(path) for path in self.region.columns}
        return [further] if self.region.whole or len(given) > 1 else [{}, further]

    def _others(self) -> bool:
        """Whether the module around has parameters that are of no role in the region."""
        if not self._streams(self.around):
            return False
        known = {*self.region.everything()}
        module = self.model.get_submodule(self.around)
        names = (f"{self.around}.{name}" for name, _ in module.named_parameters())
        return any(known.isdisjoint((name, name.rpartition(".")[0])) for name in names)

    def entry(self) -> dict[str, Decision]:
        """Where what replicated layers make of the stream enters with it."""
        names = self._streams(self.around)
        return {self.around: Decision(ATTENTION.name, {"gather": names})} if names else {}

    def _streams(self, path: str) -> list[str]:
        """The arguments with the stream of a module in the element; none of the element itself."""
        call = self.calls.get(path)
        if call is None or call.index == self.element.index:
            return []
        # several streams may lie side by side, of which a region is given a mixture
        given = {number for path in self.region.rows for number in self.calls[path].outputs}
        given |= {n for n in (streamed(self.trace, self.element),) if n is not None}
        shapes = {self.trace.shapes[number] for number in given}
        return [
            argument[0].name
            for number, argument in call.arguments.items()
            if number in self.trace.floating and self.trace.shapes[number] in shapes
        ]

    def _packings(self) -> Iterator[dict[str, Decision]]:
        """How the projections that seem to be several in one may be packed."""
        options = {p: [None, *self._layouts_of(p)] for p in self.region.columns}
        open_ = {path: found for path, found in options.items() if len(found) > 1}
        # what is wider than its region's result is hardly one projection, unless it lies by heads
        likely = [path for path in open_ if self._divided(path) and not self._by_heads(path)]
        open_ = {p: found[1:] + found[:1] if p in likely else found for p, found in open_.items()}
        for chosen in itertools.product(*open_.values()):
            yield {
                path: Decision(COLWISE.name, {"packed": packed})
                for path, packed in zip(open_, chosen, strict=True)
                if packed is not None
            }

    def _divided(self, path: str) -> bool:
        return self.shapes.width > 0 and self.shapes.outputs.get(path, 0) > self.shapes.width

    def _by_heads(self, path: str) -> bool:
        """Whether the first that code does to columns is to view them as heads or groups."""
        seen = head_views(self.trace, {path}).get(path, [])
        rest = self.shapes.outputs[path] - self.shapes.width
        groups = rest // 2 // self.shapes.head_dim if self.shapes.head_dim else 0
        return bool(seen) and seen[0][0] in (self.shapes.heads, groups) and seen[0][0] > 1

    def _layouts_of(self, path: str) -> list[object]:
        total, shapes = self.shapes.outputs.get(path, 0), self.shapes
        if not shapes.width or total <= shapes.width // 4:
            return []
        if not shapes.attends:
            return _parts(total, shapes.width)
        if total <= shapes.width and len(self.region.columns) != 2:
            return []
        if len(self.region.columns) > 1:  # queries of their own, or keys and values of each
            return [["k", "v"], {"parts": ["k", "v"], "repeat": self._kv(total)}]
        rest = total - shapes.width
        if rest <= 0 or rest % 2:
            return []
        names = ["q", "k", "v"]
        seen = head_views(self.trace, {path}).get(path, [])
        groups = rest // 2 // shapes.head_dim if shapes.head_dim else 0
        repeated: list[object] = [{"parts": names, "repeat": groups or "heads"}]
        plain: list[object] = [names]
        first = [*repeated, *plain] if seen and len(seen[0]) > 2 else [*plain, *repeated]
        blocks = [{"parts": ["q", "v", "k"], "repeat": n} for n in _BLOCKS]
        return [*first, *blocks] if rest == 2 * shapes.width else first

    def _entered(self, base: Mapping[str, Decision]) -> Iterator[dict[str, Decision]]:
        """The stream enters where code of the module around multiplies by its own parameters."""
        around, inner = self.around, self.around and self.around != self.element.path
        if inner and self.region.bare and not self.shapes.attends and around not in base:
            yield {around: Decision(ATTENTION.name)}

    def _kv(self, total: int) -> object:
        return total // 2 // self.shapes.head_dim if self.shapes.head_dim else "heads"

    def _stated(self, packed: Mapping[str, Decision]) -> Iterator[dict[str, Decision]]:
        """Rules that say how many heads there are, which arguments have an entry for each, and
        which attributes count them."""
        shapes = self.shapes
        if not shapes.attends or not shapes.heads or not self.around:
            return
        groups = shapes.heads
        if packed and len(self.region.columns) == 1:
            rest = shapes.outputs[self.region.columns[0]] - shapes.width
            groups = rest // 2 // shapes.head_dim
        elif len(self.region.columns) > 1:
            groups = min(shapes.outputs.values()) // shapes.head_dim or shapes.heads
        counts: dict[str, object] = {"heads": self._named(shapes.heads)}
        if packed or groups != shapes.heads:
            counts["kv_heads"] = self._named(groups)
        inputs = self._of_heads(self.calls[self.around])
        more: list[dict[str, object]] = [{"head_inputs": inputs}] if inputs else []
        more.append({})
        more += [{"attributes": some} for some in self._attributes(groups)]
        for options in more:
            yield {self.around: Decision(ATTENTION.name, {**counts, **options})}

    def _attributes(self, groups: int) -> list[dict[str, str]]:
        """Attributes that may count heads or their columns.

        Those that may as well be the width of a head are tried one by one first.
        """
        heads, wide = self.shapes.heads, self.shapes.head_dim
        values = {heads // groups: "heads // kv_heads"} if groups != heads else {}
        values |= {groups * wide: "kv_heads * head_dim", groups: "kv_heads"}
        values |= {heads * wide: "heads * head_dim", heads: "heads"}
        read = named_in_code(self.model.get_submodule(self.around))
        found = {name: values[n] for name, n in read.items() if n in values and n > 1}
        own = {name: text for name, text in found.items() if "." not in name}
        sure = {name: text for name, text in own.items() if read[name] != wide}
        counts = {name: text for name, text in sure.items() if "//" not in text}
        either = [name for name in own if name not in sure]
        some = [{**known, name: own[name]} for known in (counts, sure) for name in either]
        some += [counts, sure, own, found]
        return [one for i, one in enumerate(some) if one and one not in some[:i]]

    def _of_heads(self, call: Call) -> dict[str, int]:
        """The arguments with a dimension as long as there are heads, or sequences times heads."""
        heads, batch = self.shapes.heads, self.trace.shapes[next(iter(call.arguments))][0]
        stream = self.trace.shapes.get(streamed(self.trace, self.element) or -1)
        found = {}
        for number, names in call.arguments.items():
            shape = self.trace.shapes[number]
            if number not in self.trace.floating or shape == stream or not shape:
                continue
            at = next((i for i, n in enumerate(shape[:-1]) if n in (heads, batch * heads)), None)
            if at is not None:
                found.update({name.name: at - len(shape) for name in names})
        return found

    def _named(self, number: int) -> object:
        """A number, by the one attribute of the module around the region that has it."""
        module = self.model.get_submodule(self.around)
        names = [name for name, n in integers(vars(module)).items() if n == number]
        return names[0] if len(names) == 1 else number


def _parts(total: int, width: int) -> list[object]:
    """Equal parts that columns may lie in side by side, each as wide as the result."""
    many, rest = divmod(total, width)
    if rest or not 1 < many <= _WIDEST:
        return []
    return [list(_HALVES) if many == 2 else [f"part{n + 1}" for n in range(many)]]


def _distinct(found: list[dict[str, Decision]]) -> Iterator[dict[str, Decision]]:
    seen: set[str] = set()
    for one in found:
        told = repr(sorted((p, d.style, repr(d.options)) for p, d in one.items()))
        if told not in seen:
            seen.add(told)
            yield one
