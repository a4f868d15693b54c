"""Advice as text for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rich.console import Group
from rich.table import Table
from rich.text import Text

from tpplan.cost.advise import USABLE, Choice, Size, Survey
from tpplan.language.styles import GATHERED, SHARD
from tpplan.render.console import titled
from tpplan.render.units import duration, size


def layout(advice: Survey) -> Group:
    """The advice for a rich console."""
    task, hardware = advice.task, advice.hardware
    title = Text(
        f"{advice.model} · plan {advice.plan} · {task.gpus} × {hardware.name} "
        f"({size(hardware.memory)}, nodes of {hardware.node}) · {task.batch} sequences of "
        f"{task.seq} tokens a step, {task.micro_batch} at a time",
        style="bold",
    )
    notes = Text(
        "Times are modelled: a roofline at the speeds that are reached, without kernel launches. "
        "Memory of tensor parallelism is tracked by executing it; of data (FSDP) and pipeline "
        f"parallelism (1F1B) it is modelled. 'fits': within {100 * USABLE:.0f} % of the memory."
    )
    return Group(title, "", _table(advice), "", _verdict(advice), "", notes)


def _table(advice: Survey) -> Table:
    table = titled("The best choice for each size of the tensor-parallel group")
    columns = dict(_COLUMNS)
    if not any(choice.shard or choice.ep > 1 for choice in advice.choices):
        del columns["ep"], columns["shard"]
    for name in columns:
        table.add_column(name, justify="left" if name in _WORDS else "right")
    table.add_column("", overflow="fold")
    for found in advice.sizes:
        best = found.best
        if best is None:
            table.add_row(str(found.tp))
        else:
            cells = (cell(best) for cell in columns.values())
            table.add_row(*cells, "◀" if best == advice.best else "")
    return table


_KEPT = {GATHERED: "kept", SHARD: "rows kept"}
_WORDS = ("mode", "shard", "layers", "fits")
_COLUMNS: Mapping[str, Callable[[Choice], str]] = {
    "tp": lambda c: str(c.tp),
    "mode": lambda c: "TP+SP" if c.sequence_parallel else "TP" if c.tp > 1 else "whole",
    "pp": lambda c: str(c.pp),
    "dp": lambda c: str(c.dp),
    "ep": lambda c: str(c.ep),
    "shard": lambda c: c.shard,
    "layers": lambda c: "recomputed" if c.checkpointing else _KEPT[c.save],
    "per GPU": lambda c: size(c.bytes),
    "fits": lambda c: "yes" if c.fits else "no",
    "step": lambda c: duration(c.seconds),
    "sent": lambda c: f"{100 * c.communication / c.seconds:.0f} %",
    "idle": lambda c: f"{100 * c.idle / c.seconds:.0f} %",
    "tokens/s/GPU": lambda c: f"{c.tokens:,.0f}",
}


def _verdict(advice: Survey) -> Text:
    best, text = advice.best, Text()
    if best is None:
        least = min(advice.choices, key=lambda c: c.bytes, default=None)
        text.append("Nothing fits. ", style="bold")
        if least is not None:
            text.append(f"The least that a GPU needs is {size(least.bytes)}, with {_named(least)}.")
    else:
        text.append(f"Choose {_named(best)}", style="bold")
        text.append(f": {duration(best.seconds)} a step, {size(best.bytes)} per GPU.")
    for found in advice.sizes:
        for line in _reasons(found, best):
            text.append(f"\n  tp {found.tp}: {line}")
    return text


def _reasons(found: Size, best: Choice | None) -> list[str]:
    lines = list(found.notes)
    own = found.best
    if own is not None and not own.fits:
        lines.insert(0, f"does not fit: at least {size(own.bytes)} per GPU")
    elif own is not None and best is not None and own != best:
        slower = 100 * (own.seconds / best.seconds - 1)
        lines.insert(0, f"{slower:.0f} % slower" if slower >= 0.5 else "as fast, with more ranks")
    return lines


def _named(choice: Choice) -> str:
    mode = " with sequence parallelism" if choice.sequence_parallel else ""
    again = ", layers recomputed" if choice.checkpointing else ""
    again += ", save: shard" if choice.save == SHARD else ""
    ep = f", ep {choice.ep}" if choice.ep > 1 else ""
    shared = f", shard: {choice.shard}" if choice.shard else ""
    return f"tp {choice.tp}{mode}{shared}, pp {choice.pp}, dp {choice.dp}{ep}{again}"
