"""``save_pretrained`` of a sharded model: the folder that the unsharded one writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from tests.checkpoint.folders import shared_folder
from tests.compare import Errors, Findings, beyond, same
from tests.ranks import Ranks
from tests.rewrite.rows import CASES, built, sharded


def alike(one: Path, other: Path) -> float:
    """Whether two folders have the same files, byte for byte."""
    names = [sorted(path.name for path in folder.iterdir()) for folder in (one, other)]
    equal = (
        (one / name).read_bytes() == (other / name).read_bytes()
        for name in names[0]
        if (other / name).exists()
    )
    return same(names[0] == names[1] and all(equal))


def saving_job(mesh: DeviceMesh, case: str) -> Errors:
    """Whole and in several files; with a state that the caller gives; twice in one folder."""
    found, reference = Findings(), built(case)
    model = sharded(case, reference, mesh["tp"], True)
    if mesh["dp"].size() > 1:
        fully_shard(model, mesh=mesh["dp"])
    for title, options in (("whole", {}), ("in parts", {"max_shard_size": "20KB"})):
        theirs, ours = shared_folder(), shared_folder()
        if dist.get_rank() == 0:
            reference.save_pretrained(theirs, **options)
        for state in (None, model.state_dict()):
            main = dist.get_rank() == 0
            model.save_pretrained(ours, is_main_process=main, state_dict=state, **options)
            found.add(title, alike(theirs, ours))
            dist.barrier()
    sizes = model.config.distributed_config
    found.add("config is as it was", same(sizes is not None and sizes.tp_size == 1))
    return found.errors


@pytest.mark.turns(24)
@pytest.mark.parametrize("shape", ["2x2", "1x4"])
@pytest.mark.parametrize("case", CASES)
def test_saving(ranks: Ranks, case: str, shape: str) -> None:
    assert not beyond(ranks.run(shape, saving_job, case))


def failing_job(mesh: DeviceMesh) -> Errors:
    """What the first rank cannot write is an error on all."""
    model = sharded("llama 2", built("llama 2"), mesh["tp"], True)
    with pytest.raises(ValueError, match="the model was not saved: rank 0 stopped with"):
        model.save_pretrained(shared_folder(), max_shard_size="much")
    cpu = torch.Tensor.cpu

    def full(self: torch.Tensor) -> torch.Tensor:
        if mesh.get_rank() == 0 and self.is_floating_point():
            raise RuntimeError("no more memory")
        return cpu(self)

    torch.Tensor.cpu = full  # type: ignore[method-assign, assignment]
    try:
        with pytest.raises(ValueError, match="rank 0 stopped with RuntimeError: no more memory"):
            model.save_pretrained(shared_folder())
    finally:
        torch.Tensor.cpu = cpu  # type: ignore[method-assign]
    blank = sharded("llama 2", built("llama 2", device="meta"), mesh["tp"], True)
    with pytest.raises(ValueError, match="is on the meta device: it has no numbers to save"):
        blank.save_pretrained(shared_folder())
    return {}


def test_failing(ranks: Ranks) -> None:
    assert not beyond(ranks.run("1x4", failing_job))
