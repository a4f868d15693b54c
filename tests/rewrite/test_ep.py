"""Expert parallelism on real ranks, beside the unsharded model on the batches of all of them."""

from __future__ import annotations

import copy
import gc
import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import tpplan
from benchmarks import zoo
from tests.compare import Errors, Findings, beyond, error, same
from tests.ranks import Ranks
from tests.render.test_json import VALIDATOR
from tests.rewrite.ep import average, batch, errors_of, gradients, is_shared, mean_of, objective
from tests.rewrite.pairs import pair as built
from tests.rewrite.pairs import plan_of
from tpplan.simulate import Recorder

# gated experts, biases in turns, shared experts, latent attention
FAMILIES = ("mixtral", "gpt_oss", "qwen2_moe", "deepseek_v3")
WAYS = [
    ("ep2", False, False),
    ("ep4", False, False),
    ("ep2xtp2", False, False),
    ("ep2xtp2", True, False),
    ("ep2xtp2", False, True),
    ("ep2xtp2", True, True),
]
RATE = 0.5


def place(mesh: DeviceMesh) -> tuple[int, Any]:
    """Among the ranks of ep, and their group."""
    ep = mesh["ep"] if mesh.ndim > 1 else mesh
    return ep.get_local_rank(), ep.get_group()


def gradients_job(mesh: DeviceMesh, name: str, sp: bool, whole: bool) -> Errors:
    """Loss and gradients of one step; batches of other lengths."""
    found = Findings()
    reference, model = built(name, mesh, sp, whole)
    mine, group = place(mesh)
    losses = mean_of(reference, [batch(i) for i in range(group.size())])
    loss = objective(model, batch(mine))
    loss.backward()
    found.add("loss", error(losses[mine], loss.detach()))
    average(model, group)
    found.add("gradient", errors_of(gradients(reference), gradients(model)))
    return found.errors


def training_job(mesh: DeviceMesh, name: str, sp: bool) -> Errors:
    """Two steps of two batches each, layers recomputed."""
    found = Findings()
    reference, model = built(name, mesh, sp)
    mine, group = place(mesh)
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    both = [torch.optim.SGD(m.train().parameters(), lr=RATE) for m in (reference, model)]
    for number in range(2):
        for part in range(2):
            batches = [batch(100 * number + 10 * part + i, 5) for i in range(group.size())]
            due = mean_of(reference, batches)[mine]
            loss = objective(model, batches[mine])
            loss.backward()
            found.add(f"loss {number}, {part}", error(due, loss.detach()))
        average(model, group)
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
    held = [dict(m.named_parameters()) for m in (reference, model)]
    found.add("after two steps", errors_of(*held))  # type: ignore[arg-type]
    return found.errors


def starved_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """All tokens choose experts of the first rank, in training and without gradients."""
    found = Findings()
    reference, model = built("mixtral", mesh, sp)
    mine, group = place(mesh)

    def first_two(_: Any, args: Any, out: Any) -> Any:
        scores, weights, chosen = out
        return scores, weights, torch.arange(2).expand_as(chosen)

    for m in (reference, model):
        for layer in m.model.layers:  # type: ignore[union-attr]
            layer.mlp.gate.register_forward_hook(first_two)  # type: ignore[union-attr]
    losses = mean_of(reference, [batch(i) for i in range(group.size())])
    with torch.no_grad():
        found.add("loss", error(losses[mine], objective(model, batch(mine))))
    objective(model, batch(mine)).backward()
    average(model, group)
    theirs, ours = gradients(reference), gradients(model)
    found.add("all have gradients", same(None not in ours.values()))
    found.add("gradient", errors_of(theirs, ours))
    return found.errors


def fsdp_job(mesh: DeviceMesh, name: str) -> Errors:
    """FSDP2: experts over dp, all else over dp and ep; two steps."""
    found = Findings()
    reference, model = built(name, mesh["ep"], False)
    everyone = mesh["dp", "ep"]._flatten("dp_ep")
    for layer in model.model.layers:  # type: ignore[union-attr]
        if hasattr(layer.mlp, "experts"):  # type: ignore[union-attr]
            fully_shard(layer.mlp.experts, mesh=mesh["dp"])  # type: ignore[union-attr]
        fully_shard(layer, mesh=everyone)  # type: ignore[arg-type]
    fully_shard(model, mesh=everyone)
    mine = everyone.get_local_rank()
    both = [torch.optim.SGD(m.train().parameters(), lr=RATE) for m in (reference, model)]
    for number in range(2):
        batches = [batch(10 * number + i, 5) for i in range(everyone.size())]
        due = mean_of(reference, batches)[mine]
        loss = objective(model, batches[mine])
        loss.backward()
        found.add(f"loss {number}", error(due, loss.detach()))
        found.add(f"gradient {number}", errors_of(gradients(reference), gradients(model)))
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
    return found.errors


