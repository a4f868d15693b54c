"""Whether the ranks of a group agree."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tpplan.comm.collectives import Group, Site, all_gather
from tpplan.compat import FakeTensor


def require_same_inputs(inputs: Any, group: Group, site: Site) -> None:
    """Compare a fingerprint of every tensor in ``inputs`` over the ranks; one small all-gather.

    Raises:
        ValueError: where a rank was given other inputs than the first.
    """
    tensors = [t for t in tree_leaves(inputs) if isinstance(t, torch.Tensor)]
    if not tensors or any(isinstance(t, FakeTensor) or t.is_meta for t in tensors):
        return
    device = tensors[0].device
    with torch.no_grad():
        mine = torch.stack([_fingerprint(t).to(device) for t in tensors]).sum().reshape(1)
        everybody = all_gather(mine, 0, group.size, group, site).tolist()
    others = [rank for rank, value in enumerate(everybody) if value != everybody[0]]
    if others:
        raise ValueError(
            f"rank {others[0]} of the tensor-parallel group was given another batch than rank 0: "
            "all ranks of a tp group must be fed the same inputs (give a DistributedSampler the "
            "data-parallel ranks, not the whole world)"
        )


def _fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.to_local() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor
    if local is not tensor:
        return torch.zeros((), dtype=torch.long, device=local.device)
    data = local.detach().contiguous().reshape(-1).view(torch.uint8).long()
    weights = torch.arange(1, data.numel() + 1, device=data.device) % 65521
    shape = sum((i + 1) * int(n) for i, n in enumerate(local.shape))
    return (data * (weights + 1)).sum() + shape
