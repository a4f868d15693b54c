"""Runs to compare a run with: other tps, and plain tensor parallelism beside sequence parallel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from tpplan.cost.dry_run import Setting, dry_run
from tpplan.cost.run import DryRun
from tpplan.language import FrozenMap, PlanError
from tpplan.observe.caches import only_new_searched

TPS = (1, 2, 4, 8, 16, 32, 64)


@only_new_searched()
def with_companions(
    model: nn.Module, setting: Setting, report: DryRun, tps: Sequence[int] = TPS
) -> DryRun:
    """``report`` with companions: the same step at other tps, and in plain TP at its own.

    A tp that the plan cannot be compiled for is left out, and its reason kept.

    Args:
        model, setting: what ``report`` was made from.
        tps: those to run; 1 and the report's own are needed for its memory bars.
    """
    found: list[DryRun] = []
    refused: dict[str, str] = {}

    def run(name: str, changed: Setting) -> None:
        how = (report.batch, report.seq or 1, report.training)
        # of other tps the page has curves alone, of memory as it was asked for
        both = changed.tp in (1, report.compiled.tp)
        try:
            made = dry_run(model, changed, *how, hardware=report.hardware, both=both)
        except PlanError as error:
            refused[name] = error.diagnostics[0].message
        else:
            found.append(made)

    for tp in tps:
        if tp != report.compiled.tp:
            run(f"tp {tp}", replace(setting, tp=tp))
    if report.compiled.sequence_parallel and report.compiled.tp > 1:
        run("plain TP", replace(setting, sequence_parallel=False))
    return replace(report, companions=tuple(found), refused=FrozenMap(refused))
