"""What one plan changes against another on one model: placements, collectives, memory, time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tpplan.compiled import ParameterPlan
from tpplan.cost.run import DryRun
from tpplan.planner.match import folded
from tpplan.render.console import plain, titled
from tpplan.render.units import duration, size
from tpplan.simulate.steps import PHASES


@dataclass(frozen=True)
class Moved:
    """Parameters that the two plans place differently, those of equal layers together.

    Attributes:
        name: layer numbers replaced by ``*``; count: how many; before, after: how they are placed.
    """

    name: str
    count: int
    before: str
    after: str


@dataclass(frozen=True)
class Figure:
    """A number of both runs; ``unit``: count, bytes or seconds."""

    name: str
    unit: str
    before: float
    after: float


@dataclass(frozen=True)
class Change:
    """The difference between two dry runs. ``print(change)`` shows it."""

    plans: tuple[str, str]
    parameters: tuple[Moved, ...]
    figures: tuple[Figure, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"version": 1, **asdict(self)}

    def __str__(self) -> str:
        return plain(layout(self))


def compare(before: DryRun, after: DryRun) -> Change:
    """What ``after`` does otherwise than ``before``: two dry runs of one model."""
    plans = before.compiled.plan.name, after.compiled.plan.name
    figures = [f for f in _figures(before, after) if f.before != f.after]
    return Change(plans, tuple(_moved(before, after)), tuple(figures))


def _moved(before: DryRun, after: DryRun) -> Iterable[Moved]:
    groups: Counter[tuple[str, str, str]] = Counter()
    for name, old in before.compiled.parameters.items():
        new = after.compiled.parameters.get(name)
        was, now = _placed(old), "not a parameter of its own" if new is None else _placed(new)
        if was != now:
            groups[folded(name), was, now] += 1
    for (name, was, now), count in groups.items():
        yield Moved(name, count, was, now)


def _placed(entry: ParameterPlan) -> str:
    shape = "×".join(map(str, entry.local_shape))
    return f"{entry.placed}{', summed' if entry.summed else ''}: {shape}"


def _figures(before: DryRun, after: DryRun) -> Iterable[Figure]:
    for phase in PHASES:
        old, new = before.counts(phase), after.counts(phase)
        for kind in dict.fromkeys([*old, *new]):
            name = f"{phase.replace('_', ' ')}: {kind.replace('_', '-')}"
            yield Figure(name, "count", old.get(kind, 0), new.get(kind, 0))
        name = f"{phase.replace('_', ' ')}: sent per rank"
        yield Figure(name, "bytes", before.bytes_sent(phase), after.bytes_sent(phase))
    for attribute in ("parameters_per_rank", "states_per_rank", "peak_per_rank"):
        name = attribute.replace("_", " ")
        old_bytes, new_bytes = getattr(before.memory, attribute), getattr(after.memory, attribute)
        yield Figure(name, "bytes", old_bytes, new_bytes)
    old_time, new_time = before.time.total, after.time.total
    for name, part in (("step", "seconds"), ("communication", "communication")):
        old_part, new_part = getattr(old_time, part), getattr(new_time, part)
        yield Figure(f"{name}, modelled", "seconds", old_part, new_part)


def layout(change: Change) -> Group:
    """The difference for a rich console."""
    first, second = change.plans
    parts: list[RenderableType] = [Text(f"{first} -> {second}", style="bold"), ""]
    if not change.parameters and not change.figures:
        return Group(*parts, "They do the same to this model.")
    if change.parameters:
        table = _table("Parameters", "parameter", "×", first, second)
        for moved in change.parameters:
            table.add_row(moved.name, str(moved.count), moved.before, moved.after)
        parts += [table, ""]
    else:
        parts += ["Every parameter is placed as before.", ""]
    table = _table("Figures", "", first, second, "change")
    for figure in change.figures:
        was, now = _said(figure.before, figure.unit), _said(figure.after, figure.unit)
        table.add_row(figure.name, was, now, _by(figure))
    return Group(*parts, table) if change.figures else Group(*parts, "All figures are the same.")


def _table(title: str, *columns: str) -> Table:
    table = titled(title)
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


def _said(value: float, unit: str) -> str:
    if unit == "bytes":
        return size(value)
    return duration(value) if unit == "seconds" else f"{value:.0f}"


def _by(figure: Figure) -> str:
    if figure.unit == "count" or not figure.before:
        more = figure.after - figure.before
        sign = "+" if more > 0 else "-"
        return f"{sign}{_said(abs(more), figure.unit)}"
    return f"{100 * (figure.after / figure.before - 1):+.1f} %"
