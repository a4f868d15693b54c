"""Events of a graph: checkpoints, exceptions, hooks, calls of single modules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.compare import WRONG, compare_gradients, error, full, gradient_errors, same
from tests.life.life import Life, forward, named, plainly
from tests.models import weights_like

Kept = dict[str, Any]

# --- checkpoints


def checkpointed_layers(life: Life, reentrant: bool) -> None:
    """The model checkpoints its layers, two lengths in flight."""
    for model in life.both:
        model.recompute = reentrant
    life.step("every layer", (2, 8))
    life.step("two lengths", way=life.two_at_once((2, 5), (1, 7)))
    for model in life.both:
        model.recompute = None
    life.step("afterwards", (3, 7))


def checkpointed_inside(life: Life, reentrant: bool) -> None:
    """A layer checkpoints what is inside it."""
    for chosen in ([0], [0, 1]):
        for model in life.both:
            for index in chosen:
                model.layers[index].recompute = reentrant
        life.step(f"inside of layers {chosen}", (2, 8))
        life.step(f"inside of layers {chosen}, another length", (3, 7))
    for model in life.both:
        for layer in model.layers:
            layer.recompute = None
    life.step("afterwards")


def checkpointed_whole(life: Life) -> None:
    """The user checkpoints the whole model."""

    def whole(model: Any, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(lambda: model(*args, **kwargs), use_reentrant=False)

    life.step("the whole model", way=whole)
    life.step("another length", (3, 7), whole)
    life.step("afterwards")


# --- exceptions


class Broken(Exception):
    """Raised on purpose."""


def broken(life: Life) -> None:
    """A forward that ends in the middle, after every module in turn, and a backward."""

    def fail(*_: Any) -> None:
        raise Broken

    paths = [path for path, _ in life.reference.named_modules() if path.startswith("layers.0")]
    for path in paths:
        if path.count(".") > 1 and path[-1].isdigit():
            continue  # of a list of modules for each head, which run on one rank only
        raised = []
        args, kwargs = life.inputs(3, 5)
        for model in life.both:
            handle = model.get_submodule(path).register_forward_hook(fail)
            try:
                model(*args, **kwargs)
            except Broken:
                raised.append(model)
            handle.remove()
        if raised:
            life.found.add(f"{path}: both raise", same(len(raised) == 2))
            life.step(f"after an error after {path}")


def broken_backward(life: Life) -> None:
    """A backward that ends in the middle."""

    def fail(_: torch.Tensor) -> None:
        raise Broken

    def install(_: nn.Module, __: Any, out: torch.Tensor) -> None:
        out.register_hook(fail)

    args, kwargs = life.inputs(3, 5)
    for model in life.both:
        handle = model.layers[0].register_forward_hook(install)
        _, objective, _ = forward(model, args, kwargs, plainly)
        handle.remove()
        try:
            objective.backward()
        except Broken:
            continue
        life.found.add("nothing was raised", WRONG)
    life.step("after an error in backward")
    life.step("another length", (3, 7))


# --- modules on their own


def captured(model: nn.Module, path: str, call: tuple[Any, Any]) -> tuple[Any, Any]:
    """What a module of the unsharded model is called with."""
    kept: list[tuple[Any, Any]] = []
    handle = model.get_submodule(path).register_forward_pre_hook(
        lambda _, args, kwargs: kept.append((args, kwargs)), with_kwargs=True
    )
    with torch.no_grad():
        model(*call[0], **call[1])
    handle.remove()
    return kept[0]


def alone(life: Life) -> None:
    """Every module that can be is called on its own, before a step and between steps."""
    for path in life.block.alone:
        for turn in ("first", "second"):
            _alone(life, path, turn)
        life.step(f"after {path} alone")


def _alone(life: Life, path: str, turn: str) -> None:
    args, kwargs = captured(life.reference, path, life.inputs(2, 7))
    outcomes = []
    for model in life.both:
        model.zero_grad()
        # one tensor given thrice is one tensor still
        leaves = {id(a): _leaf(a) for a in args}
        part = model.get_submodule(path)
        outputs = named(part(*(leaves[id(a)] for a in args), **kwargs))
        parts = [(t * weights_like(t, i)).sum() for i, t in enumerate(outputs.values())]
        torch.stack(parts).sum().backward()
        grads = [x.grad for x in leaves.values() if x.requires_grad]
        outcomes.append((outputs, {str(i): g for i, g in enumerate(grads)}))
    (theirs, of_theirs), (ours, of_ours) = outcomes
    life.compare(f"{path}, {turn}: output", theirs, ours)
    life.found.add(f"{path}, {turn}: input", gradient_errors(of_theirs, of_ours))
    life.found.add(f"{path}, {turn}", compare_gradients(*life.both))


def _leaf(x: torch.Tensor) -> torch.Tensor:
    return x.clone().requires_grad_() if x.is_floating_point() and x.dim() == 3 else x


def parts_alone(life: Life) -> None:
    """A column-parallel layer that the user calls answers with all columns."""
    for path in life.block.parts:
        args, kwargs = captured(life.reference, path, life.inputs(2, 7))
        with torch.no_grad():
            whole, own = (m.get_submodule(path)(*args, **kwargs) for m in life.both)
        life.found.add(path, error(whole, own))
    life.step("afterwards")


# --- hooks


def _seeing(module: nn.Module, kept: Kept) -> Any:
    return module.register_forward_hook(lambda _, __, out: kept.update(output=first(out).clone()))


def _replacing(module: nn.Module, kept: Kept) -> Any:
    return module.register_forward_hook(lambda _, __, out: mapped(out, lambda t: t * 3))


def _in_place(module: nn.Module, kept: Kept) -> Any:
    return module.register_forward_hook(lambda _, __, out: mapped(out, lambda t: t.mul_(3)))


def _before(module: nn.Module, kept: Kept) -> Any:
    def triple(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        memo = {id(a): a * 3 if a.is_floating_point() and a.dim() == 3 else a for a in args}
        return tuple(memo[id(a)] for a in args)

    return module.register_forward_pre_hook(triple)


def _tensor(module: nn.Module, kept: Kept) -> Any:
    def install(_: nn.Module, __: Any, out: Any) -> None:
        first(out).register_hook(lambda g: g * 3)

    return module.register_forward_hook(install)


def _backward(module: nn.Module, kept: Kept) -> Any:
    def after(_: nn.Module, inputs: Any, outputs: Any) -> Any:
        kept["gradient of the output"] = outputs[0].clone()
        return tuple(None if g is None else g * 3 for g in inputs)

    return module.register_full_backward_hook(after)


def _before_backward(module: nn.Module, kept: Kept) -> Any:
    return module.register_full_backward_pre_hook(
        lambda _, outputs: tuple(None if g is None else g * 3 for g in outputs)
    )


def _retaining(module: nn.Module, kept: Kept) -> Any:
    def install(_: nn.Module, __: Any, out: Any) -> None:
        first(out).retain_grad()
        kept["retained"] = first(out)

    return module.register_forward_hook(install)


def _retaining_late(module: nn.Module, kept: Kept) -> Any:
    return module.register_forward_hook(lambda _, __, out: kept.update(late=first(out)))


def first(out: Any) -> torch.Tensor:
    """The tensor of an output."""
    tensor: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return tensor


def mapped(out: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """An output with its tensor changed."""
    return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)


def hooked(life: Life, install: Callable[[nn.Module, Kept], Any]) -> None:
    """A hook on each module that can be called on its own; then none."""
    for path in life.block.alone:
        _hooked(life, path, install)
    life.step("hooks removed")


def _hooked(life: Life, path: str, install: Callable[[nn.Module, Kept], Any]) -> None:
    seen: list[Kept] = []
    handles = []
    for module in (m.get_submodule(path) for m in life.both):
        seen.append({})
        handles.append(install(module, seen[-1]))

    def way(model: Any, *args: Any, **kwargs: Any) -> Any:
        out = model(*args, **kwargs)
        late = seen[model is life.model].get("late")
        if late is not None:
            late.retain_grad()  # when the next layers have run already
        return out

    life.step(path, way=way)
    for handle in handles:
        handle.remove()
    for kept in seen:
        for name in ("retained", "late"):
            if name in kept:
                kept[f"{name} gradient"] = kept.pop(name).grad
    # a module inside the layers sees this rank's rows of a sharded stream
    if not life.sp or path.count(".") <= 1:
        expected, got = seen
        missing = [n for n, t in expected.items() if t is not None and got.get(n) is None]
        life.found.add(f"{path}: nothing seen of {missing}", same(not missing))
        if not missing:
            present = {n: t for n, t in expected.items() if t is not None}
            life.compare(f"{path}: seen", present, {n: full(got[n]) for n in present})


def hooked_parameters(life: Life) -> None:
    """Hooks on parameters see the right gradient, once, and may change it."""
    life.step("before")
    seen: list[dict[str, list[torch.Tensor]]] = [{}, {}]
    handles = []
    for kept, model in zip(seen, life.both, strict=True):
        for index, (name, parameter) in enumerate(model.named_parameters()):
            before = functools.partial(_on_gradient, kept, name, 1 + index % 2)
            after = functools.partial(_on_accumulated, kept, name)
            handles.append(parameter.register_hook(before))
            handles.append(parameter.register_post_accumulate_grad_hook(after))
    life.step("with hooks")
    for handle in handles:
        handle.remove()
    counts = {n: (len(g), len(seen[1].get(n, ()))) for n, g in seen[0].items()}
    others = {n: c for n, c in counts.items() if c[0] != c[1]}
    life.found.add(f"fired as often: {others}", same(not others))
    if not others:
        ours, theirs = ({n: g[0] for n, g in kept.items()} for kept in reversed(seen))
        life.found.add("seen", gradient_errors(theirs, ours))
    life.step("hooks removed")


def _on_gradient(kept: Any, name: str, factor: int, grad: torch.Tensor) -> torch.Tensor:
    kept.setdefault(f"{name} before", []).append(grad.clone())
    return grad * factor


def _on_accumulated(kept: Any, name: str, parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    kept.setdefault(f"{name} after", []).append(parameter.grad.clone())


HOOKS: dict[str, Callable[[nn.Module, Kept], Any]] = {
    "forward hook": _seeing,
    "forward hook that replaces": _replacing,
    "forward hook in place": _in_place,
    "forward pre-hook": _before,
    "tensor hook": _tensor,
    "backward hook": _backward,
    "backward pre-hook": _before_backward,
    "retain_grad": _retaining,
    "retain_grad later": _retaining_late,
}
