"""The ranks of ``verify`` as real gloo processes."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from tpplan.compat import gloo_in_order, mesh_of_all
from tpplan.compiled import CompiledPlan
from tpplan.proof.ranks import Outcome, Reference, run_rank


def run_processes(reference: Reference, compiled: CompiledPlan) -> list[Outcome]:
    """``run_rank`` in one process for each rank; whatever one raises is raised."""
    with tempfile.TemporaryDirectory() as folder:
        torch.save((reference, compiled), os.path.join(folder, "job"))
        ranks = compiled.tp * compiled.ep
        job = folder, compiled.tp, compiled.ep
        start_processes(_serve, job, nprocs=ranks, start_method="spawn")
        paths = [os.path.join(folder, f"outcome{rank}") for rank in range(ranks)]
        return [torch.load(path, weights_only=False) for path in paths]


def _serve(rank: int, *job: Any) -> None:
    folder, tp, ep = job
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    with gloo_in_order():
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=tp * ep)
        try:
            mesh = mesh_of_all(tp, ep)
            reference, compiled = torch.load(os.path.join(folder, "job"), weights_only=False)
            outcome = run_rank(mesh, reference, compiled)
            torch.save(outcome, os.path.join(folder, f"outcome{rank}"))
            dist.barrier()
        finally:
            dist.destroy_process_group()
