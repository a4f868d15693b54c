"""Advice as text for a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tpplan.cost.advise import USABLE, Choice, Size, Survey
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
    parts: list[RenderableType] = [title, "", _table(advice), "", _verdict(advice), ""]
    notes = Text(
        "Times are modelled: a roofline at the speeds that are reached, without kernel launches. "
        "Memory of tensor parallelism is tracked by executing it; of data (FSDP) and pipeline "
        f"parallelism (1F1B) it is modelled. 'fits': within {100 * USABLE:.0f} % of the memory."
    )
    return Group(*parts, notes)


def _table(advice: Survey) -> Table:
    table = titled("The best choice for each size of the tensor-parallel group")
    columns = ("tp", "mode", "pp", "dp", "layers", "per GPU", "fits", "step", "sent", "idle")
    for name in (*columns, "tokens/s/GPU"):
        table.add_column(name, justify="left" if name in ("mode", "layers", "fits") else "right")
    table.add_column("", overflow="fold")
    for found in advice.sizes:
        mark = "◀" if found.best is not None and found.best == advice.best else ""
        table.add_row(*_cells(found), mark)
    return table


def _cells(found: Size) -> tuple[str, ...]:
    best = found.best
    if best is None:
        return (str(found.tp), *[""] * 10)
    return (
        str(best.tp),
        "TP+SP" if best.sequence_parallel else "TP" if best.tp > 1 else "whole",
        str(best.pp),
        str(best.dp),
        "recomputed" if best.checkpointing else "kept",
        size(best.bytes),
        "yes" if best.fits else "no",
        duration(best.seconds),
        f"{100 * best.communication / best.seconds:.0f} %",
        f"{100 * best.idle / best.seconds:.0f} %",
        f"{best.tokens:,.0f}",
    )


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
    return f"tp {choice.tp}{mode}, pp {choice.pp}, dp {choice.dp}{again}"