def three_job(mesh: DeviceMesh, name: str, sp: bool, save: str) -> Errors:
    """Ranks of dp, each of which has ranks of ep, and these ranks of tp: two backward passes."""
    found = Findings()
    reference = zoo.tiny(name)
    model = tpplan.parallelize(
        copy.deepcopy(reference), "auto", mesh=mesh, sequence_parallel=sp, save=save, prove=False
    )
    everyone = mesh["dp", "ep"]._flatten("dp_ep")
    mine, group = everyone.get_local_rank(), everyone.get_group()
    for part in range(2):
        batches = [batch(10 * part + i, 5) for i in range(4)]
        due = mean_of(reference, batches)[mine]
        loss = objective(model, batches[mine])
        loss.backward()
        found.add(f"loss {part}", error(due, loss.detach()))
    average(model, group)
    for parameter in model.parameters():
        if is_shared(parameter):  # means over ep already, not over dp
            assert isinstance(parameter.grad, DTensor)
            local = parameter.grad.to_local()
            dist.all_reduce(local, group=mesh["dp"].get_group())
            local.div_(2)
    found.add("gradient", errors_of(gradients(reference), gradients(model)))
    return found.errors


@pytest.mark.turns(48)
def test_three_dimensions() -> None:
    pool = Ranks(8)
    try:
        for sp, save in ((False, "gathered"), (True, "gathered"), (True, "shard")):
            assert not beyond(pool.run("dp2xep2xtp2", three_job, "mixtral", sp, save))
    finally:
        pool.close()


