"""The sections of the page that compare runs: memory of a rank, and scaling over tp."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from tpplan.cost.memory import Memory
from tpplan.cost.run import DryRun
from tpplan.render import charts
from tpplan.render.markup import (
    Certainty,
    Column,
    Html,
    badge,
    details,
    exact,
    modelled,
    numeric,
    section,
    share,
    table,
    tag,
    tracked,
)
from tpplan.render.units import duration, scaled, size


def mode(report: DryRun) -> str:
    """TP or TP+SP."""
    return "TP+SP" if report.compiled.sequence_parallel else "TP"


# --- memory

_WHOLE = "no parallelism"
# how many times as long the longest bar must be for the others to be drawn once more
_ENLARGED = 3
_PARTS = {
    "parameters": "parameters and buffers",
    "gradients": "gradients there at that time",
    "states": "optimizer state and float32 copies",
    "activations": "activations and temporaries",
    "step": "more during the optimizer's step",
}


def memory(report: DryRun, others: Sequence[DryRun]) -> Html:
    """Bars of what a rank holds, with and without parallelism and checkpointing."""
    held = dict(_variants(report, others))
    limit = report.hardware.memory
    longest = max(m.peak_per_rank for m in held.values())
    shown = limit if limit <= _ENLARGED * longest else None
    lead = tag(
        "p",
        "The most that a rank holds, at the peak of forward and backward, and what the optimizer's "
        "step needs beyond that. Parameters, gradients and optimizer state are ",
        *(badge("exact"), ", activations and temporaries ", badge("tracked"), "."),
    )
    memory_of_gpu = f"a GPU's memory: {size(limit)} ({report.hardware.name})"
    if shown is None:
        memory_of_gpu += ", far beyond what is drawn"
    key = charts.legend({**_PARTS, "limit": memory_of_gpu})
    parts = [lead, key, _bars("memory-bars", "Peak memory of a rank", held, shown)]
    sharded = {name: m for name, m in held.items() if not name.startswith(_WHOLE)}
    largest = max((m.peak_per_rank for m in sharded.values()), default=0)
    if sharded and max(longest, shown or 0) > _ENLARGED * largest:
        nearby = shown if shown is not None and shown <= _ENLARGED * largest else None
        parts.append(tag("h3", "The sharded ones at a larger scale"))
        parts.append(_bars("memory-sharded", "Peak memory of a rank, enlarged", sharded, nearby))
    parts.append(_memory_table(held, limit))
    return section("memory", "Memory of a rank", *parts)


def _bars(name: str, title: str, held: Mapping[str, Memory], limit: float | None) -> Html:
    stacks = [
        charts.Stack(
            variant,
            size(found.peak_per_rank),
            tuple((class_, _PARTS[class_], value) for class_, value in _parts(found).items()),
        )
        for variant, found in held.items()
    ]
    return charts.stacked_bars(name, title, stacks, limit, size, _round_size)


def _round_size(count: float) -> str:
    """A power of two of bytes, short."""
    unit, value = scaled(count, ("B", "KiB", "MiB", "GiB", "TiB"))
    return f"{value:g} {unit}"


def _variants(report: DryRun, others: Sequence[DryRun]) -> Iterator[tuple[str, Memory]]:
    def name_of(r: DryRun) -> str:
        return _WHOLE if r.compiled.tp == 1 else f"{mode(r)}, tp {r.compiled.tp}"

    tp = report.compiled.tp
    chosen = {name_of(r): r for r in (report, *others) if r.compiled.tp in (1, tp)}
    for name in sorted(chosen, key=lambda key: (key != _WHOLE, len(key))):
        for checkpointed, held in _both(chosen[name]):
            yield name + (", checkpointing" if checkpointed else ""), held


def _both(report: DryRun) -> Iterator[tuple[bool, Memory]]:
    """Its memory without activation checkpointing and with it, as far as either is known."""
    run = report.training.checkpointing
    known = {run: report.memory, not run: report.other_memory}
    for checkpointing in (False, True):
        if (held := known[checkpointing]) is not None:
            yield checkpointing, held


def _parts(held: Memory) -> dict[str, int]:
    """The largest peak of forward and backward, by what it consists of, and what comes on top."""
    peaks = [held.peaks[p] for p in ("forward", "backward") if p in held.peaks]
    top = max(peaks, key=lambda peak: peak.bytes, default=None)
    most, activations = (held.states_per_rank, 0) if top is None else (top.bytes, top.activations)
    kept = held.parameters_per_rank + held.buffers_per_rank
    return {
        "parameters": kept,
        "gradients": most - activations - kept - held.optimizer_per_rank,
        "states": held.optimizer_per_rank,
        "activations": activations,
        "step": held.peak_per_rank - most,
    }


def _memory_table(held: Mapping[str, Memory], limit: float) -> Html:
    def peak(phase: str, attribute: str) -> Callable[[str], str]:
        def shown(name: str) -> str:
            found = held[name].peaks.get(phase)
            return "" if found is None else size(getattr(found, attribute))

        return shown

    columns = (
        Column("of a rank", str),
        exact("parameters", lambda n: size(held[n].parameters_per_rank + held[n].buffers_per_rank)),
        exact("gradients, all", lambda n: size(held[n].gradients_per_rank)),
        exact("optimizer", lambda n: size(held[n].optimizer_per_rank)),
        tracked("activations, forward", peak("forward", "activations")),
        tracked("activations, backward", peak("backward", "activations")),
        tracked("optimizer's step", peak("optimizer", "bytes")),
        tracked("peak", lambda n: size(held[n].peak_per_rank)),
        numeric("of the GPU's", lambda n: share(held[n].peak_per_rank, limit)),
    )
    return details("Memory as a table", table("Memory of a rank", columns, held, stacked=True))


# --- scaling


def scaling(report: DryRun, others: Sequence[DryRun]) -> Html:
    """How time, memory and communication change with tp."""
    runs = {r.compiled.tp: r for r in others if mode(r) == mode(report) or r.compiled.tp == 1}
    runs[report.compiled.tp] = report
    content = [tag("p", "Only one tp was run: there is nothing to compare.")]
    if len(runs) > 1:
        content = _curves(report, [runs[tp] for tp in sorted(runs)])
    if report.refused:
        reasons = (tag("li", tag("b", what), f": {why}") for what, why in report.refused.items())
        content += [tag("p", "What the plan cannot be compiled for:"), tag("ul", *reasons)]
    return section("scaling", "Scaling over tp", *content)


def _curves(report: DryRun, runs: Sequence[DryRun]) -> list[Html]:
    limit = report.hardware.memory
    peaks = []
    for class_, word, wanted in (("first", "without", False), ("second", "with", True)):
        found = ((r.compiled.tp, m.peak_per_rank) for r in runs for c, m in _both(r) if c == wanted)
        if points := tuple((float(tp), float(peak)) for tp, peak in found):
            peaks.append(charts.Line(class_, f"{word} activation checkpointing", points))
    lead = tag(
        "p",
        f"{report.size.capitalize()}, {mode(report)}, on {report.hardware.name} "
        f"with {report.hardware.node} GPUs in a node. Time and memory have logarithmic scales, on "
        "which halving with each doubling of tp is a straight line.",
    )
    bound = ("a GPU's memory", limit)
    steps = tuple((float(r.compiled.tp), r.time.total.seconds) for r in runs)
    times = charts.Line("first", "time of a step", steps)
    fastest = min(seconds for _, seconds in steps)
    unit = next((u for u in (1.0, 1e-3) if fastest >= u), 1e-6)
    made = [
        _figure(report, "Step time", "modelled", [times], duration, duration, unit),
        _figure(report, "Peak memory", "tracked", peaks, size, _round_size, 1.0, bound),
        _figure(report, "Communication", "modelled", _shares(runs), _percent, _percent, None),
    ]
    return [lead, tag("div", *made, class_="charts"), _scaling_table(runs, limit)]


def _shares(runs: Sequence[DryRun]) -> list[charts.Line]:
    every, exposed = [], []
    for run in runs:
        total = run.time.total
        whole = total.seconds or 1.0
        tp = float(run.compiled.tp)
        every.append((tp, total.exposed / whole))
        exposed.append((tp, (total.exposed - total.overlappable) / whole))
    return [
        charts.Line("first", "share of the step's time that is waited", tuple(every)),
        charts.Line("second", "of that, what could not run beside matmuls", tuple(exposed)),
    ]


def _percent(part: float) -> str:
    return f"{100 * part:.3g} %"


def _figure(
    report: DryRun,
    title: str,
    certainty: Certainty,
    lines: Sequence[charts.Line],
    shown: Callable[[float], str],
    axis: Callable[[float], str],
    base: float | None,
    limit: tuple[str, float] | None = None,
) -> Html:
    texts = (f"scaling-{title.lower().replace(' ', '-')}", f"{title} over tp")
    marked = float(report.compiled.tp)
    chart = charts.line_chart(*texts, lines, shown, axis, base, marked, limit)
    meanings = {line.class_: line.name for line in lines}
    key = charts.legend(meanings | ({"limit": limit[0]} if limit else {}))
    return tag("div", tag("h3", title, " ", badge(certainty)), chart, key, class_="chart")


def _scaling_table(runs: Sequence[DryRun], limit: float) -> Html:
    def peak(run: DryRun, checkpointing: bool) -> str:
        held = dict(_both(run)).get(checkpointing)
        return "not run" if held is None else size(held.peak_per_rank)

    def fits(run: DryRun) -> str:
        found = [held.peak_per_rank <= limit for _, held in _both(run)]
        return "yes" if all(found) else "with checkpointing" if any(found) else "no"

    def part(run: DryRun) -> str:
        return share(run.time.total.exposed, run.time.total.seconds)

    columns = (
        Column("tp", lambda r: r.compiled.tp),
        modelled("step time", lambda r: duration(r.time.total.seconds)),
        modelled("communication", lambda r: duration(r.time.total.communication)),
        modelled("waited for", part),
        exact("sent per rank", lambda r: size(sum(c.bytes for c in r.collectives))),
        exact("parameters of a rank", lambda r: size(r.memory.parameters_per_rank)),
        tracked("peak memory", lambda r: peak(r, False)),
        tracked("with checkpointing", lambda r: peak(r, True)),
        Column("fits", fits, certainty="tracked"),
    )
    return details("Scaling as a table", table("Scaling over tp", columns, runs, stacked=True))
