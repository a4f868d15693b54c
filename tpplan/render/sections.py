"""The sections of the page that show one run: its collectives, and one layer in time."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence

from tpplan.cost.run import DryRun
from tpplan.cost.timing import Span
from tpplan.planner.match import folded
from tpplan.render import charts
from tpplan.render.markup import (
    Column,
    Html,
    badge,
    details,
    modelled,
    numeric,
    scrolling,
    section,
    table,
    tag,
    times,
)
from tpplan.render.paths import folded_text
from tpplan.render.units import ROUTED, duration, expected, routed_size
from tpplan.simulate.steps import PHASES, Collective, Member

# --- collectives


def collectives(report: DryRun) -> Html:
    """Every collective of a step, those of equal layers in one row."""
    if not report.collectives:
        return section("collectives", "Collectives", tag("p", "None: there is one rank."))
    lead = tag(
        "p",
        "What the first rank issues in one training step, equal layers in one row. Bytes are what "
        "it sends with ring algorithms: 2(N−1)/N of the tensor for an all-reduce, (N−1)/N for the "
        "others. ",
        badge("exact"),
        tag("p", ROUTED) if report.compiled.ep > 1 else "",
    )
    found = dict.fromkeys((*PHASES, *(c.phase for c in report.collectives)))
    tables = [_phase(report, phase) for phase in found]
    return section("collectives", "Collectives", lead, *tables)


def _phase(report: DryRun, phase: str) -> Html:
    groups = Counter(_folded(c) for c in report.collectives if c.phase == phase)
    title = phase.replace("_", " ")
    if not groups:
        return tag("p", tag("b", title), ": none", class_="quiet")
    columns = (
        Column("module", lambda c: c.module or "(model)", code=True),
        Column("collective", lambda c: c.kind.replace("_", "-")),
        numeric("count", lambda c: groups[c]),
        Column("shape", lambda c: f"{times(c.shape)} {c.dtype}"),
        numeric("each", routed_size),
        numeric("total", lambda c: expected(groups[c] * c.bytes, groups[c] * c.at_worst)),
        Column("for", lambda c: c.reason),
        Column("rule", lambda c: c.rule or "", code=True),
    )
    total = sum(count * c.bytes for c, count in groups.items())
    worst = sum(count * c.at_worst for c, count in groups.items())
    footer = ("sum", "", groups.total(), "", "", expected(total, worst), "", "")
    return table(title, columns, groups, footer, stacked=True, class_="sites")


def _folded(c: Collective) -> Collective:
    return dataclasses.replace(c, module=folded(c.module), reason=folded_text(c.reason))


# --- timeline


def timeline(report: DryRun) -> Html:
    """The typical element of the largest stack, forward and backward."""
    title, layers = "Timeline of one layer", report.time.layers
    if not layers:
        return section("timeline", title, tag("p", "The model has no stack of layers."))
    stack = max(layers, key=lambda name: layers[name].count)
    element = Member(stack, layers[stack].index)
    spans = {
        phase: [s for s in report.timeline if s.element == element and s.phase == phase]
        for phase in ("forward", "backward")
    }
    longest = max(map(_length, spans.values()))
    lead = tag(
        "p",
        "What one rank does in ",
        tag("code", f"{stack}.{element.index}"),
        f", the element of median time among {layers[stack].count}, on {report.hardware.name}. "
        "Forward and backward are drawn to the same scale. Weight gradients are computed while "
        "collectives of the backward pass are under way. ",
        badge("modelled"),
    )
    key = charts.legend(
        {
            "flops": "compute, bound by FLOPs",
            "moves": "compute, bound by memory",
            "sends": "communication, waited for",
            "could": "waited for, and could run beside matmuls",
            "hidden": "communication that runs beside them",
        }
    )
    panels = (
        part for phase, found in spans.items() if found for part in _panel(phase, found, longest)
    )
    return section("timeline", title, lead, key, *panels)


def _length(spans: Sequence[Span]) -> float:
    """From the start of the first to the end of the last."""
    return max((s.start + s.seconds for s in spans), default=0.0) - min(
        (s.start for s in spans), default=0.0
    )


def _panel(phase: str, spans: Sequence[Span], longest: float) -> Iterator[Html]:
    element = spans[0].element
    where = f"{element.stack}.{element.index}" if element is not None else ""
    first = spans[0].start

    def name(span: Span) -> str:
        return span.module.removeprefix(where).strip(".") or "(layer)"

    def sends(span: Span) -> bool:
        return span.lane == "communication"

    blocks = [_block(s, name(s), first) for s in spans]
    sent = sum(s.seconds for s in filter(sends, spans))
    hidden = sum(s.hidden for s in spans)
    could = sum(s.overlappable for s in spans)
    total = _length(spans)
    described = f"{duration(total)}, of which communication {duration(sent)}"
    if sent:
        described += f"; {duration(hidden)} of that is hidden, {duration(could)} more could be"
    chart = charts.timeline(f"timeline-{phase}", f"{phase} of {where}", described, blocks, longest)
    yield tag("h3", f"{phase}: {described}")
    yield scrolling(f"timeline of the {phase} pass", tag("div", chart, class_="timeline"))
    columns = (
        Column("module", name, code=True),
        Column("what", lambda s: s.what),
        Column("lane", lambda s: s.lane),
        modelled("starts", lambda s: duration(s.start - first)),
        modelled("takes", lambda s: duration(s.seconds)),
        Column("bound by", lambda s: s.bound),
        modelled("hidden", lambda s: duration(s.hidden) if sends(s) else ""),
        modelled("could overlap", lambda s: duration(s.overlappable) if sends(s) else ""),
    )
    yield details(f"{phase} as a table", table(f"{phase} of {where}", columns, spans, stacked=True))


def _block(span: Span, name: str, first: float) -> charts.Block:
    short = name.rpartition(".")[2]
    labels: tuple[str, ...] = (name, short)
    parts: tuple[tuple[str, float], ...]
    parts = (("flops" if span.bound == "flops" else "moves", span.seconds),)
    if span.lane == "communication":
        kind = span.what.partition(" ")[0].replace("_", "-")
        labels = (f"{kind}: {name}", f"{kind}: {short}", kind)
        exposed = span.seconds - span.hidden - span.overlappable
        parts = (("hidden", span.hidden), ("could", span.overlappable), ("sends", exposed))
    return charts.Block(
        span.start - first,
        span.lane,
        tuple(part for part in parts if part[1] > 0),
        f"{name}: {span.what}, {duration(span.seconds)}, bound by {span.bound}",
        labels,
    )
