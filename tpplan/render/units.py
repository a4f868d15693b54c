"""Bytes, times and counts as people read them."""

from __future__ import annotations

from collections.abc import Sequence

from tpplan.compiled import CompiledPlan
from tpplan.simulate.steps import Collective

ROUTED = (
    "'expected' and 'at worst': how much is sent hangs on which experts tokens choose; expected is "
    "as often each, which times and memory go by, at worst is all rows to or from one rank."
)
"""What is said of bytes that hang on numbers."""


def size(count: float) -> str:
    """Bytes in binary units."""
    unit, value = scaled(count, ("B", "KiB", "MiB", "GiB"))
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def scaled(count: float, units: Sequence[str]) -> tuple[str, float]:
    """The unit that suits a number, each of 1024 of the one before, and the number in it."""
    unit, *larger = units
    return (unit, count) if count < 1024 or not larger else scaled(count / 1024, larger)


def duration(seconds: float) -> str:
    """A time with three digits, in the unit that suits it."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        value = seconds * factor
        if value >= 1 or unit == "µs":
            return f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.3g} {unit}"
    raise AssertionError


def number(count: int) -> str:
    """A parameter count, short."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= limit:
            return f"{count / limit:.2f} {unit}"
    return str(count)


def ranks(compiled: CompiledPlan) -> str:
    """Among how many a model is shared."""
    return f"tp {compiled.tp}" + (f", ep {compiled.ep}" if compiled.ep > 1 else "")


def expected(sent: int, worst: int) -> str:
    """Bytes that hang on which experts tokens choose, where the two differ."""
    return size(sent) if sent == worst else f"{size(sent)} expected, {size(worst)} at worst"


def routed_size(collective: Collective) -> str:
    """The bytes of a collective."""
    return expected(collective.bytes, collective.at_worst)
