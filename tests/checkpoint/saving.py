"""A rank that saves again and again, one model and another, until it is killed."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tpplan.checkpoint import save_checkpoint

SIZE = 400


def model(number: float) -> nn.Module:
    """Whose every number is this one."""
    made = nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(4)))
    for parameter in made.parameters():
        nn.init.constant_(parameter, number)
    return made


def main(folder: Path, rank: int, ranks: int) -> None:
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    models = [model(number) for number in (1.0, 2.0)]
    for made in models:
        for layer in made:
            placed = distribute_tensor(layer.weight.data, mesh, [Shard(0)], src_data_rank=None)  # type: ignore[arg-type]
            layer.weight = nn.Parameter(placed)  # type: ignore[assignment]
    turn = 0
    while True:
        save_checkpoint(models[turn % 2], folder / "saved", 10**9 if turn % 3 else 10**6)
        turn += 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
