"""Ranks that would not do the same thing: all of them are told, and nothing is changed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from tests.compare import Errors, same
from tests.ranks import Ranks

PLAN = {"tpplan": 1, "sequence_parallel": False, "rules": {"0": "colwise", "2": "rowwise"}}


def model(width: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8))


def other_model() -> tuple[nn.Module, dict[str, Any]]:
    return model(32), {}


def other_dtype() -> tuple[nn.Module, dict[str, Any]]:
    return model().to(torch.bfloat16), {}


def frozen() -> tuple[nn.Module, dict[str, Any]]:
    made = model()
    made[2].requires_grad_(False)
    return made, {}


def other_plan() -> tuple[nn.Module, dict[str, Any]]:
    return model(), {"plan": {"tpplan": 1, "rules": {"0": "replicate", "2": "replicate"}}}


def other_options() -> tuple[nn.Module, dict[str, Any]]:
    return model(), {"prove": False}


def broken_plan() -> tuple[nn.Module, dict[str, Any]]:
    return model(), {"plan": {"tpplan": 1, "rules": {"0": "colwise", "3": "rowwise"}}}


class Unrunnable(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such inputs")


def does_not_run() -> tuple[nn.Module, dict[str, Any]]:
    """What else it might be run on is not tried by one rank alone, for which others would wait."""
    return Unrunnable(*model()), {"inputs": None}


CASES: dict[Callable[[], tuple[nn.Module, dict[str, Any]]], str] = {
    other_model: r"rank 1 .*parameter 0.weight is \(32, 8\) torch.float32 trained, on rank 0 \(16",
    other_dtype: r"rank 1 .*parameter 0.weight is \(16, 8\) torch.bfloat16",
    frozen: r"rank 1 .*parameter 2.weight is .* frozen, on rank 0 .* trained",
    other_plan: r"rank 1 .*module 0 is replicate \[\], on rank 0 colwise",
    other_options: r"rank 1 .*prove is False, on rank 0 True",
    broken_plan: r"rank 1 .*stopped with PlanError: .*matches no module",
    does_not_run: r"rank 1 .*stopped with PlanError: .*no such inputs",
}


def differing_job(mesh: DeviceMesh, case: Any) -> Errors:
    made, options = case() if dist.get_rank() == 1 else (model(), {})
    before = {name: id(p) for name, p in made.named_parameters()}
    call = {"plan": PLAN, "inputs": torch.randn(2, 8), "mesh": mesh, **options}
    with pytest.raises(ValueError, match=CASES[case]):
        tpplan.parallelize(made, **call)
    kept = {name: id(p) for name, p in made.named_parameters()} == before
    return {"nothing is changed": same(kept and type(made[0]) is nn.Linear)}


def refused_job(mesh: DeviceMesh, folder: str) -> bool:
    """A wrong plan, of which every rank has a file of its own."""
    file = Path(folder) / f"plan_{dist.get_rank()}.yaml"
    file.write_text("tpplan: 1\nrules: {'0': colwise, '3': rowwise}\n")
    with pytest.raises(tpplan.PlanError, match=f"{file.name}.*matches no module"):
        tpplan.parallelize(model(), file, mesh=mesh, inputs=torch.randn(2, 8))
    return True


def test_refused_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, refused_job, str(tmp_path)) == [True, True]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_differing(ranks: Ranks, case: Any) -> None:
    for errors in ranks.run(2, differing_job, case):
        assert errors == {"nothing is changed": 0.0}


KILLED = """
import datetime, os, signal, sys
import torch, torch.distributed as dist, tpplan
from torch import nn
from tests.rewrite.test_launch import PLAN, model

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=30))
made = tpplan.parallelize(model(), PLAN, inputs=torch.randn(2, 8), prove=False)
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    made(torch.randn(2, 8))
except RuntimeError as error:
    print(error)
"""


@pytest.mark.turns(24)
def test_a_rank_that_dies(tmp_path: Path) -> None:
    """The others say in which collective of which module they waited."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", KILLED, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"},
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert ranks[1].returncode == -signal.SIGKILL
    assert "waited in vain for the other ranks (" in said[0]