@pytest.mark.turns(32)
@pytest.mark.parametrize(("shape", "sp", "whole"), WAYS, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients(ranks: Ranks, name: str, shape: str, sp: bool, whole: bool) -> None:
    assert not beyond(ranks.run(shape, gradients_job, name, sp, whole))


@pytest.mark.turns(24)
@pytest.mark.parametrize(("shape", "sp"), [("ep2", False), ("ep2xtp2", True)], ids=str)
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_training(ranks: Ranks, name: str, shape: str, sp: bool) -> None:
    assert not beyond(ranks.run(shape, training_job, name, sp))


@pytest.mark.parametrize(("shape", "sp"), [("ep2", False), ("ep2xtp2", True)], ids=str)
def test_ranks_without_tokens(ranks: Ranks, shape: str, sp: bool) -> None:
    assert not beyond(ranks.run(shape, starved_job, sp))


@pytest.mark.turns(24)
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_fsdp(ranks: Ranks, name: str) -> None:
    assert not beyond(ranks.run("dp2xep2", fsdp_job, name))


# --- what is sent


def uniform(model: Any) -> None:
    """Have every router choose all experts equally often, two for each token."""

    def evenly(_: Any, args: Any, out: Any) -> Any:
        scores, weights, chosen = out
        pairs = torch.arange(chosen.numel()) % scores.shape[-1]
        return scores, weights, pairs.view_as(chosen)

    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(evenly)


def sent_job(mesh: DeviceMesh, sp: bool, whole: bool) -> list[Any]:
    """The exchanges of a forward and a backward of tokens that choose all experts as often."""
    _, model = built("mixtral", mesh, sp, whole)
    uniform(model)
    recorder = Recorder()
    with recorder:
        out = model(input_ids=torch.full((1, 16), 5), use_cache=False).logits
        with recorder.during("backward"):
            out.sum().backward()
    return exchanges(recorder.collectives)


def exchanges(collectives: Any) -> list[Any]:
    """What is compared of them."""
    return [c for c in collectives if c.dimension == "ep" and c.phase in ("forward", "backward")]


@pytest.mark.parametrize(
    ("shape", "sp", "whole"),
    [("ep2", False, False), ("ep2xtp2", True, False), ("ep2xtp2", False, True)],
    ids=str,
)
def test_what_is_sent(ranks: Ranks, shape: str, sp: bool, whole: bool) -> None:
    model = zoo.tiny("mixtral")
    tp = 2 if "tp" in shape else 1
    plan = plan_of(model, whole)
    report = tpplan.dry_run(model, plan, tp, 1, 16, ep=2, sequence_parallel=sp)
    due = exchanges(report.collectives)
    assert [c.kind for c in due] == ["all_to_all"] * 10  # of two layers 3 forward, 2 backward
    rows, width = 16 * 2 // (tp if whole else 1), 64
    assert [c.bytes for c in due[1:3]] == [rows * (width + 1) * 4 // 2, rows * width * 4 // 2]
    assert [c.worst_bytes for c in due[:3]] == [None, rows * (width + 1) * 4, rows * width * 4]
    for got in ranks.run(shape, sent_job, sp, whole):
        assert got == due
    text = str(report)
    assert "expected" in text
    assert "at worst" in text
    assert "at worst" in report.to_html()
    VALIDATOR.validate(json.loads(json.dumps(report.to_dict())))


# --- ways to run it


def ways_job(mesh: DeviceMesh) -> Errors:
    """bfloat16 with factors in float32; the experts alone; torch.compile; generation; gradients of
    gradients."""
    found = Findings()
    reference, model = built("mixtral", mesh, False)
    mine, _ = place(mesh)
    x, factors = torch.randn(5 + mine, 64), torch.rand(5 + mine, 2)
    chosen = torch.rand(5 + mine, 4).topk(2).indices
    experts = [m.model.layers[0].mlp.experts for m in (reference, model)]  # type: ignore[union-attr]
    due, got = (e(x, chosen, factors) for e in experts)
    found.add("the experts alone", error(due, got))
    twice = []
    for e in experts:
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(
            e(leaf, chosen, factors).square().sum(), leaf, create_graph=True
        )
        twice.append(torch.autograd.grad(first.square().sum(), leaf)[0])
    found.add("gradients of gradients", error(*twice))
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager")
        ids = batch(mine)
        found.add(
            "compiled", error(reference(input_ids=ids).logits, compiled(input_ids=ids).logits)
        )
    how = {"max_new_tokens": 4, "do_sample": False}
    tokens = [m.eval().generate(batch(mine), **how) for m in (reference, model)]  # type: ignore[operator]
    found.add("tokens", same(torch.equal(*tokens)))
    for m in (reference, model):
        m.zero_grad()
    del compiled
    torch.compiler.reset()  # what it knows of parameters keeps torch from exchanging them
    gc.collect()
    reference.bfloat16()
    model.bfloat16()
    due, got = (e(x.bfloat16(), chosen, factors) for e in experts)
    found.add("short", same(due.dtype == got.dtype and error(due, got) < 2e-2))
    return found.errors


@pytest.mark.turns(24)
@pytest.mark.parametrize("shape", ["ep2", "ep2xtp2"])
def test_ways(ranks: Ranks, shape: str) -> None:
    assert not beyond(ranks.run(shape, ways_job))


def clip_job(mesh: DeviceMesh) -> Errors:
    """Gradients of several meshes, and plain ones, clipped to one norm; groups for an optimizer."""
    found = Findings()
    reference, model = built("mixtral", mesh, False)
    mine, group = place(mesh)
    mean_of(reference, [batch(i) for i in range(group.size())])
    objective(model, batch(mine)).backward()
    average(model, group)
    due = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    found.add("norm", error(due, tpplan.clip_grad_norm_(model.parameters(), 0.1)))
    found.add("gradient", errors_of(gradients(reference), gradients(model)))
    groups = tpplan.by_mesh(model.parameters())
    torch.optim.AdamW([{"params": g} for g in groups], foreach=True).step()
    torch.optim.AdamW(reference.parameters()).step()
    held = [dict(m.named_parameters()) for m in (reference, model)]
    found.add("after a step", errors_of(*held))  # type: ignore[arg-type]
    return found.errors


@pytest.mark.turns(24)
@pytest.mark.parametrize("shape", ["ep2", "ep2xtp2"])
def test_clipping(ranks: Ranks, shape: str) -> None:
    assert not beyond(ranks.run(shape, clip_job), 1e-4)


def ddp_job(mesh: DeviceMesh) -> Errors:
    """Averaged by DistributedDataParallel, whose ranks are those of ep."""
    found = Findings()
    reference, model = built("qwen2_moe", mesh, False)
    mine, group = place(mesh)
    mean_of(reference, [batch(i) for i in range(group.size())])
    wrapped = DistributedDataParallel(model, process_group=group)
    objective(wrapped, batch(mine)).backward()
    found.add("gradient", errors_of(gradients(reference), gradients(model)))
    return found.errors


def refused_job(mesh: DeviceMesh) -> str:
    """What is said where other ranks than those of ep are to be averaged over."""
    _, model = built("mixtral", mesh["ep"], False)
    with pytest.raises(ValueError, match="cannot average the experts of ep ranks") as raised:
        DistributedDataParallel(model)
    return str(raised.value)


def test_ddp(ranks: Ranks) -> None:
    assert not beyond(ranks.run("ep4", ddp_job))
    ranks.run("dp2xep2", refused_job)


def launched_job(mesh: DeviceMesh, odd: int) -> str:
    """Proved and launched, where one rank has another plan, if any; what is said."""
    model = zoo.tiny("mixtral")
    plan = plan_of(model, whole=dist.get_rank() == odd)
    try:
        tpplan.parallelize(model, plan, mesh=mesh, sequence_parallel=False)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_launch(ranks: Ranks) -> None:
    assert ranks.run("ep2xtp2", launched_job, -1) == ["nothing"] * 4
    for odd in (1, 2):
        for said in ranks.run("ep2xtp2", launched_job, odd):
            assert f"rank {odd} of the 2 × 2 of ep and tp is about to do something else" in said
