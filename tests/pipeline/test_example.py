"""The example that trains in a pipeline runs as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_pipeline() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
    port = str(20_000 + os.getpid() % 20_000)
    done = subprocess.run(
        [*launcher, "--master-port", port, "examples/pipeline.py", "--steps", "8"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 1
