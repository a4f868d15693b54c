"""Events between a forward and the end of its backward."""

from __future__ import annotations

import threading
from typing import Any

import torch

from tests.compare import compare_gradients, compare_parameters, gradient_errors, same
from tests.life.life import Life, forward, plainly


def other_forwards(life: Life) -> None:
    """Evaluation, inference and a forward that is thrown away, before the backward."""
    kept, others = life.inputs(2, 7), life.inputs(3, 5)
    for model in life.both:
        model.zero_grad()
        _, objective, _ = forward(model, *kept, plainly)
        model.eval()
        with torch.no_grad():
            model(*others[0], **others[1])
        with torch.inference_mode():
            model(*others[0], **others[1])
        model.train()
        forward(model, *others, plainly)
        objective.backward()
    life.found.add("between", compare_gradients(*life.both))
    life.step("afterwards")


def threads(life: Life) -> None:
    """A forward in another thread, at several places of a backward."""
    call, other = life.inputs(2, 7), life.inputs(1, 6)

    def aside(model: Any) -> None:
        failed: list[BaseException] = []

        def run() -> None:
            try:
                model(*other[0], **other[1])
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if failed:
            raise failed[0]

    for path in life.block.alone:
        for model in life.both:
            model.zero_grad()
            handle = model.get_submodule(path).register_forward_hook(
                lambda _, __, out, model=model: (
                    _first(out).register_hook(lambda _: aside(model)) and None
                )
            )
            _, objective, _ = forward(model, *call, plainly)
            handle.remove()
            objective.backward()
        life.found.add(f"behind {path}", compare_gradients(*life.both))
    life.step("afterwards")


def _first(out: Any) -> torch.Tensor:
    tensor: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return tensor


def frozen_before_backward(life: Life) -> None:
    """Every second parameter is frozen when the forward is over, and thawed after the backward."""
    for turn in (0, 1):
        call = life.inputs(2, 7)
        for model in life.both:
            model.zero_grad()
            _, objective, _ = forward(model, *call, plainly)
            chosen = list(model.parameters())[turn::2]
            for parameter in chosen:
                parameter.requires_grad_(False)
            objective.backward()
            for parameter in chosen:
                parameter.requires_grad_(True)
        life.found.add(f"frozen from {turn}", compare_gradients(*life.both))
    life.step("afterwards")


def several_losses(life: Life) -> None:
    """Parts of one graph, one after the other: some parameters', then the rest."""
    call = life.inputs(3, 7)
    names = [name for name, _ in life.reference.named_parameters()]
    some = []
    for model in life.both:
        model.zero_grad()
        outputs, objective, given = forward(model, *call, plainly)
        chosen = [model.get_parameter(name) for name in names[::3]]
        found = torch.autograd.grad(objective, [*chosen, *given], retain_graph=True)
        some.append({str(i): g for i, g in enumerate(found)})
        second = torch.stack([t.float().square().mean() for t in outputs.values()]).sum()
        second.backward(retain_graph=True)
        (objective + 2 * second).backward(inputs=[model.get_parameter(n) for n in names[1::2]])
    life.found.add("of some", gradient_errors(*some))
    life.found.add("of all", compare_gradients(*life.both))
    life.step("afterwards")


def stepping_in_backward(life: Life) -> None:
    """The optimizer steps as soon as a gradient is there."""

    def now(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=1e-3)
        parameter.grad = None

    handles = [p.register_post_accumulate_grad_hook(now) for m in life.both for p in m.parameters()]
    for shape in ((2, 7), (3, 8)):
        call = life.inputs(*shape)
        for model in life.both:
            forward(model, *call, plainly)[1].backward()
        life.found.add(f"{shape}: parameters", compare_parameters(*life.both))
    for handle in handles:
        handle.remove()
    life.step("afterwards")


def joint(life: Life) -> None:
    """Two models in one loss, one's outputs weighed by the other's."""
    twin = life.sibling(6)
    call, other = life.inputs(2, 7), twin.inputs(2, 7)
    for one, two in ((life.reference, twin.reference), (life.model, twin.model)):
        one.zero_grad(), two.zero_grad()
        outcomes = forward(one, *call, plainly)[1], forward(two, *other, plainly)[1]
        (outcomes[0] * outcomes[1]).backward()
    life.found.add("the one", compare_gradients(*life.both))
    life.found.add("the other", compare_gradients(*twin.both))


def autocast_checkpointed(life: Life) -> None:
    """Under autocast a layer that is recomputed has the gradients of one that is not."""
    low = life.single()
    args, kwargs = low.inputs(2, 7)
    found = []
    for reentrant in (None, False):
        low.model.recompute = reentrant
        low.model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            _, objective, _ = forward(low.model, args, kwargs, plainly)
        objective.backward()
        found.append({n: p.grad for n, p in low.model.named_parameters()})
    low.model.recompute = None
    differ = [n for n, g in found[0].items() if not _equal(g, found[1][n])]
    life.found.add(f"differ: {differ}", same(not differ))


def _equal(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    return bool((one == other).all())
