"""Adapters for a checkpoint that no rank holds whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from benchmarks import zoo
from tests.checkpoint.folders import shared_folder
from tests.compare import Errors, Findings, beyond, compare_parameters, error, full, same, step
from tests.models import hf, token_ids, weighed
from tests.ranks import Ranks
from tests.rewrite import MODES, SIZES


def adapted(model: Any, targets: list[str], **options: Any) -> Any:
    """With LoRA of which peft draws the numbers."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM", **options)
    return get_peft_model(model, config)


MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (hf, {"targets": ["q_proj", "o_proj", "down_proj"], "modules_to_save": ["lm_head"]}),
    "phi3": (lambda: hf("Phi3"), {"targets": ["qkv_proj"], "init_lora_weights": "gaussian"}),
    # of its file each matrix of each expert is another tensor, and all are one in the model
    "mixtral": (lambda: zoo.tiny("mixtral"), {"targets": ["q_proj", "v_proj"]}),
}


def pretrained_job(mesh: DeviceMesh, sp: bool, name: str) -> Errors:
    """The base model's file, and what peft would have drawn where the first rank draws."""
    found, folder = Findings(), shared_folder(mesh.get_group())
    make, options = MODELS[name]
    reference = make()
    if mesh.get_local_rank() == 0:
        reference.save_pretrained(folder)
    dist.barrier(group=mesh.get_group())
    torch.manual_seed(7)
    reference = adapted(reference, **options)
    torch.manual_seed(7 + mesh.get_local_rank())
    model: Any = tpplan.from_pretrained(
        folder, mesh=mesh, sequence_parallel=sp, adapt=lambda m: adapted(m, **options)
    )
    found.add("values", compare_parameters(reference, model))
    trained = [{n for n, p in m.named_parameters() if p.requires_grad} for m in (reference, model)]
    found.add("trained", same(trained[0] == trained[1]))
    ids = token_ids(2, 7, seed=3)

    def run(m: Any) -> dict[str, torch.Tensor]:
        out = m(input_ids=ids, labels=ids)
        return {"loss": out.loss, "objective": weighed(out.logits)}

    for m in (reference, model):
        for n, p in sorted(m.named_parameters()):
            if "lora_B" in n:  # which are zero, and so are the gradients of what they multiply
                nn.init.constant_(p, 0.02)
    found.add("step", step(reference.eval(), model.eval(), run, plain=False))
    return found.errors


@SIZES
@MODES
@pytest.mark.parametrize("name", MODELS)
def test_from_a_folder(ranks: Ranks, name: str, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, pretrained_job, sp, name))


def config_job(mesh: DeviceMesh) -> Errors:
    """A new model, with the adapters of the unsharded one."""
    found, like = Findings(), hf()
    torch.manual_seed(7)
    reference = adapted(type(like)(like.config), ["q_proj", "o_proj"]).eval()
    torch.manual_seed(7)
    model: Any = tpplan.from_pretrained(
        like.config, mesh=mesh, adapt=lambda m: adapted(m, ["q_proj", "o_proj"])
    )
    found.add("values", compare_parameters(reference, model))
    ids = token_ids(2, 7, seed=3)
    with torch.no_grad():
        found.add("logits", error(reference(input_ids=ids).logits, full(model(ids).logits)))
    return found.errors


def test_from_a_config(ranks: Ranks) -> None:
    assert not beyond(ranks.run(2, config_job))


def test_in_one_process(tmp_path: Path) -> None:
    hf().save_pretrained(tmp_path)
    model: Any = tpplan.from_pretrained(tmp_path, adapt=lambda m: adapted(m, ["q_proj"]))
    assert not any(p.is_meta for p in model.parameters())
    assert not beyond([compare_parameters(hf(), model.unload())], 0.0)


def test_what_returns_no_model(tmp_path: Path) -> None:
    hf().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"adapt returned a NoneType, not an nn\.Module"):
        tpplan.from_pretrained(tmp_path, adapt=lambda m: None)  # type: ignore[arg-type,return-value]


def test_adapters_without_numbers(tmp_path: Path) -> None:
    """Made on the meta device, they have none, and no file of the base model has."""
    hf().save_pretrained(tmp_path)
    model = adapted(hf(device="meta"), ["q_proj"])
    with pytest.raises(tpplan.CheckpointError) as caught:
        tpplan.load_checkpoint(model, tmp_path)
    assert "q_proj.lora_A.default.weight is an adapter's, on the meta device" in str(caught.value)
    assert "missing" not in str(caught.value)
    assert all(p.is_meta for p in model.parameters())


def test_files_of_the_adapted_model(tmp_path: Path) -> None:
    """They have all: nothing is left as it is."""
    model = adapted(hf(), ["q_proj"])
    tpplan.save_checkpoint(model, tmp_path)
    other = adapted(hf(seed=3), ["q_proj"])
    tpplan.load_checkpoint(other, tmp_path)
    assert not beyond([compare_parameters(model, other)], 0.0)
