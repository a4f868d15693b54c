"""Checkpoints of models whose experts ranks of ep share."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tpplan
from benchmarks import zoo
from tests.checkpoint.folders import shared_folder
from tests.compare import Errors, Findings, beyond, same
from tests.ranks import Ranks
from tpplan.comm.placements import part_of


def job(mesh: DeviceMesh, name: str) -> Errors:
    """Saved, and loaded into the whole model and into one of other ranks; files and DCP."""
    found, reference = Findings(), zoo.tiny(name)
    own = mesh["ep"] if "dp" in (mesh.mesh_dim_names or ()) else mesh
    model = tpplan.parallelize(copy.deepcopy(reference), "auto", mesh=own, prove=False)
    if own is not mesh:
        everyone = mesh["dp", "ep"]._flatten("dp_ep")
        for layer in model.model.layers:  # type: ignore[union-attr]
            fully_shard(layer.mlp.experts, mesh=mesh["dp"])  # type: ignore[union-attr]
        fully_shard(model, mesh=everyone)
    saved = dict(model.named_parameters())
    theirs = dict(reference.named_parameters())
    for parameter, p in saved.items():
        if isinstance(p, DTensor):
            whole = theirs[parameter].detach()
            found.add(f"{parameter} here", same(torch.equal(part_of(whole, p), p.to_local())))
            found.add(parameter, same(torch.equal(whole, p.full_tensor())))
    for kind in ("files", "dcp"):
        folder = shared_folder()
        if kind == "files":
            tpplan.save_checkpoint(model, folder)
        else:
            dcp.save(model.state_dict(), checkpoint_id=folder)
        dist.barrier()
        whole_model = zoo.tiny(name)
        others = DeviceMesh("cpu", list(range(4)), mesh_dim_names=("ep",))
        blank = zoo.tiny(name).to("meta")
        shared = tpplan.parallelize(blank, "auto", mesh=others, prove=False)
        with torch.no_grad():
            for p in whole_model.parameters():
                p.zero_()
        for target in (whole_model, shared):
            tpplan.load_checkpoint(target, folder)
            for parameter, p in target.named_parameters():
                ours = p.full_tensor() if isinstance(p, DTensor) else p
                found.add(f"{kind}: {parameter}", same(torch.equal(theirs[parameter], ours)))
    return found.errors


@pytest.mark.turns(24)
@pytest.mark.parametrize("shape", ["ep2xtp2", "dp2xep2"])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_saved_and_loaded(ranks: Ranks, name: str, shape: str) -> None:
    assert not beyond(ranks.run(shape, job, name))
