"""Gloo ranks that stay alive between cases, and are started afresh where one of them did not."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import multiprocessing
import os
import tempfile
import time
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.random_models.judge import RIGHT, WORST_FIRST, Verdict, judge, simulated, worst
from benchmarks.random_models.model import Case
from tpplan.compat import gloo_in_order

WORLD = 4
SIZES = (2, 4)
PATIENCE = 60.0
"""Seconds until ranks that do not answer hang."""
AFTER_ANOTHER = 5.0
"""Seconds that a rank has, once another one has failed."""
CASES = 400
"""After so many the ranks are started afresh, for what PyTorch keeps of every class."""


def _serve(rank: int, store: str, pipe: Connection, patience: float, errors: Path) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_RANK=str(rank))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    faulthandler.enable()
    gc.collect()
    gc.freeze()  # what no case has made is not looked through for each
    with gloo_in_order():
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=WORLD,
            timeout=datetime.timedelta(seconds=patience),
        )
        meshes = {tp: DeviceMesh("cpu", list(range(tp)), mesh_dim_names=("tp",)) for tp in SIZES}
    while True:
        try:
            function, tp, *args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(function(meshes[tp], *args))
        except Exception:
            text = traceback.format_exc()
            pipe.send(Verdict("harness", text.strip().splitlines()[-1][:200], text[-3000:]))


class Pool:
    """Four ranks; a case runs on the first two, or on all.

    Args:
        prepare: a job that all ranks begin with. patience: seconds until ranks hang.
    """

    def __init__(self, prepare: tuple[Any, ...] = (), patience: float = PATIENCE) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._prepare, self._patience = prepare, patience
        self._start()

    def _start(self) -> None:
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "tpplan.api", "torch._dynamo"])
        store = tempfile.mktemp(dir=self._folder.name)
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        self._cases = 0
        for rank in range(WORLD):
            ours, theirs = context.Pipe()
            how = rank, store, theirs, self._patience, self._errors(rank)
            process = context.Process(target=_serve, args=how, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        if self._prepare:
            self.answers(WORLD, self._prepare)

    def _errors(self, rank: int) -> Path:
        return Path(self._folder.name) / f"errors of {rank}"

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join(10)
            pipe.close()

    def verdict(self, case: Case, tp: int, sequence_parallel: bool, apart: bool = True) -> Verdict:
        """The worst verdict of any rank.

        Args:
            apart: whether ranks that are processes, each of which compiles the plan, are asked too.
        """
        if self._cases >= CASES:
            self._restart()
        self._cases += 1
        found: Verdict = self.answers(1, (simulated, tp, case, tp, sequence_parallel))[0]
        if found.kind != RIGHT or not apart:
            return found
        return self.agreed(tp, (judge, tp, case, sequence_parallel))

    def agreed(self, ranks: int, job: tuple[Any, ...]) -> Verdict:
        """What the first ranks say together: the worst of what each says."""
        found: list[Verdict] = self.answers(ranks, job)
        kinds = {v.kind for v in found}
        if len(kinds) > 1 and "refused" in kinds:
            return Verdict("wrong", "only some ranks refuse the plan", str(found)[:2000])
        return worst(found)

    def answers(self, ranks: int, job: tuple[Any, ...]) -> list[Any]:
        """What each of the first ranks returns of a job: a function of its mesh, tp, arguments."""
        pipes = self._pipes[:ranks]
        broken = False
        found: list[Any] = []
        for pipe in pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send(job)
        end = time.monotonic() + self._patience
        waiting = list(pipes)
        while waiting:
            ready = wait(waiting, max(0.0, end - time.monotonic()))
            if not ready:
                found.append(Verdict("hang", f"{len(waiting)} of {ranks} ranks do not answer"))
                broken = True
                break
            for pipe in ready:
                waiting.remove(pipe)
                answer = self._received(pipe)
                found.append(answer)
                if isinstance(answer, Verdict) and answer.kind in WORST_FIRST[:3]:
                    broken = True
                    end = min(end, time.monotonic() + AFTER_ANOTHER)
        if broken:
            self._restart()
        return found

    def _restart(self) -> None:
        self.close()
        self._start()

    def _received(self, pipe: Any) -> Any:
        try:
            return pipe.recv()
        except (EOFError, ConnectionResetError):
            rank = self._pipes.index(pipe)
            self._processes[rank].join(AFTER_ANOTHER)
            said = self._errors(rank).read_text(errors="replace")[-3000:]
            detail = f"exit status {self._processes[rank].exitcode}; it wrote:\n{said}"
            return Verdict("crash", "the process of a rank died", detail)
