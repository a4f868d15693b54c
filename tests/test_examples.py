"""The examples run as they stand there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(ranks: int, name: str, *options: str) -> str:
    """What an example prints."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    port = str(20_000 + os.getpid() % 20_000)
    done = subprocess.run(
        [*launcher, "--master-port", port, f"examples/{name}", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(said: str) -> list[float]:
    return [float(x) for x in re.findall(r"loss ([\d.]+)", said)]


@pytest.mark.turns(32)
def test_pipeline() -> None:
    met = losses(run(4, "pipeline.py", "--steps", "8"))
    assert len(met) == 8
    assert met[-1] < met[0] - 1


@pytest.mark.turns(24)
def test_training_and_generation(tmp_path: Path) -> None:
    """Trained by four ranks, on by two, which then generate."""
    folder = ["--folder", str(tmp_path)]
    first = losses(run(4, "train.py", *folder, "--steps", "6"))
    then = losses(run(2, "train.py", *folder, "--steps", "2", "--dp", "1"))
    assert len(first) == 6
    assert max(then) < first[-1] + 0.3 < first[0]
    curve = json.loads((tmp_path / "losses.json").read_text())
    assert [round(loss, 4) for loss in curve] == [*first, *then]
    said = run(2, "generate.py", *folder, "--tokens", "8")
    assert said.startswith("tpplan ") and len(said) >= 8


PAGE = (ROOT / "examples" / "offline_plan.md").read_text()
COMMANDS = re.findall(r"```sh\ntpplan (.*)\n```", PAGE)


def test_every_command_is_run() -> None:
    assert len(COMMANDS) == PAGE.count("```sh")


@pytest.mark.turns(48)
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.split()[0])
def test_offline(command: str) -> None:
    launcher = [sys.executable, "-m", "tpplan"]
    done = subprocess.run(
        [*launcher, *command.split()], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
