"""Charts as inline SVG, each with a title and a description for those who do not see it.

Colours come from the page's style sheet, by class, so that they follow light, dark and print.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tpplan.render.markup import Html, join, tag

# of a character of the labels, at their 11 px; a little more than the usual sans serif needs
_CHARACTER = 6.4
_GUTTER, _PLOT, _LANE, _GAP = 112.0, 1040.0, 40.0, 8.0
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 360.0, 230.0, 58.0, 14.0, 28.0


def _svg(
    name: str, title: str, description: str, size: tuple[float | str, float], *content: Html
) -> Html:
    width, height = map(_n, size)
    boxed = isinstance(size[0], float)
    return tag(
        "svg",
        tag("title", title, id=f"{name}-name"),
        tag("desc", description, id=f"{name}-what"),
        *content,
        role="img",
        aria_labelledby=f"{name}-name {name}-what",
        viewBox=f"0 0 {width} {height}" if boxed else None,
        width=None if boxed else width,
        height=None if boxed else height,
    )


def _n(value: float | str) -> str:
    """A length, short; one that has its unit already stays as it is."""
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")


def _label(x: float | str, y: float, content: str, class_: str = "", anchor: str = "start") -> Html:
    return tag("text", content, x=_n(x), y=_n(y), class_=class_ or None, text_anchor=anchor)


def _line(x1: float | str, y1: float, x2: float | str, y2: float, class_: str) -> Html:
    return tag("line", x1=_n(x1), y1=_n(y1), x2=_n(x2), y2=_n(y2), class_=class_)


def legend(entries: Mapping[str, str]) -> Html:
    """What the colours stand for: class -> text."""
    items = (
        tag("li", tag("span", class_=f"swatch {class_}", aria_hidden="true"), meaning)
        for class_, meaning in entries.items()
    )
    return tag("ul", *items, class_="legend")


# --- timeline


@dataclass(frozen=True)
class Block:
    """Something in a lane of a timeline.

    Attributes:
        parts: (class, seconds) one after the other.
        labels: from long to short; the longest that fits is written on it.
    """

    start: float
    lane: str
    parts: tuple[tuple[str, float], ...]
    title: str
    labels: tuple[str, ...]


def timeline(
    name: str, title: str, description: str, blocks: Sequence[Block], seconds: float
) -> Html:
    """Blocks in their lanes, to scale.

    Args:
        seconds: what the whole width stands for.
    """
    lanes = list(dict.fromkeys(["compute", "communication", *(b.lane for b in blocks)]))
    height = len(lanes) * (_LANE + _GAP) + 24
    scale = _PLOT / seconds if seconds else 0.0
    parts: list[Html] = []
    unit, factor = ("ms", 1e3) if seconds >= 1e-3 else ("µs", 1e6)
    for tick in _ticks(seconds * factor, 8):
        x = _GUTTER + tick / factor * scale
        parts.append(_line(x, 0, x, height - 20, "grid"))
        anchor = "end" if x > _GUTTER + _PLOT - 20 else "middle"
        parts.append(_label(x, height - 6, f"{tick:g} {unit}", "axis", anchor))
    for index, lane in enumerate(lanes):
        top = index * (_LANE + _GAP) + 4
        parts.append(_label(0, top + _LANE / 2 + 4, lane, "lane"))
        for block in blocks:
            if block.lane == lane:
                parts.append(_block(block, _GUTTER + block.start * scale, top, scale))
    return _svg(name, title, description, (_GUTTER + _PLOT + 8, height), *parts)


def _block(block: Block, x: float, top: float, scale: float) -> Html:
    shapes: list[Html] = [tag("title", block.title)]
    widest, middle, colour = 0.0, x, ""
    for class_, seconds in block.parts:
        width = max(seconds * scale, 0.6)
        box = {"x": _n(x), "y": _n(top), "width": _n(width), "height": _n(_LANE)}
        shapes.append(tag("rect", **box, class_=class_))
        if width > widest:
            widest, middle, colour = width, x + width / 2, class_
        x += width
    fits = [label for label in block.labels if len(label) * _CHARACTER + 6 <= widest]
    if fits:
        shapes.append(_label(middle, top + _LANE / 2 + 4, fits[0], f"on {colour}", "middle"))
    return tag("g", *shapes)


def _ticks(most: float, number: int) -> list[float]:
    """Round values from zero to ``most``, at most about ``number`` of them."""
    if most <= 0:
        return [0.0]
    least = most / number
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= least)
    return [step * i for i in range(int(most / step + 1e-9) + 1)]


# --- stacked bars


@dataclass(frozen=True)
class Stack:
    """A bar: its name, what stands beside the name, and its parts as (class, name, value)."""

    name: str
    total: str
    parts: tuple[tuple[str, str, float], ...]


def stacked_bars(
    name: str,
    title: str,
    stacks: Sequence[Stack],
    limit: float | None,
    shown: Callable[[float], str],
    axis: Callable[[float], str],
) -> Html:
    """Horizontal bars one under another; lengths are per cent of the width, texts are not scaled.

    Args:
        limit: the value of a line across every bar, if there is to be one.
        shown: a value as text; axis: a power of two as a short one.
    """
    most = 1.02 * max(limit or 0, *(sum(v for _, _, v in s.parts) for s in stacks))
    pitch = 46.0
    height = pitch * len(stacks) + 24
    parts: list[Html] = []

    def at(value: float) -> str:
        return f"{_n(100 * value / most)}%"

    step = 2.0 ** math.ceil(math.log2(most / 4))
    for tick in range(int(most / step) + 1):
        x = at(tick * step)
        parts.append(_line(x, 0, x, height - 20, "grid"))
        anchor = "start" if not tick else "end" if tick * step > 0.9 * most else "middle"
        parts.append(_label(x, height - 6, axis(tick * step), "axis", anchor))
    for index, stack in enumerate(stacks):
        y = pitch * index
        parts.append(_label("0%", y + 15, f"{stack.name}: {stack.total}", "bar-name"))
        start = 0.0
        for class_, part, value in stack.parts:
            if value > 0:
                told = tag("title", f"{stack.name}, {part}: {shown(value)}")
                box = {"x": at(start), "y": _n(y + 21), "width": at(value), "height": "18"}
                parts.append(tag("rect", told, **box, class_=class_))
            start += value
        if limit is not None:
            parts.append(_line(at(limit), y + 18, at(limit), y + 42, "limit"))
    described = "; ".join(f"{stack.name}: {stack.total}" for stack in stacks)
    return _svg(name, title, described, ("100%", height), *parts)


# --- lines


@dataclass(frozen=True)
class Line:
    """A line of a chart: its class and its points."""

    class_: str
    name: str
    points: tuple[tuple[float, float], ...]


def line_chart(
    name: str,
    title: str,
    lines: Sequence[Line],
    shown: Callable[[float], str],
    axis: Callable[[float], str],
    base: float | None,
    marked: float,
    limit: tuple[str, float] | None = None,
) -> Html:
    """Lines over powers of two.

    Args:
        shown: a value as text; axis: a round one as a short text.
        base: of the upright axis, where it is one of powers of two: they are multiplied by it.
        marked: the x whose points stand out.
        limit: the name and the value of a line across.
    """
    xs = sorted({x for line in lines for x, _ in line.points})
    ys = [y for line in lines for _, y in line.points] + ([limit[1]] if limit else [])
    low, high, ticks = _scale(ys, base)

    def across(x: float) -> float:
        span = math.log2(xs[-1] / xs[0]) or 1.0
        return _LEFT + 8 + math.log2(x / xs[0]) / span * (_WIDTH - _LEFT - 24)

    def up(y: float) -> float:
        place = (math.log2(y / base) if base else y) - low
        return _HEIGHT - _BOTTOM - place / (high - low) * (_HEIGHT - _BOTTOM - _TOP)

    parts: list[Html] = []
    for tick in ticks:
        parts.append(_line(_LEFT, up(tick), _WIDTH, up(tick), "grid"))
        parts.append(_label(_LEFT - 5, up(tick) + 4, axis(tick), "axis", "end"))
    for x in xs:
        class_ = "axis marked" if x == marked else "axis"
        parts.append(_label(across(x), _HEIGHT - 10, f"{x:g}", class_, "middle"))
    parts.append(_label(_LEFT - 5, _HEIGHT - 10, "tp", "axis", "end"))
    if limit:
        y = up(limit[1])
        parts.append(_line(_LEFT, y, _WIDTH, y, "limit"))
        parts.append(_label(_WIDTH, y - 4, limit[0], "limit-name", "end"))
    for line in lines:
        points = " ".join(f"{_n(across(x))},{_n(up(y))}" for x, y in line.points)
        parts.append(tag("polyline", points=points, class_=f"line {line.class_}"))
        for x, y in line.points:
            told = tag("title", f"{line.name}, tp {x:g}: {shown(y)}")
            place = {"cx": _n(across(x)), "cy": _n(up(y)), "r": "5" if x == marked else "3"}
            parts.append(tag("circle", told, **place, class_=f"point {line.class_}"))
    described = "; ".join(
        f"{line.name}: " + ", ".join(f"tp {x:g} {shown(y)}" for x, y in line.points)
        for line in lines
    )
    return _svg(name, title, described, (_WIDTH, _HEIGHT), join(parts))


def _scale(values: Sequence[float], base: float | None) -> tuple[float, float, list[float]]:
    """The axis' ends (of the logarithm, where it is one) and its ticks."""
    if base is None:
        most = max(values) * 1.05 or 1.0
        return 0.0, most, _ticks(most, 5)
    logs = [math.log2(v / base) for v in values if v > 0] or [0.0]
    low, high = math.floor(min(logs)), math.ceil(max(logs))
    high = max(high, low + 1)
    every = math.ceil((high - low) / 6)
    return float(low), float(high), [base * 2.0**n for n in range(low, high + 1, every)]
