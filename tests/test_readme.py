"""What the README shows is run as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from tests.compare import error
from tests.models import hf, token_ids
from tests.ranks import Ranks

README = Path(__file__).parent.parent / "README.md"


def block(marker: str, language: str = "python") -> str:
    """The one code block of the README that contains ``marker``."""
    blocks = re.findall(rf"```{language}\n(.*?)```", README.read_text(), flags=re.DOTALL)
    (found,) = [text for text in blocks if marker in text]
    return found


@pytest.mark.turns(24)
def test_the_usage_example(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(block("# train.py"))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, "--master-port", str(20_000 + os.getpid() % 20_000), str(file)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 5
    assert losses[-1] < losses[0]


def test_the_plan_on_the_page() -> None:
    import yaml

    plan = yaml.safe_load(block("tpplan: 1", "yaml"))
    report = tpplan.dry_run(hf("Qwen3", device="meta"), plan, tp=2, seq=8)
    assert report.counts("forward")["all_gather"] == 5


def full_state_dict(mesh: DeviceMesh) -> float:
    reference = hf()
    unsharded: Any = hf(seed=9)
    model = tpplan.parallelize(hf(), "llama.yaml", mesh)
    scope = {"model": model, "unsharded": unsharded}
    exec(block("get_model_state_dict"), scope)
    if dist.get_rank() != 0:
        return 0.0
    ids = token_ids(2, 8, 0)
    return error(reference(ids).logits, unsharded(ids).logits)


def test_a_full_state_dict(ranks: Ranks) -> None:
    assert ranks.run(4, full_state_dict) == [0.0] * 4


def from_files_and_back(mesh: DeviceMesh, folder: str) -> float:
    reference, again = hf(), hf(seed=9)
    if dist.get_rank() == 0:
        reference.save_pretrained(f"{folder}/one")
    dist.barrier()
    scope = {"mesh": mesh["tp"], "folder": f"{folder}/one", "other_folder": f"{folder}/other"}
    exec(block("save_checkpoint"), {"tpplan": tpplan, **scope}, scope)
    dist.barrier()
    tpplan.load_checkpoint(again, f"{folder}/other")
    ids = token_ids(2, 8, 0)
    model: Any = scope["model"]
    with torch.no_grad():
        due = reference(ids).logits
        return max(error(due, model(ids).logits), error(due, again(ids).logits))


def test_from_files_and_back(ranks: Ranks, tmp_path: Path) -> None:
    assert max(ranks.run("1x4", from_files_and_back, str(tmp_path))) <= 1e-5
