"""A report as one HTML page that needs nothing else: no network, and no script to be read."""

from __future__ import annotations

import base64
import functools
import hashlib
import platform
import shlex
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from string import Template

import torch

from tpplan.cost.memory import Memory
from tpplan.cost.run import DryRun
from tpplan.language import Plan
from tpplan.render.capacity import memory, mode, scaling
from tpplan.render.markup import (
    NOTES,
    Certainty,
    Column,
    Html,
    badge,
    join,
    numeric,
    section,
    share,
    table,
    tag,
)
from tpplan.render.sections import collectives, timeline
from tpplan.render.tree import render_tree
from tpplan.render.units import duration, expected, number, ranks, size
from tpplan.shipped import plan_directories
from tpplan.simulate.execute import Training
from tpplan.simulate.optimizers import OPTIMIZERS
from tpplan.simulate.steps import PHASES
from tpplan.version import __version__

_ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><path fill="#1f5fa8" '
    'd="M1 1h6v6H1zM9 9h6v6H9z"/><path fill="#d99a2b" d="M9 1h6v6H9zM1 9h6v6H1z"/></svg>'
)
_SECTIONS = {
    "modules": "Modules",
    "collectives": "Collectives",
    "timeline": "Timeline",
    "memory": "Memory",
    "scaling": "Scaling",
    "about": "About the numbers",
}


