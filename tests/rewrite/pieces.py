"""Products in pieces beside their collectives, and the same model waiting for each."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import tpplan
from benchmarks import zoo
from tests.compare import Errors, Findings
from tests.rewrite.overlap import gradients, objective
from tpplan import compat
from tpplan.comm.pace import Pieces
from tpplan.simulate.recorder import KINDS, Recorder

# one sequence and several, of lengths that ranks and pieces divide, and do not
LENGTHS = ((1, 8), (3, 7), (2, 16), (1, 5))
Grads = dict[str, torch.Tensor]


def sharded(name: str, mesh: DeviceMesh, sp: bool, **how: Any) -> Any:
    """A model of the zoo on this rank, the same on all."""
    torch.manual_seed(0)
    return tpplan.parallelize(
        zoo.tiny(name), "auto", mesh=mesh, sequence_parallel=sp, prove=False, **how
    )


def in_pieces(name: str, mesh: DeviceMesh, sp: bool, pieces: int = 2, **how: Any) -> Any:
    """The same, its products in so many pieces."""
    model = sharded(name, mesh, sp, overlap="chunked", **how)
    for module in model.modules():
        if "_tpplan" in vars(module):
            module._tpplan.stream.pieces = Pieces(pieces)
    return model


def step(model: Any, batch: int, length: int) -> Grads:
    """The gradients of this rank."""
    model.zero_grad()
    objective(model, batch, length).backward()
    return gradients(model)


def distance(due: Grads, got: Grads) -> float:
    """The largest difference, over the largest number of its gradient; inf where some lack."""
    if due.keys() != got.keys():
        return float("inf")
    return max(
        float((got[n] - g).abs().max() / g.abs().max().clamp(min=1e-3)) for n, g in due.items()
    )


def equal_job(mesh: DeviceMesh, name: str, sp: bool, pieces: int, save: str) -> Errors:
    """Gradients of both ways, of several batches and lengths; and logits without gradients."""
    found = Findings()
    due, got = sharded(name, mesh, sp, save=save), in_pieces(name, mesh, sp, pieces, save=save)
    for batch, length in LENGTHS:
        found.add(
            f"{batch} x {length}", distance(step(due, batch, length), step(got, batch, length))
        )
    with torch.no_grad():
        ids = torch.arange(3, 12)[None]
        found.add("without gradients", float((due(ids).logits - got(ids).logits).abs().max()))
    return found.errors


class Order(Recorder):
    """What a forward does, in order: products, sent and waited-for collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        kind = KINDS.get(func._schema.name)
        if kind is not None:
            self.done.append(kind)
        elif func is torch.ops._c10d_functional.wait_tensor.default:
            self.done.append("wait")
        elif func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.done.append("product")
        return out


