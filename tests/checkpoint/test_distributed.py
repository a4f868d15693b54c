"""What ``torch.distributed.checkpoint`` saved, into sharded models."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import tpplan
from tests.checkpoint.folders import shared_folder
from tests.compare import Errors, Findings, beyond, same
from tests.models import hf
from tests.ranks import Ranks
from tests.rewrite.rows import CASES, built, canonical, sharded
from tpplan.checkpoint import CheckpointError
from tpplan.checkpoint.distributed import _Contents

CONTENTS = ".metadata"


def loading_job(mesh: DeviceMesh, case: str, alone: bool) -> Errors:
    """Saved at tp 4, alone or as a part; loaded at tp 2 that FSDP2 cuts further, from meta."""
    found, reference, folder = Findings(), built(case), shared_folder()
    everyone = DeviceMesh("cpu", range(4), mesh_dim_names=("tp",))
    saved = sharded(case, reference, everyone, False)
    state: dict[str, Any] = saved.state_dict()
    if not alone:
        optimizer = torch.optim.AdamW(saved.parameters())
        moments = get_optimizer_state_dict(saved, optimizer)
        state = {"model": state, "optimizer": moments, "step": 3}
    dcp.save(state, checkpoint_id=folder)
    dist.barrier()
    meta = built(case, device="meta")
    plan = CASES[case][0]
    model = tpplan.parallelize(meta, plan, mesh, sequence_parallel=True, prove=False)
    fully_shard(model, mesh=mesh["dp"])
    loaded = tpplan.load_checkpoint(model, folder)
    found.add("placed", canonical(reference, model))
    whole = built(case, seed=3).double()
    tpplan.load_checkpoint(whole, folder)
    pairs = zip(whole.parameters(), reference.parameters(), strict=True)
    found.add("whole", same(all(torch.equal(ours, theirs.double()) for ours, theirs in pairs)))
    size = sum(t.nbytes for t in reference.parameters())
    found.add("a part is read", same(0 < loaded.bytes_read < 0.5 * size))
    return found.errors


@pytest.mark.turns(48)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("alone", [False, True])
def test_loading(ranks: Ranks, case: str, alone: bool) -> None:
    assert not beyond(ranks.run("2x2", loading_job, case, alone))


def tied_job(mesh: DeviceMesh) -> Errors:
    """Saved of an untied model, for one whose head is its table."""
    found, folder = Findings(), shared_folder()
    reference = hf(tie_word_embeddings=False)
    for kind in ("equal", "another"):
        if kind == "equal":
            reference.lm_head.weight.data.copy_(reference.model.embed_tokens.weight)
        else:
            reference.lm_head.weight.data.add_(1)
        dcp.save(reference.state_dict(), checkpoint_id=folder / kind)
        dist.barrier()
        meta = hf(device="meta", tie_word_embeddings=True)
        model = tpplan.parallelize(meta, "llama.yaml", mesh, prove=False)
        said = ""
        try:
            tpplan.load_checkpoint(model, folder / kind)
        except CheckpointError as error:
            said = str(error)
        if kind == "equal":
            found.add(kind, {**canonical(reference, model), "said": same(not said)})
        else:
            found.add(kind, same("two for one: model.embed_tokens.weight and lm_head" in said))
            found.add("untouched", same(model.lm_head.weight.is_meta))
    return found.errors


def test_one_tensor_of_the_model_and_two_of_the_folder(ranks: Ranks) -> None:
    assert not beyond(ranks.run("2x2", tied_job))


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dcp.save({"model": model().state_dict()}, checkpoint_id=tmp_path / "saved")
    return tmp_path / "saved"


def test_another_model(folder: Path) -> None:
    """All that does not fit is said, before anything is changed."""
    other = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5, affine=False), nn.Linear(5, 5))
    before = {name: t.clone() for name, t in other.state_dict().items()}
    with pytest.raises(CheckpointError) as raised:
        tpplan.load_checkpoint(other, folder)
    said = str(raised.value)
    for part in ("another shape: 0.weight", "missing: 2.bias", "unexpected: 1.weight"):
        assert part in said
    assert all(torch.equal(t, before[name]) for name, t in other.state_dict().items())


def test_written_by_python_3_13() -> None:
    """There a path is of a module that other versions do not have."""
    written = b"cpathlib._local\nPosixPath\n(Vsome/folder\ntR."
    assert _Contents(io.BytesIO(written)).load() == Path("some/folder")


def truncated(folder: Path) -> str:
    file = next(folder.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-100])
    return "ends before the numbers"


def missing(folder: Path) -> str:
    next(folder.glob("*.distcp")).unlink()
    return "is missing"


def no_contents(folder: Path) -> str:
    (folder / CONTENTS).write_bytes(b"not a pickle")
    return "cannot be read"


class Evil:
    """Runs code when it is read."""

    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def evil(folder: Path) -> str:
    (folder / CONTENTS).write_bytes(pickle.dumps(Evil()))
    return "system is no part of a checkpoint"


def outside(folder: Path) -> str:
    contents = pickle.loads((folder / CONTENTS).read_bytes())
    for place in contents.storage_data.values():
        (folder.parent / place.relative_path).write_bytes(
            (folder / place.relative_path).read_bytes()
        )
        place.relative_path = f"../{place.relative_path}"
    (folder / CONTENTS).write_bytes(pickle.dumps(contents))
    return "is outside the folder"


@pytest.mark.parametrize("damage", [truncated, missing, no_contents, evil, outside])
def test_damaged(folder: Path, monkeypatch: pytest.MonkeyPatch, damage: Any) -> None:
    monkeypatch.chdir(folder)
    said = damage(folder)
    with pytest.raises(CheckpointError, match=said):
        tpplan.load_checkpoint(model(), folder)
    assert not (folder / "ran").exists()
