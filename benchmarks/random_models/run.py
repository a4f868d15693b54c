"""The long run: many cases on pools of ranks, kept in a file; a table of what became of them."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random

import tpplan
from benchmarks.random_models import edits, recipe
from benchmarks.random_models.edits import Edit
from benchmarks.random_models.judge import REFUSED, RIGHT, Verdict, cause
from benchmarks.random_models.pool import PATIENCE, Pool
from benchmarks.random_models.recipe import Recipe

MODES = {False: "TP", True: "TP+SP"}
REFUSED_AT_MOST = 0.02


@dataclass(frozen=True)
class Job:
    """A case on so many ranks in one mode; ``key`` names it in a run of one seed."""

    key: str
    recipe: Recipe
    edit: Edit
    tp: int
    sequence_parallel: bool

    def apart(self, share: float) -> bool:
        """Whether it is among the share that is judged on processes too."""
        return Random(f"apart {self.key} {self.recipe}").random() < share

    @property
    def plain(self) -> bool:
        """Whether the plan is right for the model."""
        return not self.edit.kind and not self.recipe.habit

    @property
    def what(self) -> str:
        """What was edited."""
        return self.edit.kind or (f"habit: {self.recipe.habit}" if self.recipe.habit else "model")


@dataclass
class Outcome:
    """A job's verdict, as it is kept, and the code (``fingerprint``) that it is of."""

    key: str
    what: str
    mode: str
    tp: int
    verdict: Verdict
    seconds: float = 0.0
    code: str = ""

    @property
    def bad(self) -> bool:
        """Whether it must not be."""
        refused = self.verdict.kind == REFUSED and self.verdict.positioned
        return self.verdict.kind != RIGHT and not refused


Known = dict[str, Outcome]


