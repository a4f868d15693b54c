"""The sections of the page that show one run: its collectives, and one layer in time."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence

from tpplan.planner.match import folded
from tpplan.report import charts
from tpplan.report.markup import (
    Column,
    Html,
    badge,
    details,
    duration,
    section,
    table,
    tag,
    times,
)
from tpplan.report.report import Report
from tpplan.report.steps import PHASES, Collective, Element
from tpplan.report.text import size
from tpplan.report.timeline import Span


def mode(report: Report) -> str:
    """TP or TP+SP."""
    return "TP+SP" if report.compiled.sequence_parallel else "TP"


# --- collectives


def collectives(report: Report) -> Html:
    """Every collective of a step, those of equal layers in one row."""
    if not report.collectives:
        return section("collectives", "Collectives", tag("p", "None: there is one rank."))
    lead = tag(
        "p",
        "What the first rank issues in one training step, equal layers in one row. Bytes are what "
        "it sends with ring algorithms: 2(N−1)/N of the tensor for an all-reduce, (N−1)/N for the "
        "others. ",
        badge("exact"),
    )
    found = dict.fromkeys((*PHASES, *(c.phase for c in report.collectives)))
    tables = [_phase(report, phase) for phase in found]
    return section("collectives", "Collectives", lead, *tables)


def _phase(report: Report, phase: str) -> Html:
    groups = Counter(_folded(c) for c in report.collectives if c.phase == phase)
    title = phase.replace("_", " ")
    if not groups:
        return tag("p", tag("b", title), ": none", class_="quiet")
    columns = (
        Column("module", code=True),
        Column("collective"),
        Column("count", numeric=True),
        Column("shape"),
        Column("each", numeric=True),
        Column("total", numeric=True),
        Column("for"),
        Column("rule", code=True),
    )
    rows = [
        (
            c.module or "(model)",
            c.kind.replace("_", "-"),
            count,
            f"{times(c.shape)} {c.dtype}",
            size(c.bytes),
            size(count * c.bytes),
            c.reason,
            c.rule or "",
        )
        for c, count in groups.items()
    ]
    total = sum(count * c.bytes for c, count in groups.items())
    footer = ("sum", "", groups.total(), "", "", size(total), "", "")
    return table(title, columns, rows, footer, stacked=True)


def _folded(c: Collective) -> Collective:
    return dataclasses.replace(c, module=folded(c.module), reason=folded(c.reason))


# --- timeline


def timeline(report: Report) -> Html:
    """One element of the largest stack, forward and backward."""
    element = _middle(report.timeline)
    if element is None:
        return section(
            "timeline", "Timeline of one layer", tag("p", "The model has no stack of equal layers.")
        )
    parts: list[Html] = []
    spans = {
        phase: [s for s in report.timeline if s.element == element and s.phase == phase]
        for phase in ("forward", "backward")
    }
    longest = max(_length(found) for found in spans.values())
    for phase, found in spans.items():
        if found:
            parts += _panel(phase, element, found, longest)
    where = f"{element.stack}.{element.index}"
    lead = tag(
        "p",
        "What one rank does in ",
        tag("code", where),
        f", on {report.hardware.name}; forward and backward are drawn to the same scale. ",
        badge("modelled"),
    )
    key = charts.legend(
        {
            "flops": "compute, bound by FLOPs",
            "moves": "compute, bound by memory",
            "sends": "communication, exposed",
            "hidden": "communication that could run beside compute",
        }
    )
    return section("timeline", "Timeline of one layer", lead, key, *parts)


def _middle(spans: Sequence[Span]) -> Element | None:
    """The middle element of the stack that has most of them."""
    stacks: dict[str, set[int]] = {}
    for span in spans:
        if span.element is not None:
            stacks.setdefault(span.element.stack, set()).add(span.element.index)
    if not stacks:
        return None
    largest = max(stacks, key=lambda name: len(stacks[name]))
    indices = sorted(stacks[largest])
    return Element(largest, indices[len(indices) // 2])


def _length(spans: Sequence[Span]) -> float:
    if not spans:
        return 0.0
    return max(s.start + s.seconds for s in spans) - min(s.start for s in spans)


def _class(span: Span) -> str:
    if span.lane == "communication":
        return "hidden" if span.overlappable else "sends"
    return "flops" if span.bound == "flops" else "moves"


def _panel(phase: str, element: Element, spans: Sequence[Span], longest: float) -> Iterator[Html]:
    first = min(s.start for s in spans)
    prefix = f"{element.stack}.{element.index}"
    names = {s: s.module.removeprefix(prefix).strip(".") or "(layer)" for s in spans}
    blocks = [
        charts.Block(
            s.start - first,
            s.seconds,
            s.lane,
            _class(s),
            f"{names[s]}: {s.what}, {duration(s.seconds)}, bound by {s.bound}",
            (f"{names[s]}: {s.what}", s.what, names[s], names[s].rpartition(".")[2])
            if s.lane == "communication"
            else (names[s], names[s].rpartition(".")[2]),
        )
        for s in spans
    ]
    sending = [s for s in spans if s.lane == "communication"]
    exposed = sum(s.seconds for s in sending if not s.overlappable)
    total = _length(spans)
    described = (
        f"{len(spans)} spans in {duration(total)}; communication takes "
        f"{duration(sum(s.seconds for s in sending))}, of which {duration(exposed)} is exposed."
    )
    chart = charts.timeline(f"timeline-{phase}", f"{phase} of {prefix}", described, blocks, longest)
    yield tag("h3", f"{phase}: {duration(total)}")
    yield tag(
        "div",
        tag("div", chart, class_="timeline"),
        class_="scroll",
        role="region",
        aria_label=f"timeline of the {phase} pass",
        tabindex=0,
    )
    yield tag("p", described, class_="quiet")
    columns = (
        Column("module", code=True),
        Column("what"),
        Column("lane"),
        Column("starts", numeric=True, certainty="modelled"),
        Column("takes", numeric=True, certainty="modelled"),
        Column("bound by"),
        Column("beside compute"),
    )
    rows = [
        (
            names[s],
            s.what,
            s.lane,
            duration(s.start - first),
            duration(s.seconds),
            s.bound,
            ("possible" if s.overlappable else "no") if s.lane == "communication" else "",
        )
        for s in spans
    ]
    yield details(f"{phase} as a table", table(f"{phase} of {prefix}", columns, rows, stacked=True))
