"""What one rank does in ``verify``: run the sharded model and compare with the reference."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from tpplan.comm.products import deferring
from tpplan.compat import local_of, simulate, unmoded
from tpplan.compiled import CompiledPlan
from tpplan.observe.calls import Call
from tpplan.observe.grouped import InAnyPrecision
from tpplan.observe.numbers import difference, largest
from tpplan.observe.untouched import apart, by_itself
from tpplan.proof.calls import other_batch
from tpplan.proof.exact import exact
from tpplan.proof.step import outputs_of
from tpplan.proof.stopped import Stopped
from tpplan.rewrite import apply
from tpplan.simulate.recorder import Recorder
from tpplan.simulate.steps import PHASES, counts


@dataclass(frozen=True)
class Reference:
    """The unsharded model, a call, and what it gives: plain data that a process can be sent.

    Attributes:
        called: the modules that ran.
        over_ep: what it is on each rank of ep, where there are several: of its own batch, and of
            experts that these share the mean of all their gradients.
        wide: whether all is computed in float64, whatever the model's code asks for.
    """

    model: nn.Module
    call: Call
    seed: int
    outputs: tuple[torch.Tensor, ...]
    gradients: Mapping[str, torch.Tensor | None]
    called: frozenset[str]
    over_ep: tuple[Reference, ...] = ()
    wide: bool = False

    def on(self, place: int) -> Reference:
        """What it is on one of the ranks of ep."""
        return self.over_ep[place] if self.over_ep else self


@dataclass(frozen=True)
class Outcome:
    """What one rank found; see ``Check``."""

    output_error: float
    gradient_errors: Mapping[str, float]
    counts: Mapping[str, Mapping[str, int]]
    bytes_held: int


def with_batches(reference: Reference, compiled: CompiledPlan) -> Reference:
    """The reference with what it is on each rank of ep."""
    if compiled.ep == 1:
        return reference
    found = []
    for place in range(compiled.ep):
        twin, call = copy.deepcopy(reference.model), other_batch(reference.call, place)
        twin.zero_grad(set_to_none=True)
        outputs, gradients = differentiate(twin, call, reference.seed + place)
        found.append(
            replace(
                reference,
                call=call,
                seed=reference.seed + place,
                outputs=outputs,
                gradients=gradients,
            )
        )
    means = mean_over_ep([one.gradients for one in found], compiled)
    each = (replace(one, gradients={**one.gradients, **means}) for one in found)
    return replace(reference, over_ep=tuple(each))


def mean_over_ep(
    each: Sequence[Mapping[str, torch.Tensor | None]], compiled: CompiledPlan
) -> dict[str, torch.Tensor]:
    """The gradients of the experts that ranks of ep share: the mean of what each one's batch gives.

    Args:
        each: the gradients by parameter, of each rank.
    """
    means = {}
    for name, entry in compiled.parameters.items():
        found = [g for one in each if (g := one.get(name)) is not None]
        if entry.over_ep is not None and found:
            means[name] = torch.stack(found).sum(0) / len(each)
    return means


def simulated(compiled: CompiledPlan, job: Callable[[DeviceMesh], Any]) -> list[Any]:
    """``job(mesh)`` on simulated ranks; they defer as the ranks of a large model do.

    It may be done twice: where the model's code keeps something outside of the model, each rank
    has to find its own.
    """

    def run(turns: Sequence[AbstractContextManager[None]] | None) -> list[Any]:
        return simulate(compiled.tp, job, compiled.ep, turns)

    with deferring(0):
        return apart(run, compiled.tp * compiled.ep)


def places_of(mesh: DeviceMesh, compiled: CompiledPlan) -> tuple[int, int]:
    """This rank's place among those of ep, and among the tensor-parallel ones."""
    here = mesh.get_coordinate() or (0,)
    return (here[0] if compiled.ep > 1 else 0), (here[-1] if compiled.tp > 1 else 0)


def differentiate(
    model: nn.Module, call: Call, seed: int
) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor | None]]:
    """One forward and backward: the floating outputs, and the gradient of every parameter.

    The objective weighs every element of every output with its own random number, so that no
    symmetry of the outputs hides an error.
    """
    with by_itself(packages=True):
        outputs = results(model, call)
        backward(outputs, seed)
    return tuple(whole(t).detach() for t in outputs), gradients_of(model)


