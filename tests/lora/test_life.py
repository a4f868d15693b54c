"""What users of peft do with an adapted model, sharded, beside the unsharded one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.checkpoint.folders import shared_folder
from tests.compare import Errors, Findings, beyond, compare_parameters, error, full, same
from tests.lora.adapted import gpt2, llama, phi3
from tests.models import sharded, token_ids
from tests.ranks import Ranks


def one_head(seed: int = 5) -> Any:
    return llama(changes={"num_key_value_heads": 1}, seed=seed)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return full(model(input_ids=token_ids(2, 7, seed=9)).logits)


def using_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Steps, the adapter off, merged and unmerged, and taken out."""
    found, reference = Findings(), llama(changes={"num_key_value_heads": 1})
    model = sharded(reference, mesh, sp)
    pair = reference, model
    for m in pair:
        optimizer = torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2)
        for seed in range(2):
            ids = token_ids(2, 7, seed)
            m(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        m.eval()

    def both(case: str) -> None:
        found.add(case, error(*map(logits, pair)) / 10)  # AdamW enlarges what rounding leaves

    both("after steps")
    with reference.disable_adapter(), model.disable_adapter():
        both("disabled")
    ids = token_ids(2, 5, seed=4)
    texts = [
        m.generate(input_ids=ids, max_new_tokens=3, do_sample=False, pad_token_id=0) for m in pair
    ]
    found.add("generated", same(torch.equal(*texts)))
    for m in pair:
        m.merge_adapter()
    both("merged")
    for m in pair:
        m.unmerge_adapter()
    both("unmerged")
    pair = reference.merge_and_unload(), model.merge_and_unload()
    both("unloaded")
    found.add("names", same(pair[0].state_dict().keys() == pair[1].state_dict().keys()))
    return found.errors


@pytest.mark.parametrize("sp", [False, True])
def test_using_it(ranks: Ranks, sp: bool) -> None:
    assert not beyond(ranks.run(2, using_job, sp))


def merged_job(mesh: DeviceMesh, make: Any) -> Errors:
    """Merged layers have the unsharded model's numbers."""
    reference = make()
    model = sharded(reference, mesh, True, "auto")
    return compare_parameters(reference.merge_and_unload(), model.merge_and_unload())


@pytest.mark.turns(48)
@pytest.mark.parametrize("make", [phi3, gpt2, one_head])
def test_merging(ranks: Ranks, make: Any) -> None:
    assert not beyond(ranks.run(4, merged_job, make), 1e-6)


def saving_job(mesh: DeviceMesh, make: Any) -> Errors:
    """Adapters that are saved are those of the unsharded model, and load into either."""
    from peft import PeftModel, load_peft_weights

    found, reference = Findings(), make()
    model = sharded(reference, mesh, True, "auto")
    folder = shared_folder()
    model.save_pretrained(folder)
    written, base = load_peft_weights(str(folder)), make().unload()
    found.add("nothing of the base", same(not any("base_layer" in name for name in written)))
    found.add("unsharded", compare_parameters(reference, PeftModel.from_pretrained(base, folder)))
    other = sharded(make(6), mesh, False, "auto")
    other.load_adapter(folder, "default")
    with torch.no_grad():
        for name, value in other.state_dict().items():
            if "lora_" in name:
                found.add(name, error(reference.state_dict()[name], full(value)))
    dist.barrier()
    return found.errors


@pytest.mark.parametrize("make", [one_head, phi3, gpt2])
@pytest.mark.turns(48)
def test_saving(ranks: Ranks, make: Any) -> None:
    assert not beyond(ranks.run(4, saving_job, make), 0.0)
