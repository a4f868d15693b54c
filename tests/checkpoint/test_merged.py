"""Mixtures whose files have a tensor for each matrix of each expert, as transformers writes."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import tpplan
from benchmarks import zoo
from tests.compare import Errors, Findings, beyond, same
from tests.ranks import Ranks
from tests.rewrite import SIZES

# matrices renamed and stacked, gate and up one after the other, packed files, other names
TYPES = ("mixtral", "qwen3_moe", "deepseek_v3", "granitemoe", "phimoe", "jamba")
ROOM = 1.02


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each type, as ``save_pretrained`` leaves it."""
    folder = tmp_path_factory.mktemp("mixtures")
    for name in TYPES:
        zoo.tiny(name).save_pretrained(folder / name)  # type: ignore[operator]
    return folder


@pytest.mark.parametrize("name", TYPES)
def test_whole(folder: Path, name: str) -> None:
    expected, model = zoo.tiny(name).state_dict(), zoo.tiny(name, seed=9)
    stored = load_file(folder / name / "model.safetensors")
    assert stored.keys() != expected.keys()
    tpplan.load_checkpoint(model, folder / name)
    assert all(torch.equal(value, expected[n]) for n, value in model.state_dict().items())


def sharded_job(mesh: DeviceMesh, folder: str, name: str) -> Errors:
    """Each rank reads its part, and no other's."""
    found = Findings()
    expected = dict(zoo.tiny(name).named_parameters())
    model = tpplan.parallelize(zoo.tiny(name, seed=9), "auto", mesh=mesh, prove=False)
    loaded = tpplan.load_checkpoint(model, folder)
    held = 0
    for n, p in model.named_parameters():
        whole = p.full_tensor() if isinstance(p, DTensor) else p
        found.add(n, same(torch.equal(whole, expected[n])))
        held += (p.to_local() if isinstance(p, DTensor) else p).nbytes
    held += sum(b.nbytes for n, b in model.named_buffers() if n in model.state_dict())
    found.add("bytes read", same(loaded.bytes_read <= ROOM * held))
    return found.errors


@SIZES
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_sharded(ranks: Ranks, folder: Path, name: str, tp: int) -> None:
    assert not beyond(ranks.run(tp, sharded_job, str(folder / name), name))


def test_an_expert_is_missing(folder: Path, tmp_path: Path) -> None:
    stored = load_file(folder / "mixtral" / "model.safetensors")
    lost = next(n for n in stored if n.endswith("experts.3.w1.weight"))
    del stored[lost]
    save_file(stored, tmp_path / "model.safetensors")
    model = zoo.tiny("mixtral", seed=9)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(tpplan.CheckpointError, match=r"missing: model.layers.\d.mlp.experts"):
        tpplan.load_checkpoint(model, tmp_path)
    assert all(torch.equal(value, before[n]) for n, value in model.state_dict().items())