def results(model: nn.Module, call: Call) -> list[torch.Tensor]:
    """The floating tensors of the model's output that depend on its parameters."""
    args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.clone, call)
    with InAnyPrecision():
        leaves = outputs_of(model(*args, **kwargs)).values()
    return [t for t in leaves if t.requires_grad]


def backward(outputs: list[torch.Tensor], seed: int) -> None:
    """Differentiate the random-weighted sum of ``outputs``."""
    generator = torch.Generator().manual_seed(seed + 1)
    parts = []
    for t in outputs:
        with unmoded():  # nothing is random to `exact`
            weights = torch.randn(t.shape, generator=generator, dtype=torch.float32).to(t.dtype)
        parts.append((whole(t) * weights).sum())
    # not .backward(), which takes a mode off for what is computed again there
    torch.autograd.backward([torch.stack(parts).sum()])


def whole(t: torch.Tensor) -> torch.Tensor:
    """The full tensor of a DTensor; others as they are."""
    return t.full_tensor() if isinstance(t, DTensor) else t


def run_rank(mesh: DeviceMesh, reference: Reference, compiled: CompiledPlan) -> Outcome:
    """One rank: rewrite a copy, run it forward and backward, compare.

    Raises:
        Stopped: where the model's code does.
    """
    with exact() if reference.wide else contextlib.nullcontext():
        return _run_rank(mesh, reference.on(places_of(mesh, compiled)[0]), compiled)


def _run_rank(mesh: DeviceMesh, reference: Reference, compiled: CompiledPlan) -> Outcome:
    model = copy.deepcopy(reference.model)
    model.zero_grad(set_to_none=True)
    apply(model, compiled, mesh, src_data_rank=None, outside=False)
    recorder = Recorder()
    try:
        with recorder:
            outputs = results(model, reference.call)
        with recorder, recorder.during("backward"):
            backward(outputs, reference.seed)
    except Exception as error:
        raise Stopped.running(model, error) from error
    output_error = float("inf")
    if len(outputs) == len(reference.outputs):
        pairs = zip(reference.outputs, outputs, strict=True)
        output_error = max((relative(a, whole(b).detach()) for a, b in pairs), default=0.0)
    held = {id(p): local_of(p) if isinstance(p, DTensor) else p for p in model.parameters()}
    return Outcome(
        output_error=output_error,
        gradient_errors=gradient_errors(reference.gradients, gradients_of(model)),
        counts={phase: counts(recorder.collectives, phase) for phase in PHASES},
        bytes_held=sum(t.numel() * t.element_size() for t in held.values()),
    )


def relative(expected: torch.Tensor, got: torch.Tensor, scale: float | None = None) -> float:
    """max|Δ| / max|expected|; infinite where shapes differ, or what is not a finite number does.

    ``scale``: what it is relative to instead.
    """
    if expected.shape != got.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    scale = largest(expected) if scale is None else scale
    return difference(expected, got) / max(scale, 1e-30)


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """The gradient of every parameter, as it is."""
    return {name: p.grad for name, p in model.named_parameters()}


def gradient_errors(
    expected: Mapping[str, torch.Tensor | None], got: Mapping[str, torch.Tensor | None]
) -> dict[str, float]:
    """For every parameter, max|Δ| / max(max|g|, 1e-3 of the largest |g| in the model).

    Some true gradients are zero (a key bias without rotary positions), where a plain ratio
    measures rounding.
    """
    if set(expected) != set(got):
        lost = sorted(set(expected) ^ set(got))
        return dict.fromkeys(lost, float("inf"))
    of_all = max((largest(g) for g in expected.values() if g is not None), default=0.0)
    errors = {}
    for name, gradient in expected.items():
        ours = got[name]
        if gradient is None or ours is None:
            errors[name] = 0.0 if gradient is ours else float("inf")
        else:
            scale = max(largest(gradient), 1e-3 * of_all)
            errors[name] = relative(gradient, whole(ours.detach()), scale)
    return errors
