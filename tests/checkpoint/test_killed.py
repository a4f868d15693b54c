"""Whenever a saving rank is killed, the checkpoint before or the new one is whole."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.checkpoint.saving import SIZE
from tests.thorough import THOROUGH
from tpplan.checkpoint.files import CheckpointError, stored_in
from tpplan.checkpoint.read import part_of

RANKS = 2


@pytest.mark.turns(24)
@pytest.mark.parametrize("seed", range(20 if THOROUGH else 4))
def test_killed(tmp_path: Path, seed: int) -> None:
    generator = random.Random(seed)
    line = [sys.executable, "-m", "tests.checkpoint.saving", str(tmp_path)]
    ranks = [subprocess.Popen([*line, str(rank), str(RANKS)]) for rank in range(RANKS)]
    try:
        while not _is_whole(tmp_path / "saved"):
            assert all(rank.poll() is None for rank in ranks)
            time.sleep(0.01)
        time.sleep(generator.random())
        generator.choice(ranks).kill()
        assert _is_whole(tmp_path / "saved")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert _is_whole(tmp_path / "saved")


def _is_whole(folder: Path) -> bool:
    """Whether it can be read, and all is of one model; while it is written, of what it was."""
    for _ in range(100):
        try:
            stored = stored_in(folder)
            parts = [part_of(s, (0, 0), (SIZE, SIZE)) for s in stored.values()]
        except (CheckpointError, OSError):  # replaced between the two
            time.sleep(0.01)
            continue
        values = {float(p.flatten()[0]) for p in parts}
        return len(parts) == 4 and len(values) == 1 and all(torch.equal(p, parts[0]) for p in parts)
    return False
