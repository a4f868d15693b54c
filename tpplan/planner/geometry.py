"""Head geometry, and from it the rows of every column-parallel layer that each rank holds."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from tpplan.language import Diagnostic, Expression, ExpressionError, Position, Rule
from tpplan.layout import NOTHING, MisfitError, Part, Rows, rows_of
from tpplan.planner.attributes import attribute, integers, named_in_code
from tpplan.planner.match import fold
from tpplan.planner.parts import with_parts
from tpplan.styles import named

_QUERIES = frozenset({"q", "query", "queries"})
_KEYS = frozenset({"k", "v", "key", "value", "keys", "values"})
_COUNTS = ("heads", "kv_heads", "head_dim")
_TRIED = range(1, 129)
_UNSEEN = "give inputs= with which its layers are called, or state 'heads:' on this rule"


@dataclass(frozen=True)
class Heads:
    """Query heads, key-value heads and their width; None where unknown."""

    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None

    def known(self, tp: int = 1) -> dict[str, int]:
        """Names for expressions: the whole model's values, or those of one of ``tp`` ranks."""
        values = {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim}
        local = {
            k: v if k == "head_dim" or v is None else max(1, v // tp) for k, v in values.items()
        }
        return {k: v for k, v in local.items() if v is not None}


class Geometry:
    """Resolves heads and layouts; what is wrong is appended to ``wrong``.

    Args:
        rules: by module path.
        seen: column-parallel layer -> the dimensions the trace showed its columns viewed as.
        transposed: layers whose weight is (in, out).
        adapted: what a layer with a low-rank adapter is made of -> the path of that layer.
    """

    def __init__(
        self,
        model: nn.Module,
        rules: Mapping[str, Rule],
        seen: Mapping[str, Sequence[tuple[int, ...]]],
        transposed: set[str],
        wrong: list[Diagnostic],
        adapted: Mapping[str, str],
    ) -> None:
        self.model, self.rules, self.adapted = model, rules, adapted
        self.views = seen
        found = {path: [self._view(path, dims) for dims in seen[path]] for path in seen}
        self.seen = {path: self._of_heads(path, found) for path in found}
        self.transposed, self.wrong = transposed, wrong
        self.groups: dict[str, Heads] = {}
        for path, rule in rules.items():
            style = named(rule.style)
            if style.columns or style.heads:
                group = self.group_of(path)
                if group not in self.groups:
                    self.groups[group] = self._heads(group)
        self._take_of_others()

    def _take_of_others(self) -> None:
        """Where no heads were seen (of attention to states that were not given), those of others.

        That is, of modules that are alike, where they agree.
        """
        made: dict[Hashable, set[Heads]] = {}
        for group, heads in self.groups.items():
            if heads.heads:
                made.setdefault(_make(self.model.get_submodule(group)), set()).add(heads)
        for group, heads in self.groups.items():
            alike = made.get(_make(self.model.get_submodule(group)), set())
            if heads == Heads() and len(alike) == 1:
                self.groups[group] = next(iter(alike))

    def _view(self, path: str, dims: tuple[int, ...]) -> tuple[int, int]:
        """The count and the width of heads in a view, which may have the packed parts in it."""
        packed = self.rules[path].options.get("packed")
        parts: Sequence[str] = packed["parts"] if isinstance(packed, Mapping) else ()
        repeat = packed.get("repeat", 1) if isinstance(packed, Mapping) else 1
        if len(dims) > 2 and dims[0] == len(parts) and repeat == 1:
            return dims[1], dims[-1]
        if len(dims) == 2 and repeat == "heads":  # the parts of each head, side by side
            return dims[0], dims[-1] // len(parts)
        return dims[0], dims[-1]

    def _of_heads(
        self, path: str, seen: Mapping[str, Sequence[tuple[int, int]]]
    ) -> list[tuple[int, int]]:
        """The views of a layer as heads: one alone is some where others have several as wide.

        Else code has only added a dimension, to multiply all positions by the same columns.
        """
        group = self.group_of(path)
        if group in self.rules and named(self.rules[group].style).heads:
            return list(seen[path])
        mates = [view for other in seen if self.group_of(other) == group for view in seen[other]]
        widths = {width for count, width in mates if count > 1}
        return [(count, width) for count, width in seen[path] if count > 1 or width in widths]

    def group_of(self, path: str) -> str:
        """The module whose layers share one geometry: the ``attention`` one, or the parent."""
        around = path = self.adapted.get(path, path)
        while True:
            rule = self.rules.get(around)
            if rule is not None and named(rule.style).heads:
                return around
            if not around:
                return path.rpartition(".")[0]
            around = around.rpartition(".")[0]

    def names_of(self, path: str) -> dict[str, int]:
        """Names for expressions at a module: its integers, and those of what is around it."""
        names: dict[str, int] = {}
        steps = path.split(".") if path else []
        around = [self.model.get_submodule(".".join(steps[:n])) for n in range(len(steps))]
        module = self.model.get_submodule(path)
        root = getattr(self.model, "config", None)
        text = getattr(root, "text_config", None)
        for config in (root, text, getattr(module, "config", None)):
            names.update(integers(getattr(config, "__dict__", {})))
        for holder in (*around, module):
            names.update(integers(vars(holder)))
        return names

    def _heads(self, group: str) -> Heads:
        rule = self.rules.get(group)
        views = [
            view for path, found in self.seen.items() if self._in(path, group) for view in found
        ]
        counts = [count for count, _ in views]
        inferred = {
            "heads": max(counts, default=None),
            "kv_heads": min(counts, default=None),
            "head_dim": views[0][1] if views else None,
        }
        stated = {
            key: self.evaluate(rule, group, key, rule.options[key])
            for key in _COUNTS
            if rule is not None and named(rule.style).heads and key in rule.options
        }
        values = {**inferred, **stated}
        if "heads" in stated and "kv_heads" not in stated and not views:
            values["kv_heads"] = stated["heads"]
        return Heads(**values)

    def _in(self, path: str, group: str) -> bool:
        return self.group_of(path) == group

    def evaluate(self, rule: Rule, path: str, option: str, value: object) -> int | None:
        """A stated number, or the value of an expression over the module's integers."""
        if isinstance(value, int):
            return value
        try:
            return Expression(str(value)).evaluate(self.names_of(path))
        except ExpressionError as error:
            where = rule.option_positions.get(option, rule.position)
            self._say(path, f"{option}: {error}", where)
            return None

    def _say(self, path: str, message: str, where: Position, hint: str | None = None) -> None:
        """Once for all modules that a rule speaks of."""
        found = Diagnostic(f"{fold([path])}: {message}", where, hint)
        if found not in self.wrong:
            self.wrong.append(found)

    def parts_of(self, path: str) -> tuple[list[Part], int, bool]:
        """The parts of a column-parallel layer, how often they are repeated, and whether the
        model's code counts on that number."""
        rule, total = self.rules[path], self.outputs(path)
        known = self.groups[self.group_of(path)]
        packed = rule.options.get("packed")
        if packed is None:
            views = self.seen.get(path, ())
            units = views[0][0] if views else total
            return [Part(path.rpartition(".")[2], total, units)], 1, False
        assert isinstance(packed, Mapping)
        if "sizes" in packed:
            return self.sized(rule, path), 1, False
        names: Sequence[str] = packed["parts"]
        repeat = self._repeat(rule, path, packed.get("repeat", 1), known)
        counts = [n for n in (_units(name, names, known, repeat) for name in names) if n]
        if len(counts) < len(names):
            size = total // repeat // len(names)
            parts = [Part(name, size, size) for name in names]
        else:
            width = total // repeat // sum(counts)
            parts = [Part(name, n * width, n) for name, n in zip(names, counts, strict=True)]
        if sum(part.size for part in parts) * repeat != total:
            stated = ", ".join(f"{part.name} {part.size}" for part in parts)
            message = f"packed: {stated}, {repeat} times, are not its {total} outputs"
            hint = f"what is known of its heads: {known.known() or 'nothing'}"
            where = rule.option_positions.get("packed", rule.position)
            self._say(path, message, where, hint)
        return parts, repeat, isinstance(packed.get("repeat"), int)

    def sized(self, rule: Rule, path: str) -> list[Part]:
        """The parts of a rule that says how large each is: so many units, so wide.

        Args:
            path: of the module whose numbers its expressions may name.
        """
        packed = rule.options["packed"]
        assert isinstance(packed, Mapping)
        parts = []
        for name, (units, width) in zip(packed["parts"], packed["sizes"], strict=True):
            count, each = (self.evaluate(rule, path, "packed", n) for n in (units, width))
            parts.append(Part(name, (count or 0) * (each or 0), max(count or 1, 1)))
        return parts

    def outputs(self, path: str) -> int:
        """How many columns a column-parallel layer makes."""
        weight = self.model.get_submodule(path)._parameters["weight"]
        assert weight is not None
        return int(weight.shape[1 if path in self.transposed else 0])

    def _repeat(self, rule: Rule, path: str, value: object, known: Heads) -> int:
        if isinstance(value, str) and value in known.known():
            return known.known()[value]
        found = self.evaluate(rule, path, "packed", value)
        return max(found or 1, 1)

    def rows(self, path: str, tp: int) -> Rows | None:
        """The rows of each rank; None where even, contiguous shards do.

        Raises:
            MisfitError: where ``tp`` does not fit; see ``fitting``.
        """
        parts, repeat, fixed = self.parts_of(path)
        total = self.outputs(path)
        if not total:
            raise MisfitError(NOTHING)
        if sum(part.size for part in parts) * repeat != total:
            return None  # said by parts_of
        known = self.groups[self.group_of(path)]
        dim = 1 if path in self.transposed else 0
        whole = self.rules[path].options.get("packed") is None
        units = parts[0].units
        what = "heads" if not whole or units < parts[0].size else "outputs"
        if whole and units % tp and tp % units:
            raise MisfitError(f"tp {tp} does not divide its {units} {what}")
        rows = rows_of(parts, repeat, tp, dim, fixed)
        if rows.shared():
            # heads are shared where others divide: a rank without a query head of its own is idle
            most = max([part.units * repeat for part in parts] + [known.heads or 0])
            if most % tp:
                raise MisfitError(f"tp {tp} does not divide its {most} {what}")
        each = total // tp
        even = all(rows.pieces[r] == ((r * each, (r + 1) * each),) for r in range(tp))
        return None if even and total % tp == 0 else rows

    def rows_in(self, path: str, tp: int) -> Rows:
        """The rows of each rank of a layer in parts that works on each column by itself.

        Raises:
            MisfitError: where ``tp`` does not fit; see ``fitting``.
        """
        parts, repeat, fixed = self.parts_of(path)
        return rows_of(parts, repeat, tp, 0, fixed)

    def parts_seen(self, path: str) -> tuple[int, ...]:
        """The view that seems to have parts in front of heads, where a layer's rule names none."""
        return () if "packed" in self.rules[path].options else with_parts(self.views.get(path, ()))

    def fitting(self, path: str) -> str:
        """The values of tp that fit a layer, for messages."""
        return ", ".join(str(tp) for tp in _TRIED if self._fits(path, tp))

    def _fits(self, path: str, tp: int) -> bool:
        try:
            self.rows(path, tp)
        except MisfitError:
            return False
        return True

    def attributes(self, tp: int) -> dict[str, dict[str, tuple[int, int]]]:
        """Module path -> attribute -> (present value, value per rank), of the attention rules."""
        result: dict[str, dict[str, tuple[int, int]]] = {}
        # a pattern may match modules of two kinds: an attribute of one kind is that kind's alone
        missing: dict[tuple[Position, str], str] = {}
        had: set[tuple[Position, str]] = set()
        for path, rule in self.rules.items():
            expressions = rule.options.get("attributes")
            if not named(rule.style).heads or not isinstance(expressions, Mapping):
                continue
            where = rule.option_positions.get("attributes", rule.position)
            known = self.groups[path]
            names = {k: v for k, v in self.names_of(path).items() if k not in _COUNTS}
            whole, local = (
                {**names, **known.known(), "tp": 1},
                {**names, **known.known(tp), "tp": tp},
            )
            for name, text in expressions.items():
                present = attribute(self.model.get_submodule(path), name)
                if not isinstance(present, int):
                    if not rule.optional:  # else no module may be of the kind that has it
                        missing.setdefault((where, name), path)
                    continue
                had.add((where, name))
                try:
                    expression = Expression(str(text))
                    if known == Heads() and not expression.names.isdisjoint(_COUNTS):
                        self._say(path, f"{name}: its heads were not seen", where, _UNSEEN)
                        continue
                    computed = expression.evaluate(whole)
                    per_rank = expression.evaluate(local)
                except ExpressionError as error:
                    self._say(path, f"{name}: {error}", where)
                    continue
                if computed != present:
                    message = f"'{text}' is {computed}, but {name} is {present}"
                    listed = ", ".join(f"{k} = {v}" for k, v in known.known().items())
                    hint = f"what is known: {listed or 'no heads'}"
                    self._say(path, message, where, hint)
                    continue
                result.setdefault(path, {})[name] = (present, per_rank)
        for (where, name), path in missing.items():
            if (where, name) not in had:
                has = ", ".join(named_in_code(self.model.get_submodule(path)))
                hint = f"its code reads: {has or 'none'}"
                self._say(path, f"has no integer attribute '{name}'", where, hint)
        return result


def _units(name: str, names: Sequence[str], known: Heads, repeat: int) -> int | None:
    """How many heads a part has in each block; parts q1 and q2 have half of the heads each."""
    kind = _kind(name)
    count = known.heads if kind in _QUERIES else known.kv_heads if kind in _KEYS else None
    blocks = repeat * sum(_kind(other) == kind for other in names)
    return None if count is None or count % blocks else count // blocks


def _kind(name: str) -> str:
    return name.rstrip("0123456789")


def _make(module: nn.Module) -> Hashable:
    """What modules that compute the same of other weights have in common."""
    shapes = tuple((name, tuple(p.shape)) for name, p in module.named_parameters())
    return type(module), tuple(integers(vars(module)).items()), shapes
