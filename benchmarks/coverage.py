"""Which models of the zoo tpplan shards right, and what that costs.

Every causal-LM type of transformers, the variants, and a few encoders and encoder-decoders: tiny
models with random weights, whole against sharded on simulated ranks, outputs and every gradient.
The plan is the shipped one, else the one that transformers carries.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import tpplan
from benchmarks import zoo
from benchmarks.common import markdown

RESULTS = Path(__file__).parent / "results" / "coverage.md"
SHARE = 0.6
"""At tp 2, a model is called sharded where no rank holds more of its parameters than this."""
MODES = {"TP": False, "TP+SP": True}
HEADS = (
    *("model", "plan", "TP: error", "forward", "backward", "on a rank"),
    *("TP+SP: error", "forward", "backward", "transformers"),
)
WITHOUT = {
    "dbrx": "its experts lie one below the other in matrices (experts x rows, width), held by a "
    "module inside of the one that multiplies by them; `experts` takes (experts, rows, columns)",
    "gemma4_assistant": "its default config cannot be built: a draft model of a few layers, "
    "which attends to the keys and values of the model that it drafts for",
    "gemma4_unified_assistant": "as gemma4_assistant",
    "reformer": "runs its layers again in a backward of its own, which takes training mode, and "
    "attends in buckets of the sequence by a hash",
}
"""The types that no plan is for, and why."""
_LONGEST_REASON = 110


@dataclass(frozen=True)
class Outcome:
    """What became of a model in one mode; ``reason`` says why it failed."""

    reason: str = ""
    gradient_error: float = 0.0
    forward: str = ""
    backward: str = ""
    share: float = 1.0
    rounding: float = 0.0

    @property
    def cells(self) -> tuple[str, str, str]:
        """Error or reason, and the collectives measured of the least possible."""
        error = self.reason if self.reason else f"{self.gradient_error:.0e}"
        if self.rounding:
            error = f"{self.rounding:.0e}, rounding ({error} in float64)"
        return error, self.forward, self.backward


@dataclass(frozen=True)
class Row:
    """What became of a model; ``in_transformers``: whose plan transformers has for it."""

    name: str
    plan: str = ""
    in_transformers: str = ""
    modes: Mapping[str, Outcome] = field(default_factory=dict)

    def passes(self, mode: str) -> bool:
        """Whether a mode computes what the whole model does."""
        return not self.modes[mode].reason

    @property
    def sharded(self) -> bool:
        """Whether plain TP is right and leaves no rank with most of the parameters."""
        return self.passes("TP") and self.modes["TP"].share <= SHARE

    @property
    def cells(self) -> tuple[str, ...]:
        """As in ``HEADS``."""
        tp, sp = self.modes["TP"], self.modes["TP+SP"]
        share = "" if tp.reason else f"{tp.share:.0%}"
        if tp.reason and tp.reason == sp.reason:
            sp = Outcome("the same")
        return (self.name, self.plan, *tp.cells, share, *sp.cells, self.in_transformers or "none")


def failed(name: str, reason: str, plan: str = "", support: str = "") -> Row:
    """A model that got nowhere."""
    return Row(name, plan, support, dict.fromkeys(MODES, Outcome(reason)))


def reason_of(error: BaseException) -> str:
    """The first line of an error, short enough for a table."""
    known = isinstance(error, tpplan.PlanError | tpplan.VerificationError)
    while not known and error.__cause__ is not None:
        error = error.__cause__
    line = next(iter(str(error).strip().splitlines()), "").strip()
    line = line.split("error: ", 1)[-1] if known else line  # without its position in the plan
    text = (line if known else f"{type(error).__name__}: {line}").replace("|", "/")
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 1] + "…"


def plan_for(model: nn.Module) -> tpplan.Plan:
    """The shipped plan, else the one that transformers carries."""
    try:
        return tpplan.load_plan("auto", model)
    except tpplan.PlanError:
        return tpplan.from_hf(model)


def support_of(name: str, model: nn.Module) -> str:
    """Whose plan transformers has: the type's own, a part's, only the head's, or none."""
    model_type = zoo.VARIANTS[name][0] if name in zoo.VARIANTS else name
    if model_type in zoo.CAUSAL:
        return zoo.hf_support(model_type)
    return "own" if zoo.hf_plan(model) else ""


def examine(name: str, make: zoo.Maker, tp: int) -> Row:
    """Shard one model in both modes."""
    try:
        model = make()
    except Exception as error:  # whatever a model may raise belongs into the table
        return failed(name, f"not built: {reason_of(error)}")
    support = support_of(name, model)
    try:
        plan = plan_for(model)
    except Exception as error:
        reason = reason_of(error).replace(type(model).__name__, "the model")
        return failed(name, reason, "none", support)
    attempt = partial(_attempt, make, plan, tp, zoo.example(model))
    label = "transformers" if plan.path is None else plan.name
    return Row(name, label, support, {mode: attempt(sp) for mode, sp in MODES.items()})


def _attempt(
    make: zoo.Maker, plan: tpplan.Plan, tp: int, inputs: dict[str, Any], sequence_parallel: bool
) -> Outcome:
    try:
        found = tpplan.verify(make, plan, tp=tp, sequence_parallel=sequence_parallel, inputs=inputs)
    except Exception as error:
        return Outcome(reason_of(error))
    forward, backward = (
        f"{sum(found.counts.get(phase, {}).values())}/{sum(found.floor.get(phase, {}).values())}"
        for phase in ("forward", "backward")
    )
    rounding = max(check.rounding for check in found.checks)
    return Outcome("", found.gradient_error, forward, backward, found.rank_share, rounding)


