"""A report as text for a terminal: identical layers folded into one line."""

from __future__ import annotations

from collections import Counter

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tpplan.compiled import ParameterPlan
from tpplan.cost.run import DryRun
from tpplan.cost.timing import flops_by_module
from tpplan.planner.match import folded
from tpplan.render.console import columned
from tpplan.render.units import (
    ROUTED,
    duration,
    expected,
    number,
    ranks,
    routed_size,
    size,
)
from tpplan.simulate.steps import PHASES, Collective


def layout(report: DryRun) -> Group:
    """The report for a rich console, which colours it on a terminal."""
    parts: list[RenderableType] = [_title(report), "", _placements(report)]
    if report.collectives:
        parts += ["", _counts(report), "", _sites(report)]
    else:
        parts += ["", "No collectives: one rank."]
    if any(plan.kernel is not None for plan in report.compiled.modules.values()):
        parts += ["", _kernels(report)]
    parts += ["", _memory(report), "", _flops(report), "", _time(report), "", _notes(report)]
    return Group(*parts)


def _title(report: DryRun) -> Text:
    mode = "TP+SP" if report.compiled.sequence_parallel else "TP"
    return Text(
        f"{report.model} · plan {report.compiled.plan.name} · {mode}, {ranks(report.compiled)} · "
        f"{report.size}",
        style="bold",
    )


def _placements(report: DryRun) -> Table:
    table = columned("Parameters", "parameter", "×", "shape", "placement", "per rank", "rule")
    groups = Counter(map(_row, report.compiled.parameters.values()))
    for (name, shape, placement, local, rule), count in groups.items():
        table.add_row(name, str(count), shape, placement, local, rule)
    return table


def _row(entry: ParameterPlan) -> tuple[str, ...]:
    tied = "".join(f" = {folded(alias)}" for alias in entry.aliases)
    return (
        folded(entry.name) + tied,
        "×".join(map(str, entry.shape)),
        entry.placed + (", summed" if entry.summed else ""),
        "×".join(map(str, entry.local_shape)),
        "none: small" if entry.rule is None else entry.rule.style,
    )


def _counts(report: DryRun) -> Table:
    kinds = list(dict.fromkeys(k for p in PHASES for k in report.counts(p)))
    columns = [kind.replace("_", "-") for kind in kinds]
    table = columned("Collectives", "phase", *columns, "sent per rank")
    for phase in PHASES:
        found = report.counts(phase)
        if phase == "optimizer" and not any(found.values()):
            continue
        cells = [str(found.get(kind, 0)) for kind in kinds]
        sent, worst = report.bytes_sent(phase), report.worst_bytes_sent(phase)
        table.add_row(phase.replace("_", " "), *cells, expected(sent, worst))
    return table


def _sites(report: DryRun) -> Table:
    columns = ("phase", "module", "×", "collective", "shape", "each", "for")
    table = columned("Where they come from", *columns)
    groups = Counter(map(site, report.collectives))
    for (phase, module, kind, shape, each, reason), count in groups.items():
        table.add_row(phase, _broken(module), str(count), kind, shape, each, reason)
    return table


def _broken(path: str, width: int = 36) -> str:
    """A path on lines of at most ``width``, broken after dots where that is possible."""
    if len(path) <= width:
        return path
    at = path.rfind(".", 0, width) + 1 or width
    return f"{path[:at]}\n  {_broken(path[at:], width - 2)}"


def site(c: Collective) -> tuple[str, ...]:
    """Phase, module, kind, shape, what is sent, and what for; identical layers alike."""
    shape = f"{'×'.join(map(str, c.shape))} {c.dtype}"
    module = folded(c.module) or "(model)"
    phase, kind = c.phase.replace("_", " "), c.kind.replace("_", "-")
    return phase, module, kind, shape, routed_size(c), folded(c.reason)


