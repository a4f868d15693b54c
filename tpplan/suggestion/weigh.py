"""What plans cost that were all proved: the dry run's time and memory of one training step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from tpplan import cost
from tpplan.cost.advise import USABLE
from tpplan.cost.hardware import Hardware
from tpplan.language import Plan, PlanError
from tpplan.planner.known import Known
from tpplan.simulate.execute import Training
from tpplan.simulate.optimizers import optimizer_named

_ALIKE = 0.01
"""What differs by less is as good: of the fastest the first with the least memory is taken."""


@dataclass(frozen=True)
class Task:
    """What is trained on what: samples of a step and their length, if any; ranks, hardware."""

    tp: int
    batch: int
    seq: int | None
    hardware: Hardware
    inputs: Any = None


@dataclass(frozen=True)
class Candidate:
    """A plan that holds, and what it costs.

    Attributes:
        name: what is particular about it; sequence_parallel: the mode that is weighed.
        seconds: of a step; bytes: the most that a rank holds; None where it cannot be executed.
        fits: whether that is within the usable memory of the hardware.
        why: what became of it: that it won, or what is against it.
    """

    name: str
    plan: Plan
    sequence_parallel: bool
    seconds: float | None = None
    bytes: int = 0
    fits: bool = True
    why: str = ""


def weighed(
    model: nn.Module,
    candidates: Sequence[Candidate],
    task: Task,
    told: Callable[[str], None],
    memory: Known,
) -> list[Candidate]:
    """The candidates with their costs, the one to take first.

    Args:
        memory: of plans for the model.
    """
    found = []
    for candidate in candidates:
        told(f"weighing {candidate.name}")
        found.append(_executed(model, candidate, task, memory))
    known = [c for c in found if c.seconds is not None]
    if not known:
        return found
    fitting = [c for c in known if c.fits] or sorted(known, key=lambda c: c.bytes)[:1]
    fastest = min(c.seconds or 0.0 for c in fitting)
    alike = [c for c in fitting if (c.seconds or 0.0) <= (1 + _ALIKE) * fastest]
    least = min(c.bytes for c in alike)
    best = next(c for c in alike if c.bytes <= (1 + _ALIKE) * least)
    others = [replace(c, why=_against(c, best)) for c in found if c is not best]
    won = "the least memory of the fastest" if len(alike) > 1 else "the fastest"
    if not best.fits:
        won = "the least memory; none fits"
    return [replace(best, why=won), *others]


def _against(candidate: Candidate, best: Candidate) -> str:
    if candidate.seconds is None or best.seconds is None:
        return candidate.why
    if not candidate.fits:
        return "does not fit"
    slower = candidate.seconds / best.seconds - 1
    more = candidate.bytes / max(best.bytes, 1) - 1
    return f"{100 * slower:+.1f} % time, {100 * more:+.1f} % memory"


def _executed(model: nn.Module, candidate: Candidate, task: Task, memory: Known) -> Candidate:
    how = (candidate.plan, task.tp, candidate.sequence_parallel, None, task.inputs)
    setting = cost.Setting(*how, known=memory.of_another_plan())
    training = Training(optimizer_named("adamw"), 1.0, True, False)
    try:
        run = cost.dry_run(
            model, setting, task.batch, task.seq or 0, training, hardware=task.hardware, both=False
        )
    except PlanError as error:
        return replace(candidate, why=error.diagnostics[0].message)
    except Exception as error:  # whatever the model's code says of such a length
        return replace(candidate, why=f"cannot be executed: {type(error).__name__}: {error}")
    seconds, held = run.time.total.seconds, run.memory.peak_per_rank
    fits = held <= USABLE * task.hardware.memory
    return replace(candidate, seconds=seconds, bytes=held, fits=fits)
