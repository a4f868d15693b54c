"""What ranks save: the files of the unsharded model, whole at every moment."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import tpplan
from tests.checkpoint.folders import shared_folder
from tests.compare import Errors, Findings, beyond, same
from tests.ranks import Ranks
from tests.rewrite.rows import CASES, built, sharded
from tpplan.checkpoint.files import INDEX, SINGLE, stored_in

ONE, SEVERAL = 5 * 10**9, 20_000


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Everything in a folder, by safetensors' own reader."""
    files = {stored.path for stored in stored_in(folder).values()}
    return {name: t for file in files for name, t in load_file(file).items()}


def holds(folder: Path, model: nn.Module) -> float:
    """Whether a folder has a model's tensors bit by bit, those that are tied once."""
    found = tensors_of(folder)
    due = {id(t): (n, t) for n, t in reversed(model.state_dict(keep_vars=True).items())}
    names = {name for name, _ in due.values()}
    return same(names == found.keys() and all(torch.equal(t, found[n]) for n, t in due.values()))


def saving_job(mesh: DeviceMesh, case: str) -> Errors:
    """In one file, then in several, then in one again, in the same folder."""
    found, reference, folder = Findings(), built(case), shared_folder()
    model = sharded(case, reference, mesh["tp"], True)
    for number, most in enumerate((ONE, SEVERAL, SEVERAL, ONE)):
        tpplan.save_checkpoint(model, folder, most)
        dist.barrier()
        found.add(f"{number}", holds(folder, reference))
        names = {p.name for p in folder.iterdir()}
        files = {p for p in names if p.endswith(".safetensors")}
        listed = {stored.path.name for stored in stored_in(folder).values()}
        found.add(f"{number}: no other files", same(files == listed))
        found.add(f"{number}: index", same((INDEX in names) == (most == SEVERAL)))
        found.add(f"{number}: draft", same(not any(n.startswith(".") for n in names)))
        dist.barrier()
    found.add("generation", same((folder / "generation_config.json").exists()))
    again = type(reference).from_pretrained(folder).state_dict()
    alike = all(torch.equal(t, again[n]) for n, t in reference.state_dict().items())
    found.add("by transformers", same(alike))
    found.add("one file", same((folder / SINGLE).exists()))
    return found.errors


@pytest.mark.parametrize("shape", ["2x2", "1x4"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.turns(48)
def test_saving(ranks: Ranks, case: str, shape: str) -> None:
    assert not beyond(ranks.run(shape, saving_job, case))


def round_job(mesh: DeviceMesh, case: str) -> Errors:
    """From four ranks to two pairs that FSDP2 cuts further, and to a whole model."""
    found, reference = Findings(), built(case)
    first, second = shared_folder(), shared_folder()
    everyone = DeviceMesh("cpu", range(4), mesh_dim_names=("tp",))
    tpplan.save_checkpoint(sharded(case, reference, everyone, False), first, SEVERAL)
    dist.barrier()
    model = sharded(case, built(case, seed=2), mesh["tp"], True)
    fully_shard(model, mesh=mesh["dp"])
    tpplan.load_checkpoint(model, first)
    tpplan.save_checkpoint(model, second)
    dist.barrier()
    found.add("second", holds(second, reference))
    whole = built(case, seed=3)
    tpplan.load_checkpoint(whole, second)
    state = whole.state_dict()
    alike = all(torch.equal(t, state[n]) for n, t in reference.state_dict().items())
    found.add("whole", same(alike))
    return found.errors


@pytest.mark.parametrize("case", CASES)
@pytest.mark.turns(48)
def test_round_trip(ranks: Ranks, case: str) -> None:
    assert not beyond(ranks.run("2x2", round_job, case))


def different_job(mesh: DeviceMesh) -> Errors:
    """Ranks that hold different models are told so, all of them; nothing is left behind."""
    folder = shared_folder()
    model = nn.Linear(3, 3, bias=dist.get_rank() != 3)
    with pytest.raises(ValueError, match="rank 3 holds another model than rank 0: bias differ"):
        tpplan.save_checkpoint(model, folder)
    return {"nothing": same(not list(folder.iterdir()))}


def failing_job(mesh: DeviceMesh) -> Errors:
    """A folder that cannot be made is an error on every rank."""
    folder = shared_folder() / "file"
    if dist.get_rank() == 0:
        folder.write_text("in the way")
    dist.barrier()
    with pytest.raises(ValueError, match="was not saved: rank 0 stopped with NotADirectoryError"):
        tpplan.save_checkpoint(nn.Linear(3, 3), folder)
    return {"left": same(folder.read_text() == "in the way")}


@pytest.mark.parametrize("job", [different_job, failing_job])
def test_refused_on_every_rank(ranks: Ranks, job: object) -> None:
    assert not beyond(ranks.run("1x4", job))


def test_one_process(tmp_path: Path) -> None:
    model = built("gpt2")
    tpplan.save_checkpoint(model, tmp_path / "new" / "folder")
    assert not holds(tmp_path / "new" / "folder", model)