def render_html(
    report: DryRun, others: Sequence[DryRun] | None = None, command: str | None = None
) -> str:
    """The page.

    Args:
        others: runs of the same model to compare with; None for the report's companions.
        command: the command line that made the report, where it was one.
    """
    compared = report.companions if others is None else others
    style, script = _data("page.css"), _data("page.js")
    policy = (
        f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    main = [
        _key_figures(report),
        _modules(report),
        collectives(report),
        timeline(report),
        memory(report, compared),
        scaling(report, compared),
    ]
    icon = base64.b64encode(_ICON.encode()).decode()
    return Template(_data("page.html")).substitute(
        policy=policy,
        title=join([f"{report.model}, {mode(report)}, {ranks(report.compiled)} · tpplan"]),
        icon=f"data:image/svg+xml;base64,{icon}",
        style=style,
        header=_header(report),
        main=join(main, "\n"),
        footer=_footer(report, command),
        script=script,
    )


@functools.cache
def _data(name: str) -> str:
    return resources.files("tpplan.render").joinpath(name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


# --- header


def _header(report: DryRun) -> Html:
    hardware = report.hardware
    facts = (
        ("plan", report.compiled.plan.name),
        ("mode", mode(report)),
        ("tp", report.compiled.tp),
        *([("ep", report.compiled.ep)] if report.compiled.ep > 1 else []),
        ("batch", report.batch),
        *([("sequence", report.seq)] if report.seq else []),
        ("hardware", f"{hardware.name} ({hardware.description})"),
    )
    shown = (tag("li", f"{name} ", tag("b", value)) for name, value in facts)
    links = (tag("li", tag("a", title, href=f"#{name}")) for name, title in _SECTIONS.items())
    navigation = tag("nav", tag("ul", *links), aria_label="Sections")
    return join([tag("h1", report.model), tag("ul", *shown, class_="facts"), navigation], "\n")


def _key_figures(report: DryRun) -> Html:
    held, limit = report.memory, report.hardware.memory
    total, mine = report.parameter_counts["total"], report.parameter_counts["per_rank"]
    peak = held.peak_per_rank
    word, class_ = ("fits", "good") if peak <= limit else ("does not fit", "bad")
    fits = tag("span", word, class_=class_)
    sent = {phase: report.bytes_sent(phase) for phase in PHASES}
    worst = {phase: report.worst_bytes_sent(phase) for phase in PHASES}
    parts = [f"{p.replace('_', ' ')} {expected(n, worst[p])}" for p, n in sent.items() if n]
    by_phase = ", ".join(parts) or "nothing: there is one rank"
    cards = (
        _card(
            "Parameters",
            "exact",
            number(total),
            f"{size(held.parameters_total)} in all",
            f"{number(mine)} per rank: {size(held.parameters_per_rank)}, {share(mine, total)}",
        ),
        _card(
            "Peak memory per rank",
            "tracked",
            size(peak),
            join([share(peak, limit, f"a GPU's {size(limit)}"), ": ", fits]),
            *_peaks(report),
        ),
        _card("Sent per rank and step", "exact", size(sum(sent.values())), by_phase),
        _card("Step time", "modelled", duration(report.time.total.seconds), *_times(report)),
    )
    return section("figures", "Key figures", tag("div", *cards, _counts(report), class_="cards"))


def _peaks(report: DryRun) -> Iterator[str]:
    def peaks(held: Memory) -> str:
        return ", ".join(f"{phase} {size(peak.bytes)}" for phase, peak in held.peaks.items())

    yield peaks(report.memory)
    if report.other_memory is not None:
        word = "without" if report.training.checkpointing else "with"
        yield f"{word} activation checkpointing: {peaks(report.other_memory)}"


def _times(report: DryRun) -> Iterator[str]:
    time = report.time
    total = time.total
    phases = (f"{p.replace('_', ' ')} {duration(s.seconds)}" for p, s in time.phases.items())
    yield ", ".join(phases)
    if total.communication:
        part = share(total.exposed, total.seconds)
        yield (
            f"communication {duration(total.communication)}, of which {duration(total.hidden)} are "
            f"hidden and {duration(total.exposed)} waited for ({part}); "
            f"{duration(total.overlappable)} more could run beside matmuls"
        )
    yield f"{share(time.utilisation, 1)} of the peak FLOP/s"


def _card(title: str, certainty: Certainty, figure: str, *lines: object) -> Html:
    below = (tag("p", line) for line in lines)
    head = tag("h3", title, badge(certainty))
    return tag("div", head, tag("p", figure, class_="figure"), *below, class_="card")


def _counts(report: DryRun) -> Html:
    kinds = list(dict.fromkeys(kind for phase in PHASES for kind in report.counts(phase)))

    def column(kind: str) -> Column:
        return numeric(kind.replace("_", "-"), lambda phase: report.counts(phase).get(kind, 0))

    columns = [Column("phase", lambda phase: phase.replace("_", " ")), *map(column, kinds)]
    shown = table("Collectives of one step, by phase", columns, PHASES, class_="compact")
    return tag("div", tag("h3", "Collectives", badge("exact")), shown, class_="card wide")


def _modules(report: DryRun) -> Html:
    compiled = report.compiled
    plan = compiled.plan
    lead = tag(
        "p",
        "Modules with parameters and modules that are rewritten; equal elements of a list are one "
        "row, with their number, and sums count them all. Rules are patterns and lines of "
        f"{plan.name}. A gradient is summed over the ranks where each sees a part of the work. ",
        badge("exact"),
    )
    tools = tag(
        "div",
        tag("label", "Show only ", tag("input", id="tree-filter", type="search")),
        tag("button", "Open all", type="button", id="tree-open"),
        tag("button", "Close all", type="button", id="tree-close"),
        tag("span", id="tree-found", role="status"),
        class_="tools",
        id="tree-tools",
        hidden=True,
    )
    tree = tag("div", render_tree(compiled, report.model), id="tree")
    content = [lead, tools, tree]
    if compiled.unmatched:
        patterns = join((tag("code", p) for p in compiled.unmatched), ", ")
        content.append(tag("p", "Optional rules that matched nothing: ", patterns))
    return section("modules", "Modules and placements", *content)


# --- footer

_ABOUT: dict[Certainty, str] = {
    "exact": (
        "Placements, local shapes, counts of collectives and the bytes they send, and the bytes of "
        "parameters, gradients and optimizer state. The rewritten model was executed on fake "
        "tensors, with the code that runs on real ranks; bytes sent follow from the shapes and the "
        "ring algorithms. Of ranks that hold unequal parts, the first has the most and is shown."
    ),
    "tracked": (
        "Activations and temporaries: every allocation of that execution, from the op that made it "
        "until nothing refers to it. Measured runs were within 5 %. What an op uses inside and "
        "what an allocator rounds up or fragments is not in it."
    ),
    "modelled": (
        "Times. Each step takes as long as its FLOPs, its memory traffic or its link allow, "
        "whichever is slowest, at the rates of the hardware profile. Real runs differ."
    ),
}


def _footer(report: DryRun, command: str | None) -> Html:
    pairs = (
        join([tag("dt", badge(kind), id=f"about-{kind}"), tag("dd", _ABOUT[kind])])
        for kind in NOTES
    )
    content = [
        tag("h2", "About the numbers", id="about-title"),
        tag("dl", *pairs),
        tag("p", f"One training step: {_training(report.training)}."),
    ]
    if report.executed:
        stacks = ", ".join(
            f"{n} of {length} in {stack}" for stack, (n, length) in report.executed.items()
        )
        said = f"Of equal layers some were executed ({stacks}) and stand for the rest"
        content.append(tag("p", f"{said}; that they repeat was checked."))
    again = "The command that makes it again"
    if command is None:
        again += f", CONFIG being the configuration that this {report.model} was built from"
    content.append(tag("p", f"{again}:"))
    content.append(tag("pre", tag("code", command or _command(report))))
    python = platform.python_version()
    versions = f"tpplan {__version__}, torch {torch.__version__}, Python {python}"
    content.append(tag("p", versions, class_="quiet"))
    return join(content, "\n")


def _training(training: Training) -> str:
    def said(there: bool, what: str) -> str:
        return what if there else f"no {what}"

    make = training.optimizer
    parts = ["no optimizer"]
    if make is not None:
        named = make.func if isinstance(make, functools.partial) else make
        parts = [getattr(named, "__name__", type(named).__name__)]
        parts.append(said(training.master_weights, "float32 copies of 16-bit parameters"))
        if training.max_norm is not None:
            parts.append(f"gradients clipped to norm {training.max_norm:g}")
    return ", ".join([*parts, said(training.checkpointing, "activation checkpointing")])


def _command(report: DryRun) -> str:
    """As far as the report knows it: not from what the model was built."""
    compiled = report.compiled
    parts = ["tpplan", "dry-run", _named(compiled.plan), "--model", "CONFIG"]
    parts += ["--ep", str(compiled.ep)] if compiled.ep > 1 else []
    parts += ["--tp", str(compiled.tp), "--batch", str(report.batch)]
    parts += ["--seq", str(report.seq)] if report.seq else []
    if compiled.tp > 1 and compiled.sequence_parallel != compiled.plan.sequence_parallel:
        parts.append(f"--{'' if compiled.sequence_parallel else 'no-'}sequence-parallel")
    parts += _training_options(report.training)
    parts += ["--hardware", report.hardware.name, "--html", "report.html"]
    return shlex.join(parts)


def _training_options(training: Training) -> Iterator[str]:
    """Those that are not the command line's defaults; an optimizer of one's own has none."""
    named = {id(make): name for name, make in OPTIMIZERS.items()}
    optimizer = "none" if training.optimizer is None else named.get(id(training.optimizer))
    if optimizer not in (None, "adamw"):
        yield f"--optimizer={optimizer}"
    if training.max_norm != 1:
        yield f"--clip={training.max_norm or 0:g}"
    if not training.master_weights:
        yield "--no-master-weights"
    if training.checkpointing:
        yield "--checkpointing"


def _named(plan: Plan) -> str:
    """How the command line names a plan: shipped ones by name, others by path."""
    if plan.path is None:
        return plan.name
    return plan.name if Path(plan.path).parent in plan_directories() else plan.path
