"""A step with weight gradients deferred beside the same step waiting for each collective."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import tpplan
from benchmarks import zoo
from benchmarks.host_overhead import Stack, by_tpplan, new_block, stream_and_gradient
from tests.compare import Errors, Findings, compare_gradients
from tests.models import VOCAB
from tests.rewrite.blocks import PLAN, Layer, Model
from tpplan import compat
from tpplan.comm.deferred import Deferred
from tpplan.comm.products import deferring
from tpplan.simulate.recorder import KINDS, Recorder

NEVER = 1 << 62
LENGTHS = ((1, 8), (3, 7))


def objective(model: Any, batch: int, length: int) -> torch.Tensor:
    """A number that hangs on every logit, each in a way of its own."""
    ids = torch.randint(3, zoo.VOCAB, (batch, length), generator=torch.Generator().manual_seed(7))
    logits = model(input_ids=ids, use_cache=False).logits
    found: torch.Tensor = (logits * torch.linspace(-1, 1, logits.numel()).view(logits.shape)).sum()
    return found


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Those of this rank, by name."""
    return {
        name: compat.local_of(p.grad).clone()  # type: ignore[arg-type]
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def step(model: Any, batch: int, length: int) -> dict[str, torch.Tensor]:
    """Every gradient of this rank."""
    model.zero_grad()
    objective(model, batch, length).backward()
    return gradients(model)


def differing(due: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> list[str]:
    """The names of gradients that are not bitwise equal."""
    names = dict.fromkeys((*due, *got))
    return [n for n in names if n not in due or n not in got or not torch.equal(due[n], got[n])]


def sharded(name: str, mesh: DeviceMesh, sp: bool, save: str = "gathered") -> nn.Module:
    """A model of the zoo on this rank, the same on all."""
    torch.manual_seed(0)
    model = zoo.tiny(name)
    options: dict[str, Any] = {"sequence_parallel": sp, "prove": False, "save": save}
    return tpplan.parallelize(model, "auto", mesh=mesh, **options)


def shard_job(mesh: DeviceMesh, name: str) -> Errors:
    """Keeping rows gives the gradients of keeping all, with so many all-gathers more."""
    found = Findings()
    counts: dict[str, list[str]] = {}
    grads: dict[tuple[str, int], dict[str, torch.Tensor]] = {}
    for save in ("gathered", "shard"):
        model = sharded(name, mesh, True, save)
        for batch, length in LENGTHS:
            recorder = Recorder()
            with recorder:
                grads[save, batch] = step(model, batch, length)
            counts[save] = sorted(c.kind for c in recorder.collectives)
    for batch, _ in LENGTHS:
        differ = differing(grads["gathered", batch], grads["shard", batch])
        found.add(f"batch {batch}: {differ}", float(bool(differ)))
    layers = len(model.get_submodule("model.layers"))  # type: ignore[arg-type]
    more = len(counts["shard"]) - len(counts["gathered"])
    found.add("2 L + 1 gathers more", abs(more - (2 * layers + 1)))
    return found.errors


class Order(Recorder):
    """Which collectives are waited for before any weight gradient is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.bare: list[str] = []
        self._weights = 0
        self._sent: dict[int, tuple[str, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        kind = KINDS.get(func._schema.name)
        if kind is not None:
            self._sent[out.data_ptr()] = kind, self._weights
        elif func is torch.ops._c10d_functional.wait_tensor.default:
            kind, before = self._sent.pop(args[0].data_ptr())
            self.bare += [kind] if before == self._weights else []
        elif func is torch.ops.aten.mm.default and args[0].t().is_contiguous():
            self._weights += 1  # of the transposed gradient and the input
        return out


def order_job(mesh: DeviceMesh, sp: bool, save: str) -> Errors:
    """Between the start of backward's collectives and their waits lie weight gradients.

    Not where none is deferred yet: the head's own comes before the exit of the last layer. Nor
    beside the sum of gradients of replicated parameters.
    """
    found = Findings()
    model = sharded("llama", mesh, sp, save)
    for _ in range(2):  # at which ranks compare what they hold
        step(model, 1, 8)
    with deferring(0), Order() as order:
        logits = model(input_ids=torch.arange(8)[None], use_cache=False).logits
        del order.bare[:]
        logits.sum().backward()
    due = ["all_gather", "all_reduce"] if sp else []
    if save == "shard":  # the head's input, again: beside its gradient, which is no weight's
        due = ["all_gather", *due]
    found.add(f"waited for at once: {order.bare}", float(order.bare != due))
    return found.errors


def stack_job(mesh: DeviceMesh, sp: bool, save: str) -> Errors:
    """The same of layers that are given a whole tensor, whose gradient is gathered at the end."""
    found = Findings()
    model = by_tpplan(Stack(new_block() for _ in range(3)), mesh, sp, "layers.*.", save=save)
    for _ in range(3):  # in the third, ranks do not compare what they are given
        x, grad = stream_and_gradient()
        with deferring(0), Order() as order:
            y = model(x.requires_grad_())
            del order.bare[:]
            y.backward(grad)
    due = ["all_gather", "all_reduce"] if sp else []
    found.add(f"waited for at once: {order.bare}", float(order.bare != due))
    return found.errors


def events_job(mesh: DeviceMesh, sp: bool, save: str) -> Errors:
    """What may happen to a backward pass; each time the gradients are those of a fresh one."""
    found = Findings()
    model: Any = sharded("llama", mesh, sp, save)
    with deferring(0):
        due = step(model, 2, 8)

        class Stop(Exception):
            pass

        def stop(*_: Any) -> None:
            raise Stop

        handle = model.model.layers[0].self_attn.q_proj.weight.register_hook(stop)
        with contextlib.suppress(Stop):
            step(model, 2, 8)
        handle.remove()
        found.add("after an exception", float(bool(differing(due, step(model, 2, 8)))))

        model.zero_grad()
        loss = objective(model, 2, 8)
        some = [
            model.model.layers[1].mlp.up_proj.weight,
            model.model.layers[0].mlp.down_proj.weight,
        ]
        for parameter, grad in zip(
            some, torch.autograd.grad(loss, some, retain_graph=True), strict=True
        ):
            name = next(n for n, p in model.named_parameters() if p is parameter)
            found.add(f"of {name} alone", float(not torch.equal(compat.local_of(grad), due[name])))
        loss.backward()
        got = gradients(model)
        found.add("of a graph that was retained", float(bool(differing(due, got))))

        first = torch.autograd.grad(objective(model, 2, 8), some, create_graph=True)
        for one, parameter in zip(first, some, strict=True):
            name = next(n for n, p in model.named_parameters() if p is parameter)
            near = torch.allclose(compat.local_of(one), due[name], rtol=1e-4, atol=1e-5)
            found.add(f"differentiably of {name}", float(not near))
            found.add(f"{name} can be differentiated", float(not one.requires_grad))

        with torch.autograd.set_detect_anomaly(True):
            found.add("anomaly mode", float(bool(differing(due, step(model, 2, 8)))))

        model.model.layers[0].mlp.gate_proj.weight.requires_grad_(False)
        got = step(model, 2, 8)
        found.add("a frozen one", float("model.layers.0.mlp.gate_proj.weight" in got))
        model.model.layers[0].mlp.gate_proj.weight.requires_grad_(True)
        found.add("thawed", float(bool(differing(due, step(model, 2, 8)))))
        for name, parameter in model.named_parameters():
            found.add(f"{name} is handed over", float(parameter.grad is None))
    return found.errors


def autocast_job(mesh: DeviceMesh, sp: bool, save: str) -> Errors:
    """Under autocast, bit for bit as products that are not deferred."""
    found = Findings()
    model = sharded("llama", mesh, sp, save)
    grads = []
    for least in (NEVER, 0):
        with deferring(least), torch.autocast("cpu", torch.bfloat16):
            grads.append(step(model, 2, 8))
    found.add("bfloat16", float(bool(differing(*grads))))
    return found.errors


def recomputed_job(mesh: DeviceMesh, sp: bool, save: str) -> Errors:
    """Both activation checkpointings, bit for bit as without."""
    found = Findings()
    model: Any = sharded("llama", mesh, sp, save)
    with deferring(0):
        due = step(model.train(), 2, 8)
        for reentrant in (False, True):
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            got = step(model, 2, 8)
            found.add(f"use_reentrant={reentrant}", float(bool(differing(due, got))))
        model.gradient_checkpointing_disable()
        for layer in model.model.layers:
            inner = layer.mlp.forward
            layer.mlp.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)
        found.add("the MLP alone", float(bool(differing(due, step(model, 2, 8)))))
        if not sp:  # whose lengths reentrant checkpointing of a part does not know
            for layer in model.model.layers:
                del layer.mlp.forward
                inner = layer.mlp.gate_proj.forward
                layer.mlp.gate_proj.forward = lambda x, inner=inner: checkpoint(
                    inner, x, use_reentrant=True
                )
            got = step(model, 2, 8)
            found.add("a pass inside another", float(bool(differing(due, got))))
    return found.errors


def copied_job(mesh: DeviceMesh, sp: bool, save: str) -> Errors:
    """Two copies in turns, each with a backward of the other in between."""
    found = Findings()
    model: Any = sharded("llama", mesh, sp, save)
    with deferring(0):
        due = step(model, 2, 8)
        twin = copy.deepcopy(model)
        found.add("a copy", float(bool(differing(due, step(twin, 2, 8)))))
        found.add("the first one again", float(bool(differing(due, step(model, 2, 8)))))
    return found.errors


def remade_job(mesh: DeviceMesh, name: str, sp: bool) -> Errors:
    """What fused kernels make, made again in backward, gives the gradients of what is kept."""
    found = Findings()
    grads = []
    saves = ["gathered", "shard"] if sp else ["gathered"]
    for save in saves:
        for recompute in ((), ("norms", "activations")):
            torch.manual_seed(0)
            model = tpplan.parallelize(
                zoo.tiny(name),
                "auto",
                mesh=mesh,
                sequence_parallel=sp,
                kernels="triton",
                save=save,
                recompute=recompute,
                prove=False,
            )
            with deferring(0):
                grads.append(step(model, 2, 7))
    for i, got in enumerate(grads[1:], 1):
        found.add(f"way {i}", float(bool(differing(grads[0], got))))
    return found.errors


class Shifting(Layer):
    """A layer that changes its input in place once it has normalized it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x.add_(torch.linspace(-1, 1, x.size(-1)))
        return x + self.attn(y)


def weighed(model: nn.Module) -> torch.Tensor:
    """A number that hangs on every output, each in a way of its own."""
    out: torch.Tensor = model(torch.arange(14).view(2, 7) % VOCAB)
    return (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum()


def origin_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """What is made again is of what was there, and can be differentiated."""
    found = Findings()
    options: dict[str, Any] = {"sequence_parallel": sp, "kernels": "triton", "prove": False}
    options["recompute"] = ("norms", "activations")
    reference = Model(count=1).float()
    model = tpplan.parallelize(copy.deepcopy(reference), PLAN, mesh=mesh, **options)
    with deferring(0), sdpa_kernel(SDPBackend.MATH):
        for m in (reference, model):
            grads = torch.autograd.grad(weighed(m), list(m.parameters()), create_graph=True)
            penalty: Any = torch.stack([full_of(g.square().sum()) for g in grads]).sum()
            penalty.backward()
    found.add("penalty", compare_gradients(reference, model))

    reference = Model(Shifting, 1).float()
    for name, parameter in reference.named_parameters():
        parameter.requires_grad_("norm" not in name and "embed" not in name)
    reference.model.layers[0].mlp = reference.model.layers[0].norm2 = nn.Identity()
    rules = {name: how for name, how in PLAN["rules"].items() if ".mlp." not in name}
    rules["model.layers.*.norm"] = rules.pop("model.layers.*.{norm,norm2}")
    plan = {**PLAN, "rules": rules}
    model = tpplan.parallelize(copy.deepcopy(reference), plan, mesh=mesh, **options)
    with deferring(0):
        for m in (reference, model):
            weighed(m).backward()
    found.add("changed in place since", compare_gradients(reference, model))
    return found.errors


def full_of(number: torch.Tensor) -> torch.Tensor:
    """A number as a plain tensor, differentiable."""
    return number.full_tensor() if isinstance(number, DTensor) else number


def left_job(mesh: DeviceMesh, sp: bool, save: str) -> Errors:
    """Passes for other gradients only leave nothing behind for longer than until the next."""
    found = Findings()
    model: Any = sharded("llama", mesh, sp, save)
    left = []
    with deferring(0):
        for _ in range(3):
            loss = objective(model, 2, 8)
            torch.autograd.grad(loss, [model.model.layers[1].mlp.up_proj.weight])
            left.append(sum(isinstance(one, Deferred) for one in gc.get_objects()))
    found.add(f"left: {left}", float(left[-1] != left[0]))
    return found.errors


def said(mesh: DeviceMesh, **options: Any) -> list[str]:
    """What is warned of when a model is sharded so."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tpplan.parallelize(Model(count=1).float(), PLAN, mesh=mesh, prove=False, **options)
    return [str(one.message) for one in caught if "here" in str(one.message)]


def idle_job(mesh: DeviceMesh) -> Errors:
    """The first rank says what does nothing, and nothing else."""
    found = Findings()
    both: dict[str, Any] = {"recompute": ("norms", "activations")}
    first = mesh.get_local_rank() == 0
    for due, options in (
        (1, {"save": "shard", "sequence_parallel": False}),
        (0, {"save": "shard", "sequence_parallel": True}),
        (2, both),
        (0, {**both, "kernels": "triton"}),
        (1, {**both, "kernels": {"layer_norm": "triton"}}),
    ):
        got = said(mesh, **options)
        found.add(f"{options}: {got}", float(len(got) != due * first))
    return found.errors


def idle_words() -> list[tuple[str, bool, list[str]]]:
    """Without ranks: who was asked, in which mode, and the words that were said to do nothing."""
    found = []
    plan = {**PLAN, "save": "shard", "recompute": ["norms"], "kernels": "torch"}
    asked: dict[str, Callable[..., object]] = {
        "check": tpplan.check,
        "verify": tpplan.verify,
        "dry run": functools.partial(tpplan.dry_run, seq=8),
    }
    for name, ask in asked.items():
        for sp in (False, True):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                ask(Model(count=1).float(), plan, 2, sequence_parallel=sp)
            words = [str(one.message) for one in caught if "here" in str(one.message)]
            found.append((name, sp, [word.partition(":")[0] for word in words]))
    return found


def compiled_job(mesh: DeviceMesh) -> Errors:
    """A graph says that it does not keep rows; its gradients are right."""
    found = Findings()
    reference = Model(count=1).float()
    model = tpplan.parallelize(copy.deepcopy(reference), PLAN, mesh=mesh, save="shard", prove=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        whole: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
        weighed(whole).backward()
    weighed(reference).backward()
    found.add("gradients", compare_gradients(reference, model))
    words = [str(one.message) for one in caught]
    found.add("says so", float(not any("compiled graph" in w for w in words)))
    return found.errors


def decoding_job(mesh: DeviceMesh, name: str) -> Errors:
    """A step of one token sends under sequence parallelism what it sends without."""
    found = Findings()
    sent, logits = [], []
    for sp in (False, True):
        model = sharded(name, mesh, sp).eval()
        recorder = Recorder()
        with torch.no_grad():
            cache = model(input_ids=torch.arange(9)[None], use_cache=True).past_key_values
            with recorder:
                made = model(input_ids=torch.ones(1, 1, dtype=torch.long), past_key_values=cache)
        logits.append(made.logits)
        sent.append([c.kind for c in recorder.collectives if c.phase != "startup"])
    found.add(f"sent: {sent}", float(sent[0] != sent[1]))
    found.add("logits", float((logits[0] - logits[1]).abs().max()))
    return found.errors
