"""Process groups that are not there leave the process as it was."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from tpplan.compat import fake_world, simulate


def test_nothing_is_left() -> None:
    hook = sys.excepthook
    assert simulate(2, lambda mesh: mesh.get_local_rank()) == [0, 1]
    assert sys.excepthook is hook
    with fake_world(4) as mesh:
        assert mesh.size() == 4
    assert sys.excepthook is hook
    assert not dist.is_initialized()


def test_ranks_compute_on_one_thread() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert simulate(2, lambda mesh: torch.get_num_threads()) == [1, 1]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
