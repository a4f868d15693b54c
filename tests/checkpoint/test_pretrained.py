"""Models of transformers from a folder, and from a config."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

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


CONFIGS: Mapping[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**CASES["llama 2"][2], num_hidden_layers=2),
    "gpt2": lambda: transformers.GPT2Config(n_embd=32, n_head=4, n_layer=2, vocab_size=64),
    "mixtral": lambda: transformers.MixtralConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        vocab_size=64,
    ),
}


def config_job(mesh: DeviceMesh, case: str) -> Errors:
    """The values of an unsharded model of the first rank's seed, whatever tp."""
    found, config = Findings(), CONFIGS[case]()
    torch.manual_seed(5)
    reference = transformers.AutoModelForCausalLM.from_config(config).eval()
    after = torch.get_rng_state()
    torch.manual_seed(5 + mesh.get_local_rank())
    before = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*whole on every rank.*")
        model = tpplan.from_pretrained(config, mesh=mesh)
    expected = before if mesh.get_local_rank() else after
    found.add("random state", same(torch.equal(torch.get_rng_state(), expected)))
    found.add("values", compare_parameters(reference, model))
    held = {name: t for name, t in model.named_buffers() if not isinstance(t, DTensor)}
    buffers = dict(reference.named_buffers())
    found.add("buffers", same(all(torch.equal(t, buffers[n]) for n, t in held.items())))
    return found.errors


@pytest.mark.parametrize("case", CONFIGS)
@pytest.mark.parametrize("tp", [2, 4])
def test_from_a_config(ranks: Ranks, case: str, tp: int) -> None:
    assert not beyond(ranks.run(tp, config_job, case), 0.0)


def looking_job(mesh: DeviceMesh) -> Errors:
    """A model whose code makes shapes of its numbers: whole on every rank, which is said."""
    config = CONFIGS["llama"]()
    kind = transformers.LlamaForCausalLM
    tidy = kind._init_weights

    def look(self: Any, module: torch.nn.Module) -> None:
        tidy(self, module)
        for parameter in module.parameters(recurse=False):
            torch.nonzero(parameter)

    kind._init_weights = look
    try:
        torch.manual_seed(5)
        reference = kind(config)
        torch.manual_seed(5)
        with pytest.warns(UserWarning, match="the model is built whole on every rank"):
            model = tpplan.from_pretrained(config, mesh=mesh)
    finally:
        kind._init_weights = tidy
    return compare_parameters(reference, model)


def test_whole(ranks: Ranks) -> None:
    assert not beyond(ranks.run(2, looking_job), 0.0)


def test_one_process(tmp_path: Path) -> None:
    reference = built("phi3")
    reference.save_pretrained(tmp_path)
    model = tpplan.from_pretrained(tmp_path)
    state = model.state_dict()
    assert all(torch.equal(t, state[n]) for n, t in reference.state_dict().items())


@pytest.mark.parametrize("stated", [None, "float32", "bfloat16"])
def test_the_dtype_of_the_config_or_of_the_files(tmp_path: Path, stated: str | None) -> None:
    built("llama 2").bfloat16().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": stated}))
    model: Any = tpplan.from_pretrained(tmp_path)
    assert {p.dtype for p in model.parameters()} == {getattr(torch, stated or "bfloat16")}
    assert model.config.dtype == getattr(torch, stated or "bfloat16")
