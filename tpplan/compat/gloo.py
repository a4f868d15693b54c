"""Process groups of gloo whose collectives run one after another."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from tpplan.compat.replaced import there


@contextlib.contextmanager
def gloo_in_order() -> Iterator[None]:
    """Groups of gloo that are made inside have one thread, where torch gives them two.

    Each of the two notes what it did last in a string of the group's, without a lock
    (``lastCompletedWorkName`` in ``ProcessGroupGloo::runLoop``). With gathers in flight beside
    other collectives it is freed while the other thread writes, and the rank dies in malloc:
    ``benchmarks/gloo_threads.py`` shows it without tpplan.
    """
    import torch.distributed.distributed_c10d as c10d

    before = there(c10d, "ProcessGroupGloo")
    of_torch: Any = dist.ProcessGroupGloo

    class InOrder(of_torch):  # type: ignore[misc]
        def __init__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> None:
            options = of_torch._Options()
            options._threads = 1
            options._timeout = timeout
            # as torch finds them where it is given no options
            names = [n for n in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if n]
            devices = [of_torch.create_device(interface=name) for name in names]
            options._devices = devices or [of_torch.create_default_device()]
            super().__init__(store, rank, size, options)

    c10d.ProcessGroupGloo = InOrder  # type: ignore[misc]
    try:
        yield
    finally:
        c10d.ProcessGroupGloo = before  # type: ignore[misc]