@dataclass(frozen=True)
class _Running:
    name: str
    process: ForkProcess
    deadline: float


def examine_all(
    makers: Mapping[str, zoo.Maker], tp: int, jobs: int, timeout: float
) -> Iterator[Row]:
    """A row for each model as it gets ready; each has a process, which may hang or die."""
    waiting = list(makers.items())[::-1]
    running: dict[Connection, _Running] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            reader, started = _start(*waiting.pop(), tp, timeout)
            running[reader] = started
        soonest = min(one.deadline for one in running.values())
        ready = {*wait(list(running), max(0.0, soonest - time.monotonic()))}
        late = {r for r, one in running.items() if time.monotonic() >= one.deadline}
        for reader in [r for r in running if r in ready | late]:
            one = running.pop(reader)
            yield _result(reader, one, timeout) if reader in ready else _stopped(one, timeout)
            one.process.kill()
            one.process.join()
            reader.close()


def _start(name: str, make: zoo.Maker, tp: int, timeout: float) -> tuple[Connection, _Running]:
    context = multiprocessing.get_context("fork")  # torch and transformers are loaded once
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(writer, name, make, tp), daemon=True)
    process.start()
    writer.close()
    return reader, _Running(name, process, time.monotonic() + timeout)


def _child(writer: Connection, name: str, make: zoo.Maker, tp: int) -> None:
    torch.set_num_threads(1)
    writer.send(examine(name, make, tp))


def _result(reader: Connection, one: _Running, timeout: float) -> Row:
    try:
        row: Row = reader.recv()
    except EOFError:
        one.process.join(timeout)
        return failed(one.name, f"the process ended with code {one.process.exitcode}")
    return row


def _stopped(one: _Running, timeout: float) -> Row:
    return failed(one.name, f"not ready after {timeout:.0f} s")


def totals(rows: Sequence[Row]) -> list[str]:
    """What the rows amount to."""
    sharded = [row for row in rows if row.sharded]
    alone = [row for row in sharded if row.in_transformers not in ("own", "part")]
    return [
        f"{len(rows)} models",
        f"TP right: {sum(row.passes('TP') for row in rows)}, of them with at most {SHARE:.0%} of "
        f"the parameters on a rank: {len(sharded)}",
        f"of those, without a working plan in transformers: {len(alone)}",
        f"TP+SP right: {sum(row.passes('TP+SP') for row in rows)}",
    ]


def reasons(rows: Sequence[Row]) -> list[str]:
    """Why plain TP fails, the most frequent first."""
    found = Counter(row.modes["TP"].reason for row in rows if not row.passes("TP"))
    return [f"{count} × {reason}" for reason, count in found.most_common()]


def document(sections: Mapping[str, Sequence[Row]], tp: int, command: str) -> str:
    """The whole page."""
    parts = [
        "# Coverage",
        f"`{command}`, torch {torch.__version__}, transformers {transformers.__version__}.",
        f"Tiny models with random weights, whole against sharded at tp {tp}, in float32. An error "
        "is the worst of all gradients (`benchmarks/common.py` has the metric), or the first line "
        "of why there is none. Forward and backward: collectives measured / the least possible. "
        "On a rank: the largest share of the parameters' bytes. transformers: whose tensor-"
        "parallel plan it has for the type (its own, that of a part, only the head's).",
    ]
    for title, rows in sections.items():
        lines = [f"- {line}" for line in totals(rows)]
        parts += [f"## {title}", "\n".join(lines), markdown(HEADS, (row.cells for row in rows))]
        why = [f"- {r.name}: {WITHOUT[r.name]}" for r in rows if r.name in WITHOUT]
        parts += ["No plan is for these:", "\n".join(why)] if why else []
    return "\n\n".join(parts) + "\n"


def section_of(name: str) -> str:
    """Under which title a model stands."""
    return "Causal language models" if name in zoo.CAUSAL else "Variants, encoders, two stacks"


def main() -> int:
    """Examine, print, write; status 1 where a model that was asked for by name fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--types", default="", help="only these, separated by commas")
    parser.add_argument("--tp", type=int, default=2, metavar="N")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes at a time")
    parser.add_argument("--timeout", type=float, default=120, metavar="S", help="for each model")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)

    makers = zoo.makers([name for name in options.types.split(",") if name])
    order = {name: i for i, name in enumerate(makers)}
    rows = []
    for row in examine_all(makers, options.tp, options.jobs, options.timeout):
        rows.append(row)
        print(" | ".join(cell for cell in row.cells if cell), flush=True)
    rows.sort(key=lambda row: order[row.name])
    sections: dict[str, list[Row]] = {}
    for row in rows:
        sections.setdefault(section_of(row.name), []).append(row)
    for title, part in sections.items():
        print("\n".join(["", title, *totals(part), "plain TP fails:", *reasons(part)]))
    if options.write:
        command = " ".join(["python -m benchmarks.coverage", *sys.argv[1:]])
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(document(sections, options.tp, command))
    return 1 if options.types and not all(row.passes("TP") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
