"""Memory as tracked, against what real runs allocate and hold."""

from __future__ import annotations

import functools
import gc
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import tpplan
from benchmarks import zoo
from tests.models import hf
from tests.ranks import Ranks
from tests.rewrite import MODES, SIZES
from tpplan.compat import fake_world
from tpplan.simulate.execute import objective

BATCH, LENGTH = 2, 256
WIDE = {
    "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "vocab_size": 2048,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
    "max_position_embeddings": LENGTH,
}  # fmt: skip


def llama() -> Any:
    return hf("Llama", **WIDE).train()


def gpt2() -> Any:
    """Packed and transposed weights, dropout in training."""
    wide = {"n_embd": 256, "n_inner": 1024, "n_layer": 4, "n_head": 8, "vocab_size": 2048}
    return zoo.tiny("gpt2", **wide, n_positions=LENGTH).train()


def bert() -> Any:
    """An encoder with tied embeddings, without a causal mask."""
    wide = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
    size = {"num_attention_heads": 8, "vocab_size": 2048, "max_position_embeddings": LENGTH}
    return zoo.tiny("bert", **wide, **size).train()


MODELS = {"llama": llama, "gpt2": gpt2, "bert": bert}


def call(model: Any) -> dict[str, Any]:
    ids = torch.randint(5, 2048, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def held(tensors: Any) -> int:
    """Bytes of this rank's shards."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum(t.numel() * t.element_size() for t in local)


def peaks(run: Any, marks: list[int]) -> list[int]:
    """The most that was allocated, over what there was at first, in each part of ``run``."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    found = [0] * len(marks)
    now = 0
    for at, change in changes:
        now += change
        part = sum(at > mark for mark in marks[:-1])
        found[part] = max(found[part], now)
    return found


def allocated(name: str, sp: bool, again: bool) -> list[int]:
    """What the first of two ranks really allocates in forward and in backward.

    Real tensors and kernels, on a group that sends nothing: gloo frees in threads of its own, which
    torch's profiler does not see.
    """
    model = MODELS[name]()
    inputs = call(model)
    marks: list[int] = []

    def step() -> None:
        marks.clear()
        out = model(**inputs)
        result = objective(out)
        assert result is not None
        marks.append(time.time_ns())
        result.backward(torch.ones_like(result))
        marks.append(time.time_ns())

    with fake_world(2) as mesh:
        tpplan.parallelize(
            model, "auto", mesh, sequence_parallel=sp, src_data_rank=None, prove=False
        )
        if again:
            recompute(model)
        step()
        model.zero_grad()
        gc.collect()
        return peaks(step, marks)


def states_job(mesh: DeviceMesh, name: str, sp: bool) -> dict[str, int]:
    """What a rank holds after a step of AdamW."""
    model = MODELS[name]()
    tpplan.parallelize(model, "auto", mesh, sequence_parallel=sp, prove=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(**call(model)).loss.backward()
    optimizer.step()
    return {
        "parameters": held(model.parameters()),
        "gradients": held(p.grad for p in model.parameters()),
        "optimizer": held(v for s in optimizer.state.values() for v in s.values()),
    }


def recompute(model: nn.Module) -> None:
    """As the users of torch do it, layer by layer."""
    for path, layer in model.named_modules():
        if path.rpartition(".")[2].isdigit():
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)  # type: ignore[method-assign]


@pytest.mark.turns(48)
@MODES
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("name", list(MODELS))
def test_what_is_predicted_is_allocated(name: str, sp: bool, again: bool) -> None:
    model = MODELS[name]()
    report = tpplan.dry_run(
        model, "auto", 2, inputs=call(model), sequence_parallel=sp, checkpointing=again
    )
    memory = report.memory
    before = memory.parameters_per_rank + memory.buffers_per_rank + memory.optimizer_per_rank
    for phase, real in zip(("forward", "backward"), allocated(name, sp, again), strict=True):
        predicted = memory.peaks[phase].bytes - before
        assert predicted == pytest.approx(real, rel=0.05), phase


@SIZES
@MODES
@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.turns(48)
def test_states_are_exact(ranks: Ranks, name: str, tp: int, sp: bool) -> None:
    model = MODELS[name]()
    report = tpplan.dry_run(model, "auto", tp, inputs=call(model), sequence_parallel=sp)
    memory = report.memory
    first = ranks.run(tp, states_job, name, sp)[0]
    assert first == {
        "parameters": memory.parameters_per_rank,
        "gradients": memory.gradients_per_rank,
        "optimizer": memory.optimizer_per_rank,
    }


@pytest.mark.turns(24)
def test_the_other_run_is_the_one_with_checkpointing() -> None:
    kept = tpplan.dry_run(llama(), "llama.yaml", 2, BATCH, LENGTH)
    again = tpplan.dry_run(llama(), "llama.yaml", 2, BATCH, LENGTH, checkpointing=True)
    assert kept.other_memory == again.memory
    assert again.other_memory == kept.memory
    assert again.memory.peaks["backward"].bytes < kept.memory.peaks["backward"].bytes
    recomputed = again.counts("backward")
    assert recomputed["all_gather"] > kept.counts("backward")["all_gather"]


@pytest.mark.turns(24)
@pytest.mark.parametrize(
    ("optimizer", "each"),
    [("adamw", 8), ("adam", 8), ("rmsprop", 4), ("adagrad", 4), ("sgd-momentum", 4), ("sgd", 0)],
)
def test_optimizers_by_name(optimizer: str, each: int) -> None:
    model = hf(device="meta")
    report = tpplan.dry_run(model, "llama.yaml", 2, 1, 8, optimizer=optimizer)
    tensors = len(report.compiled.parameters)
    counters = 4 * tensors * (optimizer not in ("sgd", "sgd-momentum"))
    expected = each * report.parameter_counts["per_rank"] + counters
    assert report.memory.optimizer_per_rank == expected
    assert report.counts("optimizer")["all_reduce"] == 1


@pytest.mark.turns(12)
def test_an_optimizer_of_the_users_own_and_none() -> None:
    model = hf(device="meta")
    mine = tpplan.dry_run(model, "llama.yaml", 2, 1, 8, optimizer=lambda p: torch.optim.Adamax(p))
    assert mine.memory.optimizer_per_rank >= 8 * mine.parameter_counts["per_rank"]
    none = tpplan.dry_run(model, "llama.yaml", 2, 1, 8, optimizer=None)
    assert none.memory.optimizer_per_rank == 0
    assert "optimizer" not in none.memory.peaks
    with pytest.raises(ValueError, match="no optimizer 'adamv'; there are adamw"):
        tpplan.dry_run(model, "llama.yaml", 2, 1, 8, optimizer="adamv")


@pytest.mark.turns(12)
def test_master_weights_are_for_short_parameters() -> None:
    model = hf(device="meta", dtype=torch.bfloat16)
    model = model.to(torch.bfloat16)
    states = {}
    for master_weights in (True, False):
        report = tpplan.dry_run(model, "llama.yaml", 2, 1, 8, master_weights=master_weights)
        memory, count = report.memory, report.parameter_counts["per_rank"]
        counters = 4 * len(report.compiled.parameters)
        states[master_weights] = memory.states_per_rank - memory.buffers_per_rank - counters
    assert states == {True: 16 * count, False: 8 * count}
