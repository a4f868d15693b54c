"""What is said where the proof of a sharded region fails: what, where, and what to write."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tpplan.language import Rule
from tpplan.planner import infer
from tpplan.planner.attributes import integers, named_in_code
from tpplan.planner.events import Failure
from tpplan.planner.match import fold, folded
from tpplan.planner.outcome import Outcome
from tpplan.planner.parts import looks_packed
from tpplan.planner.stops import Stop, stopped_at
from tpplan.styles import NONE, named
from tpplan.styles.attention import ATTENTION
from tpplan.styles.colwise import COLWISE
from tpplan.styles.replicate import REPLICATE

_ORDER = "is not reached", "is called in another order"
_SHOWN = 4


@dataclass(frozen=True)
class Width:
    """Code that is right where it is shown a rank's share of the width of what modules give.

    Attributes:
        shown: these modules.
        layers: the projections that are given it.
        names: the attributes that are a rank's own then.
    """

    shown: tuple[str, ...]
    layers: tuple[str, ...]
    names: tuple[str, ...]


def say_unproved(failure: Failure, found: Outcome, width: Width | None) -> None:
    """Blame the layers whose columns were at work where a rank's run departs."""
    path, message = failure.path, failure.message
    rules = found.matches.modules
    own, made, tables = rules.get(path), _makers(failure, found), _tables(failure, found)
    rule = rules[made[0]] if made else rule_near(rules, path)
    paths = [path]
    at = "" if failure.rank is None else f"on rank {failure.rank} of {found.tp} "
    cut = found.matches.parameters
    if path in found.bare:
        tables = tables or [name for name in cut if name.rpartition(".")[0] == path]
    if tables:
        rule = cut[tables[0]]
    rule = found.block_rules.get(path, rule)
    if message.startswith("fails: ") and made:
        message = f"fails with its part of {fold(made)}: {message.removeprefix('fails: ')}"
    if message.startswith("its input"):
        departs = f"{at[:-1]}, {message.replace('its input', f'the input of {path}', 1)}"
        paths = made or paths
        message = f"the columns of one rank are not enough for its work: {departs}"
    else:
        if own is not None and named(own.style).heads:
            rule = own
        message = f"{at}it {message}"
    cure = _Cure(failure, found, made, tables).text()
    if width is not None:
        cure = _apart(width, found.sequence_parallel)
    found.complaints.about(rule, paths, message, cure, stopped_at(failure.place))


def _apart(width: Width, rows: bool) -> str:
    """Of code that has no module of its own, which could be shown a share of the width."""
    own = f", and {', '.join(width.names)} made a rank's own" if width.names else ""
    told = (
        f"this code takes its number of columns from the width of what {fold(width.shown)} gives, "
        f"which is whole; it is right with a rank's share of that width{own}"
    )
    layers = fold(width.layers)
    if not rows:
        return f"{told}. Take it from what {layers} give (or -1 in a view): the rest is found then"
    return (
        f"{told}. Put what it does with {layers} in a module of its own, which is given that "
        "tensor: with their rules at the new paths the rest is found then"
    )


