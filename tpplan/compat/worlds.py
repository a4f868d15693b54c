"""Process groups that are not there: one in which nothing is sent, and ranks that are threads."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tpplan.compat.replaced import there
from tpplan.compat.threads import one_thread

# seconds for which all ranks wait, and nothing is computed, until they are taken to be stuck
_STUCK = 4.0
_POLL = 0.25
_C10D_TABLES = (
    "_pg_map",
    "_pg_names",
    "_pg_group_ranks",
    "_pg_backend_config",
    "_tags_to_pg",
    "_pg_to_tag",
    "_group_count",
)


@contextlib.contextmanager
def _same_excepthook() -> Iterator[None]:
    """Every process group puts its rank in front of what the process says of later errors."""
    before = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = before


@contextlib.contextmanager
def fake_world(size: int, rank: int = 0, ep: int = 1) -> Iterator[DeviceMesh]:
    """A process group in which nothing is sent, and its mesh of ``size`` ranks, ``ep`` times.

    A live process group is set aside for the duration and put back afterwards, so that a dry run
    can be asked for in the middle of a real run.
    """
    import torch.distributed.distributed_c10d as c10d
    from torch.testing._internal.distributed.fake_pg import FakeStore

    default = c10d._world.default_pg
    names = dict(c10d._world.pg_names)
    tables = {key: there(c10d, key) for key in _C10D_TABLES}
    for key, value in tables.items():
        setattr(c10d, key, type(value)())
    for name in names.values():
        torch._C._distributed_c10d._unregister_process_group(name)
    c10d._update_default_pg(None)
    try:
        with _same_excepthook():
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size * ep)
        try:
            # DTensor's caches go by mesh equality: names no real mesh has keep them apart
            yield mesh_of_all(size, ep, "dry run")
        finally:
            dist.destroy_process_group()
    finally:
        for key, value in tables.items():
            setattr(c10d, key, value)
        c10d._update_default_pg(default)
        for group, name in names.items():
            torch._C._distributed_c10d._register_process_group(name, group)


def mesh_of_all(tp: int, ep: int, prefix: str = "") -> DeviceMesh:
    """The mesh (tp), (ep) or (ep, tp) of all ranks of the process group, on the CPU."""
    sizes = {"ep": ep, "tp": tp} if tp > 1 and ep > 1 else {"ep": ep} if ep > 1 else {"tp": tp}
    names = tuple(f"{prefix} {name}".strip() for name in sizes)
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=names)


def is_simulated(mesh: DeviceMesh) -> bool:
    """Whether its ranks are threads of one process, and have all in common that is a process'."""
    return bool(dist.get_backend(mesh.get_group(0)) == "threaded")


@one_thread()
@_same_excepthook()
def simulate(
    size: int,
    job: Callable[[DeviceMesh], Any],
    ep: int = 1,
    turns: Sequence[AbstractContextManager[None]] | None = None,
) -> list[Any]:
    """``job(mesh)`` on ranks that are threads of this process; what each returned.

    They are ``size``, ``ep`` times, on the mesh (tp), (ep) or (ep, tp).

    Every rank runs the very code a process would, its Python branches included; collectives meet
    in memory. The first exception of a rank is raised here.

    ``turns``: of each rank a context that it is in whenever it runs, which one of them does at a
    time then; entered again after each collective.

    Raises:
        RuntimeError: where all of them wait, because they issue different collectives.
    """
    import torch.distributed.distributed_c10d as c10d
    from torch.testing._internal.distributed.multi_threaded_pg import (
        ProcessLocalGroup,
        _install_threaded_pg,
        _uninstall_threaded_pg,
    )

    world = size * ep
    results: list[Any] = [None] * world
    failures: list[BaseException] = []
    store = dist.HashStore()  # type: ignore[attr-defined]
    taking_turns = _Turns(turns)

    def run(rank: int) -> None:
        try:
            c10d.init_process_group("threaded", rank=rank, world_size=world, store=store)
            mesh = mesh_of_all(size, ep)
            with taking_turns(rank):
                results[rank] = job(mesh)
        except BaseException as error:
            failures.append(error)
            ProcessLocalGroup.exception_handle(error)
        finally:
            if c10d.is_initialized():
                c10d.destroy_process_group()

    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
    _install_threaded_pg()
    try:
        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
        with taking_turns.at_collectives():
            for thread in threads:
                thread.start()
            _join(threads, failures, ProcessLocalGroup.exception_handle)
    finally:
        ProcessLocalGroup.reset()
        _uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)  # type: ignore[attr-defined]
    if failures:
        raise failures[0]
    return results


class _Turns:
    """Lets one rank run at a time, in its own context; without ``contexts``, all of them."""

    def __init__(self, contexts: Sequence[AbstractContextManager[None]] | None) -> None:
        self.contexts = contexts
        self.free = threading.Condition()
        self.taken = False
        self.own = threading.local()

    @contextlib.contextmanager
    def __call__(self, rank: int) -> Iterator[None]:
        if self.contexts is None:
            yield
            return
        self.take(self.contexts[rank])
        try:
            yield
        finally:
            self.give()

    def take(self, context: AbstractContextManager[None]) -> None:
        with self.free:
            self.free.wait_for(lambda: not self.taken)
            self.taken = True
        self.own.context = context
        context.__enter__()

    def give(self) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = self.own.context
        self.own.context = None
        try:
            context.__exit__(None, None, None)
        finally:
            with self.free:
                self.taken = False
                self.free.notify()
        return context

    @contextlib.contextmanager
    def at_collectives(self) -> Iterator[None]:
        """Within it, whoever waits in a collective lets others run."""
        from torch.testing._internal.distributed.multi_threaded_pg import Collective

        join = Collective.join

        def joined(collective: Any, rank: int, data: Any) -> Any:
            if getattr(self.own, "context", None) is None:
                return join(collective, rank, data)
            context = self.give()
            try:
                return join(collective, rank, data)
            finally:
                self.take(context)

        if self.contexts is not None:
            Collective.join = joined  # type: ignore[method-assign]
        try:
            yield
        finally:
            Collective.join = join  # type: ignore[method-assign]


def _join(
    threads: Sequence[threading.Thread],
    failures: list[BaseException],
    stop: Callable[[BaseException], None],
) -> None:
    """Wait for ``threads``, unless all that are left wait for each other.

    Time is counted in polls: a process that is given none does not poll either.
    """
    worked, idle = time.process_time(), 0
    for thread in threads:
        while thread.is_alive():
            thread.join(_POLL)
            now = time.process_time()
            if now - worked > 0.02 or not all(_waits(t) for t in threads if t.is_alive()):
                worked, idle = now, 0
                continue
            idle += 1
            if idle * _POLL >= _STUCK and not failures:
                error = RuntimeError("the ranks wait for each other in different collectives")
                failures.append(error)
                stop(error)


def _waits(thread: threading.Thread) -> bool:
    """Whether a thread's innermost frame is one of ``threading``'s."""
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code.co_filename == threading.__file__
