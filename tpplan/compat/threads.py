"""The threads that an op computes on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Within it, an op computes on the thread that calls it.

    What is proved on is small. OpenMP's threads wait for each other without giving way: ranks that
    are threads, or other processes, on the same cores make that many times as long.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