def jobs_of(seed: int, models: int, edited: int) -> Iterator[Job]:
    """All jobs of a run: each model in both modes, then its edits in one."""
    for i in range(models):
        random = Random(f"{seed} {i}")
        r = recipe.drawn(random)
        tp = 4 if random.random() < 0.25 else 2
        for mode in (False, True):
            yield Job(f"{i}.{MODES[mode]}", r, Edit(), tp, mode)
        for j in range(edited * i // models, edited * (i + 1) // models):
            yield edit_of(seed, j, r)


def edit_of(seed: int, j: int, r: Recipe) -> Job:
    """An edit of a model."""
    random = Random(f"{seed} edit {j}")
    other, edit = edits.drawn(random, r)
    tp = 4 if random.random() < 0.25 else 2
    return Job(f"edit {j}", other, edit, tp, random.random() < 0.5)


def run(job: Job, pool: Pool, share: float = 1.0) -> Outcome:
    """Judge one job; what hangs a second time, on processes that have more time for it, hangs."""
    start = time.monotonic()
    how = job.edit.of(job.recipe), job.tp, job.sequence_parallel, job.apart(share)
    verdict = pool.verdict(*how)
    if verdict.kind == "hang":  # or other work took the processors
        with contextlib.closing(Pool(patience=10 * PATIENCE)) as patient:
            verdict = patient.verdict(*how)
    mode = MODES[job.sequence_parallel]
    return Outcome(job.key, job.what, mode, job.tp, verdict, time.monotonic() - start)


def shrink(job: Job, kind: str, why: str, pool: Pool) -> Job:
    """The plainest model of which the same becomes (Zeller and Hildebrandt's ddmin, 2002)."""

    def same(other: Job) -> bool:
        verdict = run(other, pool).verdict
        return verdict.kind == kind and (kind == "wrong" or cause(verdict) == why)

    if job.tp == 4 and same(smaller := replace(job, tp=2)):
        job = smaller
    size = len(recipe.odd(job.recipe))
    while size:
        names = recipe.odd(job.recipe)
        for at in range(0, len(names), size):
            simple = recipe.settled(recipe.plain(job.recipe, *names[at : at + size]))
            if simple != job.recipe and same(replace(job, recipe=simple)):
                job = replace(job, recipe=simple)
                size = min(size, len(recipe.odd(simple))) * 2
                break
        size //= 2
    return job


class Runner:
    """Judges jobs on several pools of ranks at once, and keeps what is found."""

    def __init__(
        self, jobs: Iterable[Job], pools: int, share: float, out: Path | None, known: Known
    ) -> None:
        self.jobs = iter(jobs)
        self.pools, self.share, self.out = pools, share, out
        self.outcomes: dict[str, Outcome] = {}
        self.by_key: dict[str, Job] = {}
        self._lock = threading.Lock()
        self._start = time.monotonic()
        self._known, self._code = known, fingerprint()

    def run(self) -> None:
        """Until all jobs are judged."""
        with ThreadPoolExecutor(self.pools) as executor:
            for done in [executor.submit(self._work) for _ in range(self.pools)]:
                done.result()

    def _work(self) -> None:
        pool = Pool()
        try:
            while (job := self._next()) is not None:
                self._keep(run(job, pool, self.share))
        finally:
            pool.close()

    def _next(self) -> Job | None:
        with self._lock:
            for job in self.jobs:
                self.by_key[job.key] = job
                known = self._known.get(job.key)
                if known is None:
                    return job
                self.outcomes[job.key] = known
        return None

    def _keep(self, outcome: Outcome) -> None:
        outcome.code = self._code
        with self._lock:
            self.outcomes[outcome.key] = outcome
            if self.out is not None:
                with self.out.open("a") as file:
                    file.write(json.dumps(asdict(outcome)) + "\n")
            count = len(self.outcomes)
            if outcome.bad or count % 100 == 0:
                v = outcome.verdict
                rate = count / (time.monotonic() - self._start)
                said = (
                    f"{v.kind}: {v.reason}"
                    if outcome.bad
                    else f"{count} cases, {rate:.1f} a second"
                )
                print(f"{outcome.key} ({outcome.what}, {outcome.mode}): {said}", file=sys.stderr)


def kept(out: Path, head: str, earlier: bool) -> Known:
    """The outcomes of an earlier run of the same seed.

    Args:
        earlier: whether those of other code count too, where nothing was wrong.
    """
    lines = out.read_text().splitlines() if out.exists() else []
    if not lines or lines[0] != head:
        out.write_text(head + "\n")
        return {}
    records = (json.loads(line) for line in lines[1:])
    found = [Outcome(**{**f, "verdict": Verdict(**f["verdict"])}) for f in records]
    code = fingerprint()
    return {o.key: o for o in found if o.code == code or (earlier and not o.bad)}


def fingerprint() -> str:
    """What tells runs of other code apart."""
    digest = hashlib.sha256()
    for folder in (Path(tpplan.__file__).parent, Path(__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def table(outcomes: Iterable[Outcome]) -> list[str]:
    """How many of each kind became of what."""
    kinds = ("right", "refused", "wrong", "crash", "fails", "hang", "harness")
    counts: dict[str, Counter[str]] = {}
    for o in outcomes:
        counts.setdefault(o.what.split(":")[0], Counter())[o.verdict.kind] += 1
    lines = [f"{'':28}" + "".join(f"{kind:>9}" for kind in kinds)]
    total: Counter[str] = Counter()
    for what, found in sorted(counts.items(), key=lambda pair: pair[0] != "model"):
        lines.append(f"{what:28}" + "".join(f"{found[kind]:>9}" for kind in kinds))
        total.update(found)
    return [*lines, f"{'all':28}" + "".join(f"{total[kind]:>9}" for kind in kinds)]


def grouped(outcomes: Iterable[Outcome]) -> list[str]:
    """Verdicts by their cause, the most frequent first, each with the key of one."""
    groups: dict[str, list[Outcome]] = {}
    for o in outcomes:
        groups.setdefault(f"{o.verdict.kind}: {cause(o.verdict)}", []).append(o)
    ordered = sorted(groups.items(), key=lambda pair: -len(pair[1]))
    return [f"{len(found):6}  {why}  [{found[0].key}]" for why, found in ordered]


def told(job: Job, verdict: Verdict) -> str:
    """A case as a minimal reproduction."""
    case = job.edit.of(job.recipe)
    mode = MODES[job.sequence_parallel]
    head = f"# {job.key}: {job.what}, tp {job.tp}, {mode}: {verdict.kind}: {verdict.reason}"
    detail = "\n".join(f"# {line}" for line in verdict.detail.splitlines()[:40])
    plan = "".join(f"# {line}\n" for line in case.plan.splitlines())
    return f"{head}\n{detail}\n# plan:\n{plan}\n{case.source}"


def findings(runner: Runner, most: int) -> Iterator[str]:
    """A minimal reproduction of each kind of thing that must not be, and of right plans refused."""
    seen = set()
    pool = Pool()
    for key, outcome in runner.outcomes.items():
        job, v = runner.by_key[key], outcome.verdict
        false = job.plain and v.kind == REFUSED
        # numbers that differ are told apart by what was edited, the rest by what is said
        which = (v.kind, outcome.what if v.kind == "wrong" else cause(v))
        if not (outcome.bad or false) or which in seen:
            continue
        seen.add(which)
        if len(seen) > most:
            break
        small = shrink(job, v.kind, cause(v), pool)
        yield told(small, run(small, pool).verdict)
    pool.close()


def report(outcomes: Sequence[Outcome]) -> bool:
    """Print what became of all; whether that is as it must be."""
    print("\n".join(table(outcomes)))
    models = [o for o in outcomes if o.what == "model"]
    refused = [o for o in models if o.verdict.kind == REFUSED]
    print(f"\nright plans refused: {len(refused)} of {len(models)}")
    print("\n".join(grouped(refused)))
    print("\nedited plans and models refused:")
    edited = (o for o in outcomes if o.what != "model" and o.verdict.kind == REFUSED)
    print("\n".join(grouped(edited)))
    code = fingerprint()
    earlier = Counter(o.code for o in outcomes if o.code != code)
    for other, count in earlier.items():
        print(f"\nkept of earlier code ({other}): {count} of {len(outcomes)}")
    bad = [o for o in outcomes if o.bad]
    print(f"\nmust not be: {len(bad)}")
    print("\n".join(grouped(bad)))
    return not bad and len(refused) <= REFUSED_AT_MOST * max(1, len(models))


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.random_models", description=__doc__)
    parser.add_argument("--models", type=int, default=200)
    parser.add_argument("--edits", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2 + 1))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, metavar="F", help="keep verdicts here, and go on from it"
    )
    parser.add_argument(
        "--earlier",
        action="store_true",
        help="go on from verdicts of earlier code too, which are counted; not where it was wrong",
    )
    parser.add_argument(
        "--processes",
        type=float,
        default=0.125,
        metavar="SHARE",
        help="of the cases, judged on gloo processes as well as on simulated ranks (default: 1/8)",
    )
    parser.add_argument("--show", metavar="KEY", help="one case: its source, plan and verdict")
    parser.add_argument("--shrink", type=int, default=20, metavar="N", help="minimal cases to find")
    parser.add_argument("--reproduce", type=Path, metavar="DIR", help="where to write them")
    options = parser.parse_args()
    jobs: Iterable[Job] = jobs_of(options.seed, options.models, options.edits)
    if options.show is not None:
        jobs = [job for job in jobs if job.key == options.show]
    head = json.dumps({"seed": options.seed, "processes": options.processes})
    known = kept(options.out, head, options.earlier) if options.out is not None else {}
    runner = Runner(jobs, options.jobs, options.processes, options.out, known)
    runner.run()
    outcomes = list(runner.outcomes.values())
    if options.show is not None:
        for o in outcomes:
            print(told(runner.by_key[o.key], o.verdict))
        return int(any(o.bad for o in outcomes))
    fine = report(outcomes)
    for number, text in enumerate(findings(runner, options.shrink)):
        if options.reproduce is not None:
            options.reproduce.mkdir(parents=True, exist_ok=True)
            (options.reproduce / f"{number:03}.py").write_text(text)
        else:
            print(f"\n{'-' * 100}\n{text}")
    return 0 if fine else 1
