"""Whether the ranks of a group agree."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tpplan.comm.collectives import Group, Site, all_gather
from tpplan.comm.randomness import Randomness
from tpplan.compat import fakes_are_made


def require_same_inputs(
    inputs: Any, group: Group, site: Site, randomness: Randomness | None = None
) -> None:
    """Compare a fingerprint of every tensor in ``inputs`` over the ranks; one small all-gather.

    Args:
        randomness: compared as well, where the ranks are going to draw the same masks.

    Raises:
        ValueError: where a rank was given other inputs than the first, or stands elsewhere in the
            random sequence.
    """
    tensors = [t for t in tree_leaves(inputs) if isinstance(t, torch.Tensor)]
    if not tensors or fakes_are_made() or any(t.is_meta for t in tensors):
        return
    device = tensors[0].device
    with torch.no_grad():
        batch = torch.stack([_fingerprint(t).to(device) for t in tensors]).sum()
        random = torch.tensor(0 if randomness is None else randomness.fingerprint(), device=device)
        mine = torch.stack([batch, random]).reshape(1, 2)
        everybody = all_gather(mine, 0, group.size, group, site).tolist()
    other = _first_other([batch for batch, _ in everybody])
    if other is not None:
        raise ValueError(
            f"rank {other} of the tensor-parallel group was given another batch than rank 0: "
            "all ranks of a tp group must be fed the same inputs (give a DistributedSampler the "
            "data-parallel ranks, not the whole world)"
        )
    other = _first_other([random for _, random in everybody])
    if other is not None:
        raise ValueError(
            f"the random state of rank {other} of the tensor-parallel group is not that of rank 0, "
            "and dropout on tensors that every rank holds whole must agree: give all ranks of a "
            "tp group the same torch.manual_seed (seed + data-parallel rank, say; not the rank in "
            "the world)"
        )


def _first_other(values: list[int]) -> int | None:
    """The first rank whose value is not that of rank 0."""
    return next((rank for rank, value in enumerate(values) if value != values[0]), None)


def _fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.to_local() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor
    if local is not tensor:
        return torch.zeros((), dtype=torch.long, device=local.device)
    data = local.detach().contiguous().reshape(-1).view(torch.uint8).long()
    weights = torch.arange(1, data.numel() + 1, device=data.device) % 65521
    shape = sum((i + 1) * int(n) for i, n in enumerate(local.shape))
    return (data * (weights + 1)).sum() + shape