def _kernels(report: DryRun) -> Table:
    """What fused kernels stand for, and what they do not."""
    table = columned("Fused kernels", "module", "×", "computes", "how")
    kernels = ((path, plan.kernel) for path, plan in report.compiled.modules.items())
    groups = Counter((folded(path), k.kind, k.reason) for path, k in kernels if k is not None)
    for (path, kind, reason), count in groups.items():
        table.add_row(_broken(path, 60), str(count), kind, reason)
    return table


def _memory(report: DryRun) -> Table:
    """Bytes of the first rank: as it was run, and with layers recomputed or not."""
    runs = [(report.training.checkpointing, report.memory)]
    if report.other_memory is not None:
        runs.append((not report.training.checkpointing, report.other_memory))
    names = ["layers recomputed" if again else "layers kept" for again, _ in runs]
    table = columned("Memory per rank", "", *names)
    for part in ("parameters", "buffers", "gradients", "optimizer", "states"):
        name = "all of these" if part == "states" else part
        table.add_row(name, *(size(getattr(memory, f"{part}_per_rank")) for _, memory in runs))
    for phase in report.memory.peaks:
        peaks = [memory.peaks[phase] for _, memory in runs]
        table.add_row(f"peak of {phase}", *(size(peak.bytes) for peak in peaks))
        table.add_row("  activations, temporaries", *(size(peak.activations) for peak in peaks))
        if any(peak.module for peak in peaks):
            table.add_row("  reached in", *(folded(peak.module) for peak in peaks))
    return table


def _flops(report: DryRun) -> Table:
    """What each module computes in a step, identical layers together."""
    groups: dict[str, list[int]] = {}
    for path, flops in flops_by_module(report.steps).items():
        groups.setdefault(folded(path) or "(model)", []).append(flops)
    title = "Matrix multiplications and attention, of a rank in a step"
    table = columned(title, "module", "×", "each", "share")
    total = sum(map(sum, groups.values()))
    for name, found in groups.items():
        each = f"{max(found) / 1e9:,.1f} GFLOP"
        table.add_row(name, str(len(found)), each, f"{100 * sum(found) / total:.1f} %")
    return table


def _time(report: DryRun) -> Table:
    """Modelled seconds by phase, and of the typical layer."""
    time = report.time
    columns = ("", "all", "compute", "sent", "hidden", "could overlap", "sent ÷ compute")
    table = columned(f"Time, modelled on {time.hardware}", *columns)
    rows = {phase.replace("_", " "): share for phase, share in time.phases.items()}
    for stack, layer in time.layers.items():
        for phase, share in layer.phases.items():
            rows[f"{phase} of a layer of {stack} (×{layer.count})"] = share
    rows["step"] = time.total
    for name, share in rows.items():
        times = (share.seconds, share.compute, share.communication, share.hidden)
        own = map(duration, (*times, share.overlappable))
        table.add_row(name, *own, f"{share.ratio:.2f}")
    return table


def _notes(report: DryRun) -> Text:
    total, mine = report.parameter_counts["total"], report.parameter_counts["per_rank"]
    memory, time = report.memory, report.time
    training = "forward, backward"
    if "optimizer" in memory.peaks:
        training += " and optimizer step"
    lines = [
        f"Parameters: {number(total)} in all ({size(memory.parameters_total)}), "
        f"{number(mine)} per rank ({size(memory.parameters_per_rank)}, "
        f"{100 * mine / max(total, 1):.1f} %)",
        f"{training}: {time.flops / 1e12:.1f} TFLOP per rank, {100 * time.utilisation:.0f} % of "
        "the peak.",
        "Exact: collectives, their bytes (of ring algorithms, sent by the first rank), parameters, "
        "gradients, optimizer state. Tracked by executing the step abstractly: peaks, with what "
        "of them are activations and temporaries. Modelled: times.",
        "'summed': each rank sees a part of the work, so the gradients are summed over the ranks, "
        "all in one all-reduce.",
    ]
    if report.compiled.ep > 1:
        lines.insert(-1, ROUTED)
    for stack, (run, there) in report.executed.items():
        lines.append(f"Of the {there} elements of {stack}, {run} and {run + 1} were executed.")
    return Text("\n".join(lines))
