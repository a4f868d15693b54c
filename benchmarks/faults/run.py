"""Plants each fault in fresh ranks and looks at the fixed models."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from torch.distributed.device_mesh import DeviceMesh

import tpplan
from benchmarks.faults.planted import FAULTS, Fault
from benchmarks.faults.trials import TRIALS, Trial, planned
from benchmarks.random_models.judge import (
    EXAMPLE,
    RIGHT,
    Verdict,
    built,
    inputs,
    judge,
    plan_of,
    refusal,
)
from benchmarks.random_models.model import Case
from benchmarks.random_models.pool import Pool

CHECKS = ("compile", "run", "verify")
PATIENCE = 20.0
"""Seconds until ranks with a fault in them hang."""


@dataclass
class Found:
    """By which checks a fault was caught, and in which trial."""

    fault: Fault
    by: dict[str, str] = field(default_factory=dict)
    trouble: str = ""

    @property
    def line(self) -> str:
        """A row of the table."""
        marks = "".join(f"{self.by.get(check, '-')[:18]:<28}" for check in CHECKS)
        caught = "caught" if self.by else "MISSED"
        return f"{self.fault.room:<9}{self.fault.name:<48}{caught:<8}{marks}{self.trouble}"


def plant(mesh: DeviceMesh, name: str) -> None:
    """Plant a fault in this rank."""
    next(fault for fault in FAULTS if fault.name == name).plant()


def verified(mesh: DeviceMesh, case: Case, tp: int, sequence_parallel: bool) -> Verdict:
    """What ``tpplan.verify`` says."""
    model, space = built(case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tpplan.verify(
                model,
                plan_of(case),
                tp,
                sequence_parallel=sequence_parallel,
                inputs=inputs(case, space, EXAMPLE[0], 7, False),
            )
        except tpplan.PlanError as error:
            return Verdict("refused", str(error).splitlines()[0])
        except tpplan.VerificationError as error:
            return Verdict("wrong", str(error).splitlines()[0])
    return Verdict(RIGHT)


def looked_at(pool: Pool, trial: Trial) -> Iterator[tuple[str, Verdict]]:
    """What each check says of a trial, one after the other."""
    told = planned if trial.guard == "planner" else refusal
    (said,) = pool.answers(1, (told, trial.tp, trial.case, trial.tp, trial.sequence_parallel))
    yield "compile", said or Verdict(RIGHT)
    if trial.expected != RIGHT:
        return
    yield "run", pool.agreed(trial.tp, (trial.check, trial.tp, trial.case, trial.sequence_parallel))
    if trial.check is judge:
        job = (verified, trial.tp, trial.case, trial.tp, trial.sequence_parallel)
        yield "verify", pool.agreed(1, job)


def try_out(fault: Fault) -> Found:
    """Plant a fault in fresh ranks and look at the trials until one of the checks has caught it."""
    found = Found(fault)
    try:
        fault.place()
    except (AttributeError, ImportError) as error:
        found.trouble = f"tpplan has no {fault.where}: {error}"
        return found
    pool = Pool((plant, 2, fault.name), PATIENCE)
    for name in sorted(TRIALS, key=lambda name: name != fault.trial):
        trial = TRIALS[name]
        for check, verdict in looked_at(pool, trial):
            if verdict.kind == "harness":
                found.trouble = verdict.reason
            elif verdict.kind != (trial.expected if check == "compile" else RIGHT):
                found.by[check] = f"{name}: {verdict.kind}"
        if found.by:
            break
    pool.close()
    return found


def sound() -> bool:
    """Whether all trials are as expected without a fault."""
    pool = Pool()
    fine = True
    for name, trial in TRIALS.items():
        for check, verdict in looked_at(pool, trial):
            expected = trial.expected if check == "compile" else RIGHT
            if verdict.kind != expected:
                print(f"without a fault, {name}: {check}: {verdict.kind}: {verdict.reason}")
                print(verdict.detail)
                fine = False
    pool.close()
    return fine


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="faults with this in their name")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    chosen = [fault for fault in FAULTS if options.only in fault.name]
    if not sound():
        return 1
    print(f"{'':65}" + "".join(f"{check:<28}" for check in CHECKS))
    with ThreadPoolExecutor(options.jobs) as executor:
        found = []
        for one in executor.map(try_out, chosen):
            print(one.line, flush=True)
            found.append(one)
    missed = [one for one in found if not one.by]
    print(f"{len(found) - len(missed)} of {len(found)} faults caught")
    return 1 if missed else 0
