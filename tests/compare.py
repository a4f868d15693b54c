"""How far a sharded model is from the unsharded one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from tpplan.comm.rows import RowsTensor

TOLERANCE = 1e-5
WRONG = float("inf")

Errors = dict[str, float]


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, detached: a DTensor is gathered from its ranks."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def joined(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, through which gradients flow."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's part of ``whole`` under the placements of ``like``; nothing is sent."""
    if not isinstance(like, DTensor) or whole.shape != like.shape:
        return whole
    if isinstance(like, RowsTensor):
        return like.rows.take(whole, like.device_mesh.get_local_rank())
    mine = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    return mine.to_local()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, detached."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def difference(expected: torch.Tensor, got: torch.Tensor) -> float:
    """max|difference| over what this rank holds; infinite where shapes or dtypes differ."""
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return WRONG
    mine, ours = shard_like(expected.detach(), got), local(got)
    if mine.shape != ours.shape:
        return WRONG
    return (mine - ours).abs().max().item() if mine.numel() else 0.0


def error(expected: torch.Tensor, got: torch.Tensor) -> float:
    """max|difference| / max|expected|; infinite where shapes or dtypes differ."""
    if expected.numel() == 0:
        return same(expected.shape == got.shape)
    return difference(expected, got) / max(expected.detach().abs().max().item(), 1e-30)


def gradient_errors(
    expected: Mapping[str, torch.Tensor | None], got: Mapping[str, torch.Tensor | None]
) -> Errors:
    """For each gradient, max|difference| / max(max|g|, 1e-3 of the largest |g| in the model)."""
    largest = max((g.abs().max().item() for g in expected.values() if g is not None), default=0.0)
    errors = {}
    for name, g in expected.items():
        ours = got[name]
        if g is None or ours is None:
            errors[name] = same(g is ours)
            continue
        scale = max(g.abs().max().item(), 1e-3 * largest, 1e-30)
        errors[name] = difference(g, ours) / scale
    return errors


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """The gradient of every parameter, as it is."""
    return {name: p.grad for name, p in model.named_parameters()}


def compare_gradients(reference: nn.Module, model: nn.Module) -> Errors:
    """The error of every parameter's gradient, under ``gradient of <name>``.

    A DTensor's gradient must be a DTensor of the same placements: optimizers rely on it.
    """
    errors = gradient_errors(gradients(reference), gradients(model))
    for name, p in model.named_parameters():
        if isinstance(p, DTensor) and p.grad is not None:
            fits = isinstance(p.grad, DTensor) and p.grad.placements == p.placements
            errors[name] = max(errors[name], same(fits))
    return {f"gradient of {name}": e for name, e in errors.items()}


def compare_parameters(reference: nn.Module, model: nn.Module) -> Errors:
    """The absolute error of every parameter's value."""
    theirs = dict(reference.named_parameters())
    ours = dict(model.named_parameters())
    if theirs.keys() != ours.keys():
        return {"names of the parameters": WRONG}
    return {n: difference(p, ours[n]) for n, p in theirs.items()}


def same(condition: bool) -> float:
    """An error for something that is right or wrong."""
    return 0.0 if condition else WRONG


class Findings:
    """Errors under names: cases add theirs, the test asserts on what all ranks found."""

    def __init__(self) -> None:
        self.errors: Errors = {}

    def add(self, case: str, errors: Errors | float) -> None:
        """Keep the errors of one case."""
        if isinstance(errors, Mapping):
            self.errors.update({f"{case}: {name}": e for name, e in errors.items()})
        else:
            self.errors[case] = errors

    @contextlib.contextmanager
    def case(self, name: str) -> Iterator[None]:
        """Name the case in the traceback of whatever it raises."""
        try:
            yield
        except Exception as e:
            e.add_note(f"in the case '{name}'")
            raise


def beyond(results: Iterable[Errors], tolerance: float = TOLERANCE) -> Errors:
    """The worst error of each name over the ranks, where it is beyond the tolerance (or NaN)."""
    worst: Errors = {}
    for errors in results:
        for name, e in errors.items():
            if not e <= tolerance and not worst.get(name, 0.0) >= e:
                worst[name] = e
    return worst


def step(
    reference: nn.Module,
    model: nn.Module,
    run: Callable[[Any], Mapping[str, torch.Tensor]],
    plain: bool = True,
) -> Errors:
    """Run both forward and backward from scratch, and compare all outputs and gradients.

    Args:
        run: calls a model and returns named tensors. "objective" is differentiated and not
            compared itself (a sum of many terms that cancel measures rounding), the others are.
            Called once for each model, it must draw the same inputs for both.
        plain: whether the sharded model's outputs must be ordinary full tensors.
    """
    outputs = []
    for m in (reference, model):
        m.zero_grad()
        out = dict(run(m))
        out.pop("objective").backward()
        outputs.append(out)
    theirs, ours = outputs
    errors = {n: error(t, ours[n]) for n, t in theirs.items()}
    if plain:
        errors |= {f"{n} is sharded": WRONG for n, t in ours.items() if isinstance(t, DTensor)}
    return {**errors, **compare_gradients(reference, model)}