def order_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Of a gated MLP: gathers are begun at once, and both products follow each wait; what is summed
    is begun after each of its products, and waited for at the end."""
    found = Findings()
    model = in_pieces("llama", mesh, sp)
    step(model, 1, 8)
    mlp = model.model.layers[0].mlp
    order = Order()

    def begin(*_: Any) -> None:
        order.__enter__()

    def end(*_: Any) -> None:
        order.__exit__(None, None, None)

    mlp.register_forward_pre_hook(begin)
    mlp.register_forward_hook(end)
    model(input_ids=torch.arange(8)[None])
    inward = ["all_gather"] * 2 + ["wait", "product", "product"] * 2
    kind = "reduce_scatter" if sp else "all_reduce"
    outward = ["product", kind] * 2 + ["wait"] * 2
    due = (inward if sp else ["product"] * 2) + outward
    found.add(f"{order.done}", float(order.done != due))
    return found.errors


def predicted_job(mesh: DeviceMesh, name: str, sp: bool, save: str) -> Errors:
    """A dry run says what is sent, collective by collective."""
    found = Findings()
    how: dict[str, Any] = {"save": save, "overlap": "chunked"}
    options: dict[str, Any] = {"batch": 2, "seq": 8, "sequence_parallel": sp, "optimizer": None}
    report = tpplan.dry_run(zoo.tiny(name), "auto", mesh.size(), **options, **how)
    model = sharded(name, mesh, sp, **how)
    recorder = Recorder()
    with recorder:
        logits = model(input_ids=torch.arange(16).view(2, 8)).logits
        with recorder.during("backward"):
            logits.sum().backward()
    said = Counter((c.phase, c.kind, c.module, c.shape) for c in report.collectives)
    seen = Counter((c.phase, c.kind, c.module, c.shape) for c in recorder.collectives)
    for key in list(seen):
        if key[0] == "startup":
            del seen[key]
    found.add(f"{said - seen} / {seen - said}", float(said != seen))
    return found.errors


def events_job(mesh: DeviceMesh, sp: bool, save: str) -> Errors:
    """What may happen in a step; each time the gradients are those of the model that waits."""
    found = Findings()
    plain, model = sharded("llama", mesh, sp, save=save), in_pieces("llama", mesh, sp, save=save)
    due = step(plain, 2, 8)

    def compare(what: str, got: Grads | None = None) -> None:
        found.add(what, distance(due, step(model, 2, 8) if got is None else got))

    compare("a step")
    layer = model.model.layers[0]

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    for where in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.act_fn, layer.mlp.down_proj):
        handle = where.register_forward_pre_hook(stop)
        with contextlib.suppress(KeyboardInterrupt):
            step(model, 2, 8)
        handle.remove()
        compare("after an exception")

    loss = objective(model, 2, 8)
    model.zero_grad()
    loss.backward(retain_graph=True)
    compare("of a graph that is retained", gradients(model))
    model.zero_grad()
    loss.backward()
    compare("and gone through once more", gradients(model))

    with sdpa_kernel(SDPBackend.MATH):
        seconds = [_differentiated_twice(each) for each in (plain, model)]
    for i, (theirs, mine) in enumerate(zip(*seconds, strict=True)):
        found.add(
            f"differentiated twice, {i}", float((mine - theirs).abs().max() / theirs.abs().max())
        )

    with torch.autograd.set_detect_anomaly(True):
        compare("anomaly mode")
    compare("a copy", step(copy.deepcopy(model), 2, 8))
    handles = [m.register_full_backward_hook(lambda *_: None) for m in layer.modules()]
    compare("backward hooks")
    for handle in handles:
        handle.remove()
    handles = [
        m.register_forward_hook(lambda _, __, out: out)
        for m in (layer.mlp.gate_proj, layer.mlp, layer.self_attn.q_proj)
    ]
    compare("forward hooks")
    for handle in handles:
        handle.remove()

    for at in (model, plain):
        at.model.layers[0].mlp.gate_proj.weight.requires_grad_(False)
    found.add("a frozen one", distance(step(plain, 2, 8), step(model, 2, 8)))
    for at in (model, plain):
        at.model.layers[0].mlp.gate_proj.weight.requires_grad_(True)
    compare("thawed")

    changed = [
        m.model.layers[0].mlp.gate_proj.register_forward_pre_hook(lambda _, a: (a[0] * 2,))
        for m in (model, plain)
    ]
    found.add("a hook that changes its input", distance(step(plain, 2, 8), step(model, 2, 8)))
    for handle in changed:
        handle.remove()
    compare("and is gone")
    return found.errors


def _differentiated_twice(model: Any) -> list[torch.Tensor]:
    """Gradients of the size of gradients, of weights of each kind."""
    layer = model.model.layers[0]
    some = [layer.mlp.up_proj.weight, layer.self_attn.o_proj.weight, layer.self_attn.q_proj.weight]
    first = torch.autograd.grad(objective(model, 2, 8), some, create_graph=True)
    size: Any = sum(one.to_local().square().sum() for one in first)  # type: ignore[attr-defined]
    second = torch.autograd.grad(size, some)
    return [compat.local_of(one) for one in second]


def recomputed_job(mesh: DeviceMesh, sp: bool, save: str) -> Errors:
    """Both activation checkpointings, of layers, of parts of them and of single projections."""
    found = Findings()
    plain, model = sharded("llama", mesh, sp, save=save), in_pieces("llama", mesh, sp, save=save)
    due = step(plain.train(), 2, 8)
    for reentrant in (False, True):
        model.train().gradient_checkpointing_enable({"use_reentrant": reentrant})
        found.add(f"use_reentrant={reentrant}", distance(due, step(model, 2, 8)))
    model.gradient_checkpointing_disable()
    for inner in ("mlp", "mlp.gate_proj", "mlp.down_proj", "self_attn.q_proj"):
        for layer in model.model.layers:
            part = layer.get_submodule(inner)
            own = part.forward
            part.forward = lambda *a, own=own: checkpoint(own, *a, use_reentrant=False)
        found.add(f"{inner} alone", distance(due, step(model, 2, 8)))
        for layer in model.model.layers:
            del layer.get_submodule(inner).forward
    return found.errors


def autocast_job(mesh: DeviceMesh, sp: bool, save: str) -> Errors:
    """Under autocast, as near to float32 as the model that waits."""
    found = Findings()
    due = step(sharded("llama", mesh, sp, save=save), 2, 8)
    far = []
    for make in (sharded, in_pieces):
        with torch.autocast("cpu", torch.bfloat16):
            far.append(distance(due, step(make("llama", mesh, sp, save=save), 2, 8)))
    found.add(f"bfloat16: {far}", float(far[1] > 1.5 * far[0]))
    return found.errors


def replaced_job(mesh: DeviceMesh, sp: bool, save: str) -> Errors:
    """Other weights in the place of its own are used."""
    found = Findings()
    plain, model = sharded("llama", mesh, sp, save=save), in_pieces("llama", mesh, sp, save=save)
    ids = torch.arange(16).view(2, 8)
    logits = []
    for each in (plain, model):
        each(ids)
        others: dict[str, nn.Parameter] = {
            name: p * 1.5 for name, p in each.named_parameters() if "proj" in name
        }
        logits.append(functional_call(each, others, (ids,)).logits)
        with torch.no_grad():
            for name, p in each.named_parameters():
                if "up_proj" in name:
                    p.mul_(0.5)
        logits.append(each(ids).logits)
    for i in (0, 1):
        found.add(("replaced", "changed")[i], float((logits[i] - logits[i + 2]).abs().max()))
    return found.errors


def fused_job(mesh: DeviceMesh, name: str, save: str) -> Errors:
    """What torch's fused ops stand for computes the same, with the collectives of waiting."""
    found = Findings()
    due, got = sharded(name, mesh, True, save=save), in_pieces(name, mesh, True, save=save)
    for module in got.modules():
        if "_tpplan" in vars(module):
            module._tpplan.stream.pieces = Pieces(2, symmetric=True)
    for batch, length in LENGTHS:
        error = distance(step(due, batch, length), step(got, batch, length))
        found.add(f"{batch} x {length}", error)
    sent = []
    for model in (due, got):
        recorder = Recorder()
        with recorder:
            step(model, 2, 7)
        sent.append(Counter(c.kind for c in recorder.collectives))
        fused = sum(c.fused for c in recorder.collectives)
    found.add(f"{sent}", float(sent[0] != sent[1] or not fused))
    return found.errors


def refused_job(mesh: DeviceMesh) -> Errors:
    """Symmetric memory, without GPUs."""
    found = Findings()
    try:
        sharded("llama", mesh, True, overlap="symmetric_memory")
    except tpplan.PlanError as error:
        found.add(str(error), float("take 'chunked'" not in str(error)))
    else:
        found.add("accepted", 1.0)
    return found.errors


def compiled_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """A compiled graph waits, and says so."""
    found = Findings()
    due = step(sharded("llama", mesh, sp), 2, 8)
    model = in_pieces("llama", mesh, sp)
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        got = gradients_of_compiled(model)
    found.add("gradients", distance(due, got))
    said = [w for w in told if "nothing is cut into pieces" in str(w.message)]
    found.add(f"said {len(said)} times", float(not said))
    return found.errors


def gradients_of_compiled(model: Any) -> Grads:
    """A step of it, compiled without a code generator."""
    model.zero_grad()
    objective(torch.compile(model, backend="aot_eager"), 2, 8).backward()
    return gradients(model)
