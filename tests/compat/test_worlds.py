"""Process groups that are not there leave the process as it was."""

from __future__ import annotations

import sys

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