class _Cure:
    """What to write in the plan, by what failed."""

    def __init__(
        self, failure: Failure, found: Outcome, made: list[str], tables: list[str]
    ) -> None:
        self.failure, self.found, self.made, self.tables = failure, found, made, tables

    def text(self) -> str:
        stop, message = self.failure.stop, self.failure.message
        if self.failure.rank is None:
            return "give inputs= with which this code runs, whatever the model's numbers are"
        if stop is Stop.ENTRY:
            return self._entry()
        if stop is Stop.CODE or message.startswith(_ORDER):
            return self._whole("let this code do the same with a part of the columns")
        sizes = self._sizes() if stop else self._columns()
        return self._packed() or self._bare() or self._unruled() or self._uncut() or sizes

    def _whole(self, otherwise: str) -> str:
        made = fold(self.made) or "what is sharded there"
        return f"{otherwise}, or make {made}, and what sums it, {REPLICATE.name}"

    def _entry(self) -> str:
        if not self.tables:
            return self._whole("let this code count the entries that a rank has")
        return (
            "a rank has fewer entries of it, as it is cut along its first dimension: that must "
            f"be the one of heads, or make it {REPLICATE.name}"
        )

    def _packed(self) -> str | None:
        """Where a layer looks like several projections in one."""
        styles, rules = self.found.styles, self.found.matches.modules
        for path in self.made:
            stated = "packed" in rules[path].options
            parts = None if stated else looks_packed(self.found.trace, path, styles)
            if parts is not None:
                return (
                    f"{fold([path])} looks like several projections side by side: name its parts "
                    f"in their order, {parts}"
                )
        return None

    def _bare(self) -> str | None:
        """A module that multiplies by parameters of its own which rules cut."""
        if self.failure.path not in self.found.bare:
            return None
        if self.failure.path in self.found.block_rules:
            return (
                "what works beside the experts must be sharded too, up to a row-parallel layer; "
                "and parts of a sum can only be added, and multiplied by what is whole: let what "
                "else is done to the sum be done outside of this module"
            )
        if self.failure.message.startswith("gives parts"):
            return (
                "state with 'dim:' which dimension of each parameter is summed over; and let what "
                "is done to the sum (a residual, an activation) be done outside of this module"
            )
        return (
            "state with 'dim:' which dimension of each parameter has the heads or columns that "
            "this code keeps apart; it may take sizes from parameters and attributes, not its input"
        )

    def _unruled(self) -> str | None:
        """A module with parameters of its own that columns reach, and no rule knows of."""
        path = self.failure.path
        module, style = self.found.model.get_submodule(path), self.found.styles.get(path, NONE)
        if style.columns or style.sums or style.heads or not module._parameters:
            return None
        if self.failure.stop is None or next(module.children(), None) is not None:
            return None
        told = "no rule speaks of it" if style is NONE else f"its rule says {style.name}"
        return f"{told}, and it is given columns: make {fold([path])} {COLWISE.name}"

    def _uncut(self) -> str | None:
        """Parameters and buffers of the module's that the line speaks of, and that are whole."""
        path, matches = self.failure.path, self.found.matches
        module = self.found.model.get_submodule(path)
        line = "" if self.failure.place is None else self.failure.place.text
        held = {**module._parameters, **module._buffers}
        names = [f"{path}.{name}" for name in held if re.search(rf"\.{name}\b", line)]
        rules = {**matches.parameters, **matches.buffers}
        whole = [n for n in names if n not in rules or not named(rules[n].style).columns]
        if not whole or self.failure.stop is None:
            return None
        return f"{fold(whole)} may have an entry for every column or head: make it {COLWISE.name}"

    def _sizes(self) -> str:
        """Numbers of the module's that the line, or else its code, speaks of."""
        module = self.found.model.get_submodule(self.failure.path)
        numbers = list(named_in_code(module))
        line = "" if self.failure.place is None else self.failure.place.text
        told = dict.fromkeys((*numbers, *integers(vars(module))))
        spoken = [name for name in told if re.search(rf"\.{name}\b", line)]
        where = f"'attributes' of the {ATTENTION.name} style"
        if spoken:
            names = ", ".join(spoken[:_SHOWN])
            return f"make the number that counts all columns here a rank's own, in {where}: {names}"
        has = f" (the module has {', '.join(numbers[:_SHOWN])})" if numbers else ""
        return (
            f"a number here counts all columns: read it from an attribute{has}, which {where} "
            "makes a rank's own"
        )

    def _columns(self) -> str:
        if not self.failure.message.startswith("its input"):
            only = "only what works on each column or head by itself can have a part of them"
            return self._whole(only)
        rules = self.found.matches.modules
        if any("packed" in rules[path].options for path in self.made):
            return "name the parts under 'packed' as they lie in the weight, in their order"
        said = "where the layer is several projections in one, name them with 'packed'; where this "
        return self._whole(f"{said}code mixes columns, let it keep them apart")


def _makers(failure: Failure, found: Outcome) -> list[str]:
    """The column-parallel projections in the module, or else those before it."""
    path, trace, columns = failure.path, found.trace, found.sizes.columns
    order = dict.fromkeys(call.path for call in trace.calls)
    made = [other for other in order if other in columns and _inside(other, path)]
    call = next((c for c in trace.calls if c.path == path), None)
    return infer.sources(trace, call, found.styles) if call is not None and not made else made


def _tables(failure: Failure, found: Outcome) -> list[str]:
    """Cut parameters with a rule of their own, where an entry of one is missing."""
    if failure.stop is not Stop.ENTRY or failure.rank is None:
        return []
    cut = found.matches.parameters.items()
    alike = folded(failure.path)
    return [
        name for name, rule in cut if named(rule.style).sharded and _inside(folded(name), alike)
    ]


def rule_near(rules: Mapping[str, Rule], path: str) -> Rule | None:
    """The rule of a module, or of the first one inside it."""
    near = (rule for known, rule in rules.items() if known == path or _inside(known, path))
    return next(near, None)


def _inside(path: str, outer: str) -> bool:
    return not outer or path.startswith(f"{outer}.")
