"""What peft puts in front of the sequence, around a model that is sharded."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tests.compare import Errors, Findings, beyond, error, full
from tests.models import hf, sharded
from tests.ranks import Ranks

IDS = torch.arange(14).reshape(2, 7)


def prompted(model: nn.Module, kind: str) -> nn.Module:
    """``model`` with three tokens of its own in front of what it is given, or keys and values."""
    import peft

    torch.manual_seed(1)
    configs = {
        "tokens": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        "keys": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    }
    return peft.get_peft_model(model, configs[kind]())  # type: ignore[return-value]


def tokens_job(mesh: DeviceMesh, sp: bool) -> Errors:
    found = Findings()
    reference = prompted(hf(), "tokens")
    model = prompted(sharded(hf(), mesh, sp=sp), "tokens")
    losses = []
    for one in (reference, model):
        losses.append(one(input_ids=IDS, labels=IDS).loss)
        losses[-1].backward()
    found.add("loss", error(*losses))
    trained = [[p for p in one.parameters() if p.requires_grad] for one in (reference, model)]
    for theirs, ours in zip(*trained, strict=True):
        assert theirs.grad is not None and ours.grad is not None
        found.add("gradient", error(theirs.grad, full(ours.grad)))
    return found.errors


@pytest.mark.parametrize("sp", [False, True], ids=["TP", "TP+SP"])
def test_tokens(ranks: Ranks, sp: bool) -> None:
    assert beyond(ranks.run(2, tokens_job, sp), 1e-5) == {}


def keys_job(mesh: DeviceMesh) -> str:
    model = prompted(sharded(hf(), mesh, sp=False), "keys")
    with pytest.raises(ValueError) as caught:
        model(input_ids=IDS)
    return str(caught.value)


def test_keys_and_values(ranks: Ranks) -> None:
    for said in ranks.run(2, keys_job):
        assert said.startswith("prefix tuning gives the layers keys and values of all heads")
