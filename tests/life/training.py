"""Events of training: steps, accumulation, modes, graphs, optimizers."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import tpplan
from tests.compare import WRONG, compare_gradients, compare_parameters, full, same
from tests.life.life import SHAPES, Life, forward, named, plainly


def steps(life: Life) -> None:
    """A step for each of several lengths and batches."""
    for index, shape in enumerate(SHAPES):
        life.step(f"step {index}", shape)
        life.update(f"step {index}")


def accumulation(life: Life) -> None:
    """Gradients on top of gradients, also twice through one graph."""
    life.step("first")
    life.step("second", (3, 7), clear=False)
    life.step("twice through one graph", clear=False, repeat=2)
    life.update("afterwards")
    life.step("next")


def in_flight(life: Life) -> None:
    """Two graphs of other lengths at once; the first one goes backward first, and last."""
    life.step("short and long", way=life.two_at_once((2, 5), (1, 9)))
    life.step("long and short", way=life.two_at_once((1, 9), (2, 5)))
    first, second = life.inputs(2, 7), life.inputs(3, 4)
    for model in life.both:
        model.zero_grad()
        objectives = [forward(model, *call, plainly)[1] for call in (first, second)]
        for objective in objectives:
            objective.backward()
    life.found.add("one after the other", compare_gradients(*life.both))
    life.step("afterwards")


def evaluation(life: Life) -> None:
    """Evaluation and training in turn."""
    for turn in ("first", "second"):
        for model in life.both:
            model.eval()
        life.step(f"{turn}: evaluation")
        with torch.no_grad():
            life.answer(f"{turn}: evaluation without gradients", (3, 5))
        for model in life.both:
            model.train()
        life.step(f"{turn}: training", (2, 7))


def growing(life: Life) -> None:
    """Training, sampling in growing lengths, training again."""
    life.step("before")
    life.update("before")
    for model in life.both:
        model.eval()
    with torch.no_grad():
        for length in (1, 2, 3, 7, 8):
            life.answer(f"length {length}", (2, length))
    for model in life.both:
        model.train()
    life.step("after")
    life.update("after")
    life.step("next")


def inference(life: Life) -> None:
    """Inference mode first, and between two steps."""
    for turn in ("first", "second"):
        with torch.inference_mode():
            life.answer(f"{turn}: inference mode")
            life.answer(f"{turn}: inference mode again", (3, 5))
        life.step(f"{turn}: training")
        life.update(f"{turn}: training")


def frozen(life: Life) -> None:
    """Every second parameter frozen, then the others, then all but one, then none."""
    names = [name for name, _ in life.reference.named_parameters()]
    life.step("before")
    for title, kept in (
        ("even", names[::2]),
        ("odd", names[1::2]),
        *((f"all but {name}", [name]) for name in names[:: max(1, len(names) // 3)]),
        ("none", names),
    ):
        for model in life.both:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name in kept)
                parameter.grad = None
        life.step(title, clear=False)


def anomaly(life: Life) -> None:
    """Anomaly mode."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            life.step("anomaly mode")
    life.step("afterwards")


def differentiated_twice(life: Life) -> None:
    """A loss with the gradients of parameters and inputs in it."""

    def penalty(model: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = named(plainly(model, *args, **kwargs))
        loss = sum(t.pow(2).sum() for t in outputs.values())
        leaves = [*model.parameters(), *(a for a in args if a.is_floating_point())]
        grads = torch.autograd.grad(loss, leaves, create_graph=True)
        total = sum(whole(g).pow(2).sum() for g in grads)
        return loss, total

    with sdpa_kernel(SDPBackend.MATH):  # the fused ones have no second derivative
        life.step("penalty", way=penalty)
    life.step("afterwards")


def whole(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient as an ordinary full tensor that is still in the graph."""
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def changed_between(life: Life) -> None:
    """Parameters are changed in place between forward and backward: torch refuses, so do we."""
    args, kwargs = life.inputs()
    for side, model in zip(("reference", "sharded"), life.both, strict=True):
        _, objective, _ = forward(model, args, kwargs, plainly)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        try:
            objective.backward()
        except RuntimeError as e:
            life.found.add(f"{side}: says what", same("modified by an inplace" in str(e)))
        else:
            life.found.add(f"{side}: goes on", WRONG)
    life.step("afterwards")


def optimizer_before(life: Life) -> None:
    """An optimizer made before the rewrite: it works, or the rewrite says that it will not."""
    args, kwargs = life.inputs()
    given = tuple(a.float() if a.is_floating_point() else a for a in args)
    model = life.fresh()
    optimizers = [torch.optim.SGD(m.parameters(), 1e-3) for m in (life.reference, model)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            tpplan.parallelize(
                model,
                life.block.plan,
                life.mesh,
                life.sp,
                inputs=given if not kwargs else given[0],
                prove=False,
            )
        except ValueError as e:
            life.found.add("says why", same("optimizer" in str(e)))
            return
    if any("made before" in str(w.message) for w in said):
        return
    life.model = model.to(life.dtype)
    life.step("before")
    for optimizer in optimizers:
        optimizer.step()
    life.found.add("silently no step", compare_parameters(*life.both))


def changed_in_place(life: Life) -> None:
    """Parameters are written to between steps, in every way a DTensor has.

    (A new ``.data`` is none: torch itself keeps a DTensor's old numbers then.)
    """
    life.step("before")

    def through_data(p: nn.Parameter) -> None:
        p.data.mul_(1.5)

    def written(p: nn.Parameter) -> None:
        with torch.no_grad():
            p.add_(p, alpha=0.25)

    def copied(p: nn.Parameter) -> None:
        with torch.no_grad():
            p.copy_(p * 0.75)

    for change in (through_data, written, copied):
        for model in life.both:
            for parameter in model.parameters():
                change(parameter)
        life.found.add(f"{change.__name__}: values", compare_parameters(*life.both))
        life.step(change.__name__)


def autocast(life: Life) -> None:
    """Under autocast the sharded model is as near to the exact one as the unsharded is.

    bfloat16 keeps 8 bits. Two orders of summation differ by as much as each of them is off, so
    neither is the measure: float64 is.
    """
    exact, low = life, life.single()
    args, kwargs = life.inputs()
    found = []
    for model, bits in ((exact.reference, 64), (low.reference, 32), (low.model, 32)):
        model.zero_grad()
        given = tuple(a.float() if bits == 32 and a.is_floating_point() else a for a in args)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bits == 32):
            outputs, objective, leaves = forward(model, given, kwargs, plainly)
        objective.backward()
        grads = {n: p.grad for n, p in model.named_parameters()}
        grads |= {f"input {i}": x.grad for i, x in enumerate(leaves)}
        found.append({**{f"output {n}": t for n, t in outputs.items()}, **grads})
    numbers = [{n: full(t).double() for n, t in side.items()} for side in found]
    dtypes = {n: (t.dtype, found[2][n].dtype) for n, t in found[1].items()}
    other = {n: d for n, d in dtypes.items() if d[0] != d[1]}
    life.found.add(f"dtypes {other}", same(not other))
    largest = max(t.norm().item() for t in numbers[0].values())
    for name, expected in numbers[0].items():
        scale = max(expected.norm().item(), 1e-2 * largest)
        theirs, ours = ((side[name] - expected).norm().item() / scale for side in numbers[1:])
        life.found.add(f"{name}: {ours:.2g} for {theirs:.2g}", same(ours <= 3 * theirs + 2**-8))
