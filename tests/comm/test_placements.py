"""Placements are found by the tensor-parallel dimension, wherever it is in a mesh."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from tpplan import compat
from tpplan.comm.placements import (
    along_tp,
    around_tp,
    dim_of,
    is_cut,
    is_whole,
    part_of,
    ranges_of,
    tp_dim,
    tp_rank,
)
from tpplan.comm.rows import taken
from tpplan.layout import Rows

ROWS = Rows(0, [[(0, 2), (6, 8)], [(2, 4), (4, 6)]])
WHOLE = torch.arange(24.0).view(8, 3)


def spec_on(mesh: DeviceMesh, tp: Placement, other: Placement) -> compat.DTensorSpec:
    """Of a tensor like ``WHOLE``, by its placements over the ranks of ``mesh``."""
    kinds = [other, other]
    kinds[tp_dim(mesh)] = tp
    return compat.dtensor_spec(mesh, kinds, WHOLE.shape, WHOLE.dtype)


def job(mesh: DeviceMesh, names: tuple[str, str]) -> list[str]:
    """What is wrong on a mesh with these dimensions."""
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=names)
    cut = spec_on(mesh, Shard(1), Replicate())
    held = spec_on(mesh, ROWS, Shard(0))
    outer, kinds = around_tp(held)
    found = {
        "along": along_tp(cut) == Shard(1) and along_tp(held) is ROWS,
        "cut": is_cut(cut, 1) and not is_cut(cut, 0) and dim_of(cut) == 1,
        "whole": is_whole(spec_on(mesh, Replicate(), Replicate())) and not is_whole(cut),
        "ranges": ranges_of(held) is ROWS and ranges_of(cut) is None,
        "around": outer.mesh_dim_names != ("tp",) and kinds == [Shard(0)],
    }
    placed = taken(WHOLE, held)
    mine = ROWS.take(WHOLE, tp_rank(placed))[2 * outer.get_local_rank() :][:2]
    found["part"] = torch.equal(compat.local_of(placed), mine)
    found["part of"] = torch.equal(part_of(WHOLE, placed), mine)
    found["back"] = torch.equal(placed.full_tensor(), WHOLE)
    return [name for name, right in found.items() if not right]


@pytest.mark.parametrize("names", [("dp", "tp"), ("tp", "dp"), ("dp", "model")])
def test_by_the_tensor_parallel_dimension(names: tuple[str, str]) -> None:
    assert compat.simulate(4, lambda mesh: job(mesh, names)) == [[]] * 4
