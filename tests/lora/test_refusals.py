"""What cannot be sharded, or not any more, is refused in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from tests.compare import Errors, beyond, compare_parameters
from tests.lora.adapted import llama, lora
from tests.models import hf, sharded
from tests.planner.helpers import RULES, Layer, Stack, stream
from tests.ranks import Ranks


def problem(model: nn.Module, plan: Any = "llama.yaml", **options: Any) -> str:
    with pytest.raises(tpplan.PlanError) as caught:
        tpplan.dry_run(model, plan, tp=2, **options)
    return str(caught.value)


def test_dora() -> None:
    said = problem(llama(["q_proj", "down_proj"], use_dora=True))
    assert "colwise: its adapter is a DoraLinearVariant (DoRA is one), which cannot be" in said
    assert "rowwise: its adapter is a DoraLinearVariant" in said
    assert "no rule mentions" not in said


def test_an_embedding() -> None:
    said = problem(llama(["embed_tokens", "q_proj"]))
    assert "vocab: its adapter is a peft.tuners.lora.layer.Embedding, which cannot be" in said


def test_another_method() -> None:
    from peft import IA3Config, get_peft_model

    config = IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    assert "its adapter is a peft.tuners.ia3.layer.Linear" in problem(get_peft_model(hf(), config))


def test_a_scattered_result() -> None:
    rules = {"layers.0.fc": "colwise", "layers.0.out": {"style": "rowwise", "output": "shard"}}
    model = lora(Stack(lambda i: Layer(), count=1), ["out"])
    said = problem(model, {"tpplan": 1, "rules": rules}, inputs=stream(dtype=torch.float32))
    assert "with its options no style suits the factors of its adapter" in said


def test_a_replicated_layer_has_any_adapter() -> None:
    rules = {"layers.0.*": "replicate", "layers.1.fc": "colwise", "layers.1.out": "rowwise"}
    model = lora(Stack(lambda i: Layer()), ["layers.0.fc"], use_dora=True)
    plan = {"tpplan": 1, "rules": rules, "sequence_parallel": False}
    tpplan.verify(model, plan, tp=2, inputs=stream(dtype=torch.float32))


class Packed(torch.Tensor):
    """Numbers that are kept in a way of their own."""

    @staticmethod
    def __new__(cls, shape: tuple[int, ...]) -> Packed:
        return torch.Tensor._make_wrapper_subclass(cls, shape)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls(args[0].shape) if func is torch.ops.aten.detach.default else NotImplemented


@pytest.mark.parametrize("weight", [Packed((4, 4)), torch.zeros(4, 4, dtype=torch.int8)])
def test_quantised_weights(weight: torch.Tensor) -> None:
    model = hf()
    layer = model.model.layers[0].mlp.down_proj
    layer.weight = nn.Parameter(weight, requires_grad=False)
    kind = "Packed" if isinstance(weight, Packed) else "int8"
    assert f"its weight is quantised ({kind}), which cannot be cut" in problem(model)


def message(call: Any) -> str:
    with pytest.raises(ValueError) as caught:
        call()
    return str(caught.value)


def after_job(mesh: DeviceMesh) -> tuple[Errors, list[str]]:
    """Adapters that come too late change nothing."""
    from peft import LoraConfig

    reference = hf()
    model = sharded(reference, mesh, sp=True)
    said = [message(lambda: lora(model, ["q_proj"]))]
    unchanged = compare_parameters(reference, model)
    adapted = sharded(llama(["q_proj"]), mesh, sp=True)
    said.append(message(lambda: adapted.add_adapter("b", LoraConfig(target_modules=["v_proj"]))))
    return unchanged, said


def test_adapters_come_first(ranks: Ranks) -> None:
    for unchanged, said in ranks.run(2, after_job):
        assert not beyond([unchanged], 0.0)
        assert all("before tpplan.parallelize" in each for each in said)


def unloading_job(mesh: DeviceMesh) -> str:
    model = lora(Stack(lambda i: Layer()), ["fc"])
    plan = {"tpplan": 1, "rules": RULES}
    tpplan.parallelize(model, plan, mesh, inputs=stream(dtype=torch.float32), prove=False)
    return message(model.merge_and_unload)


def test_a_layer_at_whose_adapter_the_input_enters_stays(ranks: Ranks) -> None:
    assert "layers.0.fc: its input is gathered for" in ranks.run(2, unloading_job)[0]
