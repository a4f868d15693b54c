"""The dry run: exact counts and bytes, for any size, without ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from tests.gpt import GPT
from tests.models import FAMILIES, SHARDED_LOGITS, hf
from tests.ranks import Ranks
from tpplan.simulate import Recorder

pytestmark = pytest.mark.turns(4)

NONE = {"all_reduce": 0, "all_gather": 0, "reduce_scatter": 0}


@pytest.mark.turns(48)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("layers", [1, 3])
def test_the_floor_is_met(family: str, tp: int, layers: int) -> None:
    model = hf(family, device="meta", num_hidden_layers=layers)
    sites = 2 * layers + 1
    plain = tpplan.dry_run(model, SHARDED_LOGITS, tp, 2, 16, sequence_parallel=False)
    assert plain.counts("forward") == {**NONE, "all_reduce": sites}
    assert plain.counts("backward") == {**NONE, "all_reduce": sites}
    in_region = int(family == "Qwen3")  # the per-head norms
    assert plain.counts("gradient_sync") == {**NONE, "all_reduce": in_region}

    split = tpplan.dry_run(model, SHARDED_LOGITS, tp, 2, 13)
    assert split.counts("forward") == {**NONE, "all_gather": sites, "reduce_scatter": sites}
    assert split.counts("backward") == split.counts("forward")
    assert split.counts("gradient_sync") == {**NONE, "all_reduce": 1}
    assert split.counts("optimizer") == {**NONE, "all_reduce": 1}  # clipping


def test_full_logits_cost_one_gather_at_the_head() -> None:
    report = tpplan.dry_run(hf(device="meta"), "llama.yaml", 2, 1, 16)
    (extra,) = [c for c in report.collectives if c.reason.startswith("logits")]
    assert (extra.module, extra.kind, extra.phase) == ("lm_head", "all_gather", "forward")
    assert report.counts("forward") == {**NONE, "all_gather": 6, "reduce_scatter": 5}


def test_every_collective_names_a_module_and_a_reason() -> None:
    model = hf("Qwen3", device="meta")
    modules = {name for name, _ in model.named_modules()}
    report = tpplan.dry_run(model, "llama.yaml", 4, 2, 16)
    for c in report.collectives:
        assert c.module in modules
        assert c.reason
        no_module = c.phase in ("gradient_sync", "optimizer")
        assert (c.module == "") == no_module, c
        assert (c.rule is None) == no_module, c


def test_bytes_are_those_of_the_ring() -> None:
    """4·b·s·h·(N-1)/N elements a layer forward, in both modes (DESIGN and ANCHORS: the ring)."""
    batch, length, width, layers, tp = 2, 16, 64, 2, 4
    model = hf(device="meta", num_hidden_layers=layers)
    element = torch.float32.itemsize
    activation = batch * length * width * element
    sent = (2 * layers + 1) * 2 * activation * (tp - 1) // tp
    for sequence_parallel in (False, True):
        report = tpplan.dry_run(
            model, SHARDED_LOGITS, tp, batch, length, sequence_parallel=sequence_parallel
        )
        assert report.bytes_sent("forward") == sent
        assert report.bytes_sent("backward") == sent


def test_parameters_per_rank() -> None:
    model = hf(device="meta", vocab_size=128)
    report = tpplan.dry_run(model, "llama.yaml", 2, 1, 8)
    total = sum(p.numel() for p in model.parameters())
    whole = sum(
        p.numel() for n, p in model.named_parameters() if n.endswith(("norm.weight", "o_proj.bias"))
    ) + sum(p.numel() for n, p in model.named_parameters() if n.endswith("down_proj.bias"))
    assert report.parameter_counts == {"total": total, "per_rank": (total - whole) // 2 + whole}
    assert report.memory.parameters_per_rank == 4 * report.parameter_counts["per_rank"]


def test_the_model_is_not_touched() -> None:
    model = hf()
    before = {n: (id(p), p.detach().clone()) for n, p in model.named_parameters()}
    tpplan.dry_run(model, "llama.yaml", 4, 1, 8)
    for name, p in model.named_parameters():
        assert before[name][0] == id(p)
        assert torch.equal(before[name][1], p)
        assert p.grad is None
    assert not dist.is_initialized()


def test_a_large_model_from_meta_without_memory() -> None:
    """Llama-3-70B: its shape, not its weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**shape, **heads, head_dim=128))
    report = tpplan.dry_run(model, SHARDED_LOGITS, 8, 1, 8192)
    assert report.counts("forward") == {**NONE, "all_gather": 161, "reduce_scatter": 161}
    assert report.parameter_counts["total"] == 70_553_706_496
    assert "70.55 B in all" in str(report)


def test_text_folds_identical_layers() -> None:
    model = hf(device="meta", num_hidden_layers=7)
    lines = str(tpplan.dry_run(model, "llama.yaml", 2, 1, 8)).splitlines()
    (row,) = [x for x in lines if x.startswith("model.layers.*.self_attn.q_proj.weight")]
    assert row.split() == [
        "model.layers.*.self_attn.q_proj.weight", "7", "64×64", "Shard(0)", "32×64", "colwise",
    ]  # fmt: skip
    assert max(map(len, lines)) <= 120


def test_one_rank_needs_no_collectives() -> None:
    report = tpplan.dry_run(GPT(), "gpt", 1, 1, 8)
    assert report.collectives == ()
    assert report.parameter_counts["total"] == report.parameter_counts["per_rank"]
    assert "No collectives" in str(report)


def outside_the_model(mesh: DeviceMesh) -> Any:
    with Recorder() as recorder, recorder.during("optimizer"):
        dist.all_reduce(torch.ones(8), group=mesh.get_group())
    return [(c.phase, c.kind, c.module, c.bytes) for c in recorder.collectives]


def test_collectives_of_the_users_own_are_recorded(ranks: Ranks) -> None:
    sent = 2 * 8 * 4 // 2  # of two ranks, in a world of four
    for found in ranks.run(2, outside_the_model):
        assert found == [("optimizer", "all_reduce", "", sent)]


def during_a_run(mesh: DeviceMesh) -> Any:
    report = tpplan.dry_run(hf(device="meta"), SHARDED_LOGITS, 8 // 2, 1, 16)
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=mesh.get_group())
    return report.counts("forward"), tensor.tolist(), dist.get_backend()


def test_in_the_middle_of_a_real_run(ranks: Ranks) -> None:
    for forward, reduced, backend in ranks.run(2, during_a_run):
        assert forward == {**NONE, "all_gather": 5, "reduce_scatter": 5}
        assert (reduced, backend) == ([2.0] * 3, "gloo")
