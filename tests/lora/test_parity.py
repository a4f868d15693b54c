"""Adapted models, sharded by the plan of the model that was adapted: every gradient is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from tests.compare import Errors, beyond, step
from tests.lora.adapted import ALL, gpt2, llama, phi3
from tests.models import hf, sharded, token_ids, weighed
from tests.ranks import Ranks


def unfrozen(model: Any) -> Any:
    return model.requires_grad_()


MODELS: dict[str, tuple[Any, str]] = {
    "colwise": (lambda: llama(["q_proj", "v_proj"]), "auto"),
    "rowwise": (lambda: llama(["o_proj", "down_proj"]), "llama.yaml"),
    "all, the base trained too": (lambda: unfrozen(llama()), "llama.yaml"),
    "biases": (lambda: llama(lora_bias=True), "llama.yaml"),
    "one kv head": (lambda: llama(changes={"num_key_value_heads": 1}), "llama.yaml"),
    "gpt2": (gpt2, "gpt2.yaml"),
    "phi3": (phi3, "phi3.yaml"),
    "head": (lambda: llama(["lm_head", "q_proj"]), "llama.yaml"),
    "modules_to_save": (
        lambda: llama(["q_proj"], modules_to_save=["lm_head", "embed_tokens"]),
        "llama.yaml",
    ),
}


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.turns(24)
def test_simulated(name: str, tp: int) -> None:
    make, plan = MODELS[name]
    tpplan.verify(make(), plan, tp=tp)


@pytest.mark.turns(24)
def test_no_more_collectives_of_column_parallel_layers() -> None:
    """A works on what is gathered for the layer; of a row-parallel one it is summed by itself."""
    plain, columns, rows = (
        tpplan.dry_run(model, "llama.yaml", tp=2, seq=16).counts("forward")
        for model in (hf(), llama(["q_proj", "v_proj", "up_proj"]), llama(["o_proj"]))
    )
    assert columns == plain
    assert rows["reduce_scatter"] == plain["reduce_scatter"] + 2


def parity_job(mesh: DeviceMesh, sp: bool, dropout: float, targets: list[str]) -> Errors:
    """One step beside the unsharded model, on real ranks."""
    reference = unfrozen(llama(targets, lora_dropout=dropout))
    model = sharded(reference, mesh, sp)
    ids = token_ids(2, 7, seed=3)

    def run(model: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(11)
        out = model(input_ids=ids, labels=ids)
        return {"loss": out.loss, "logits": out.logits, "objective": weighed(out.logits)}

    return step(reference, model, run, plain=False)  # logits stay sharded beside labels


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
def test_on_ranks(ranks: Ranks, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, parity_job, sp, 0.0, ALL))


@pytest.mark.parametrize("sp", [False, True])
def test_dropout_of_a_whole_input(ranks: Ranks, sp: bool) -> None:
    """What is gathered for a column-parallel layer is dropped alike on all ranks, as unsharded."""
    assert not beyond(ranks.run(2, parity_job, sp, 0.3, ["q_proj", "v_proj", "up_proj"]))


def parts_job(mesh: DeviceMesh) -> int:
    """How many of a row of ones each rank drops of its part, in the adapter of ``down_proj``."""
    model = sharded(llama(["down_proj"], lora_dropout=0.5), mesh, sp=True)
    path = "base_model.model.model.layers.0.mlp.down_proj.lora_dropout.default"
    seen = []
    model.get_submodule(path).register_forward_hook(lambda m, i, out: seen.append(out == 0))
    model(input_ids=token_ids(2, 8, seed=3))
    bits = seen[0].flatten()[:48].tolist()
    return sum(bit << i for i, bit in enumerate(bits))


def test_dropout_of_columns(ranks: Ranks) -> None:
    """Each rank drops others of its columns."""
    first, second = ranks.run(2, parts_job)
    assert first != second
    assert 10 < first.bit_count() < 38
