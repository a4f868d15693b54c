"""Real gloo processes that stay alive between tests: importing torch takes longer than a test."""

from __future__ import annotations

import datetime
import faulthandler
import gc
import os
import random
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh

from tpplan.compat import gloo_in_order

# where kernels are compiled for it, they are tested on a GPU
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WORLD = 4
TIMEOUT = 120.0
ANSWER = 600.0  # all that a job may take: compiled experts, on two cores that others use too
_SIZES = {"ep2": 2}  # of meshes with a name, where not of all ranks
# imported once, by the process that the ranks are forked from: most of what a first test waits for
PRELOADED = [
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch._dynamo.convert_frame",
    "torch._dynamo.backends.debugging",
    "torch._inductor.pattern_matcher",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.conversion_mapping",
    "pytest",
    "tpplan.api",
    "tpplan.checkpoint",
    "tpplan.trainers",
]


class RankError(AssertionError):
    """A rank raised; the message is its traceback."""


def _stacks(store: str, rank: int) -> Path:
    """Where a rank that is asked writes what it is doing."""
    return Path(f"{store}.{rank}.stacks")


def _serve(rank: int, world: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    with open(_stacks(store, rank), "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)  # which is kept open
        with gloo_in_order():
            _serve_jobs(rank, world, store, pipe)


def _serve_jobs(rank: int, world: int, store: str, pipe: Connection) -> None:
    gc.collect()
    gc.freeze()  # what no test has made is not looked through by each that compiles
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=TIMEOUT),
    )
    if DEVICE == "cuda":
        torch.cuda.set_device(0)  # which all ranks share: gloo sends through the host
    meshes: dict[tuple[str, int | str], DeviceMesh] = {}
    for device in dict.fromkeys(("cpu", DEVICE)):
        for tp in range(2, world + 1):
            meshes[device, tp] = DeviceMesh(device, list(range(tp)), mesh_dim_names=("tp",))
    for ep in (2, 4):
        if ep <= world:
            meshes["cpu", f"ep{ep}"] = DeviceMesh("cpu", list(range(ep)), mesh_dim_names=("ep",))
    if world == WORLD:
        meshes["cpu", "ep2xtp2"] = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("ep", "tp"))
        meshes["cpu", "dp2xep2"] = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "ep"))
        meshes["cpu", "2x2"] = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        meshes["cpu", "1x4"] = DeviceMesh("cpu", [[0, 1, 2, 3]], mesh_dim_names=("dp", "tp"))
    if world == 2 * WORLD:
        names = ("dp", "ep", "tp")
        meshes["cpu", "dp2xep2xtp2"] = DeviceMesh(
            "cpu", torch.arange(8).view(2, 2, 2), mesh_dim_names=names
        )
    while True:
        job = pipe.recv()
        if job is None:
            break
        function, mesh, args = job
        try:
            torch.manual_seed(0)
            random.seed(0)  # ranks must agree on it where a model drops layers by it
            torch._dynamo.reset()  # it counts over all jobs how often a function was compiled
            pipe.send((True, function(meshes[mesh], *args)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
    dist.barrier()
    dist.destroy_process_group()


class Ranks:
    """Four processes, or as many as are asked for; each job runs on the first ones of them."""

    def __init__(self, world: int = WORLD) -> None:
        self._world = world
        self._folder = tempfile.TemporaryDirectory()
        self._start()

    def _start(self) -> None:
        self._store = store = tempfile.mktemp(dir=self._folder.name)
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._pipes = []
        self._processes = []
        for rank in range(self._world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self._world, store, theirs), daemon=True
            )
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(
        self, shape: int | str, function: Callable[..., Any], *args: Any, device: str = "cpu"
    ) -> list[Any]:
        """``function(mesh, *args)`` on every rank of a mesh; the results.

        ``function`` must be importable. A rank's exception is raised here.

        Args:
            shape: a tp size, or "2x2" or "1x4": dp and tp; "ep2", "ep4", "ep2xtp2", "dp2xep2";
                of eight processes "dp2xep2xtp2".
        """
        count = _SIZES.get(shape, self._world) if isinstance(shape, str) else shape
        pipes = self._pipes[:count]
        for pipe in pipes:
            pipe.send((function, (device, shape), args))
        results: list[Any] = []
        failures: dict[str, list[str]] = {}  # what went wrong, and the ranks that say so
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(ANSWER if not failures else TIMEOUT):
                fine, value = False, f"did not answer; it was in\n{self._doing(rank)}"
            else:
                try:
                    fine, value = pipe.recv()
                except EOFError:  # gloo ends a process where ranks send different things
                    fine, value = False, "died"
            if fine:
                results.append(value)
            else:
                failures.setdefault(value, []).append(str(rank))
        if failures:
            # the others may hang in a collective: start afresh for the next test
            self._stop(kill=True)
            self._start()
            # who stands alone is the one to look at
            shown = sorted(failures.items(), key=lambda failure: len(failure[1]))
            raise RankError("\n".join(f"rank {', '.join(r)}: {what}" for what, r in shown))
        return results

    def _doing(self, rank: int) -> str:
        """The stack of a rank that does not answer."""
        process = self._processes[rank]
        if process.pid is None or not process.is_alive():
            return "a process that has ended"
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1)
        return _stacks(self._store, rank).read_text() or "something that lets no signal through"

    def _stop(self, kill: bool) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            process.terminate() if kill else pipe.send(None)  # at which coverage saves its counts
        for process in self._processes:
            process.join(10)
            if kill:
                process.kill()  # one that C code holds

    def close(self) -> None:
        """End the processes."""
        self._stop(kill=False)
        self._folder.cleanup()
