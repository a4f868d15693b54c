"""Models of transformers from a folder, and from a config."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from tests.checkpoint.folders import shared_folder
from tests.compare import Errors, Findings, beyond, compare_parameters, same, step
from tests.ranks import Ranks
from tests.rewrite import MODES, SIZES
from tests.rewrite.rows import CASES, built, labelled


def pretrained_job(mesh: DeviceMesh, sp: bool, case: str) -> Errors:
    """One line, and the model is that of transformers' own."""
    found, folder = Findings(), shared_folder(mesh.get_group())
    reference = built(case)
    if mesh.get_local_rank() == 0:
        reference.generation_config.max_new_tokens = 7
        reference.save_pretrained(folder)
    dist.barrier(group=mesh.get_group())
    model = tpplan.from_pretrained(folder, mesh=mesh, sequence_parallel=sp)
    found.add("in evaluation", same(not model.training))
    found.add("generation", same(model.generation_config.max_new_tokens == 7))
    found.add("values", compare_parameters(reference, model))
    found.add("step", step(reference.eval(), model, labelled(2, 9, 1)))
    return found.errors


@SIZES
@MODES
@pytest.mark.parametrize("case", ["gpt2", "llama 1"])
def test_from_a_folder(ranks: Ranks, case: str, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, pretrained_job, sp, case))


def config_job(mesh: DeviceMesh) -> Errors:
    """The values of an unsharded model of the same seed, whatever tp."""
    config = transformers.LlamaConfig(**CASES["llama 2"][2], num_hidden_layers=2)
    torch.manual_seed(5)
    reference = transformers.LlamaForCausalLM(config)
    torch.manual_seed(5)
    model = tpplan.from_pretrained(config, mesh=mesh)
    return compare_parameters(reference, model)


@pytest.mark.parametrize("tp", [2, 4])
def test_from_a_config(ranks: Ranks, tp: int) -> None:
    assert not beyond(ranks.run(tp, config_job), 0.0)


def test_one_process(tmp_path: Path) -> None:
    reference = built("phi3")
    reference.save_pretrained(tmp_path)
    model = tpplan.from_pretrained(tmp_path)
    state = model.state_dict()
    assert all(torch.equal(t, state[n]) for n, t in reference.state_dict().items())
