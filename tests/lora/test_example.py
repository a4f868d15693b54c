"""examples/finetune_lora.py runs as it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.turns(24)
def test_it_runs() -> None:
    # at a free port of this machine, whatever its name resolves to
    where = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    launcher = [sys.executable, "-m", "torch.distributed.run", *where]
    command = [*launcher, "examples/finetune_lora.py"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.1
    assert float(done.stdout.split("differ by ")[1].split()[0]) < 1e-5
