"""At some calls of a model: whether its ranks are given, hold and make of it the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tpplan import compat
from tpplan.comm import Site
from tpplan.comm.agreement import (
    OTHER_LOSS,
    SHARED_HEADS,
    compare_gradient,
    compare_gradients,
    require_same_inputs,
)
from tpplan.comm.alike import Alike
from tpplan.comm.fingerprints import can_read
from tpplan.places import tensors_in
from tpplan.roles.draws import draws_in_training
from tpplan.roles.lowered import Lowered
from tpplan.roles.prefixes import trained_inside


def begin(module: Lowered, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Alike | None:
    """Compare, at some calls, the ranks' batches, and where random numbers are drawn from.

    Gives what takes down, at those calls, what else must be alike.

    Raises:
        ValueError: where they differ.
    """
    state = module._tpplan
    stream, dim = state.stream, state.stream.dim
    if compat.only_sizes_count():
        return None
    x = next((t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)), None)
    one = x is not None and x.dim() > dim and x.size(dim) == 1
    trains = torch.is_grad_enabled()
    inside = [*trained_inside(_by_name(args, kwargs))] if trains and stream.shares_heads else []
    if not state.schedule.due((module.training, trains, one, bool(inside))):
        return None
    site = _site(module, "inputs of the ranks")
    simulated = compat.is_simulated(stream.group.mesh)
    draws = frozenset[str]()
    if module.training and not simulated:
        draws = stream.randomness.drawn
        if draws_in_training(module):
            draws |= {"torch"}
    given, where = _by_name(args, kwargs), (stream.group, site, stream.mesh.device_type)
    require_same_inputs(given, *where, stream.randomness, draws)
    if trains:
        to = stream.group, _site(module, "gradients of what it is given"), stream.mesh.device_type
        compare_gradients(given, *to)
        for name, t in inside:
            compare_gradient(t, name, SHARED_HEADS, *to)
    if simulated or not state.schedule.counted or not can_read([], stream.mesh.device_type):
        return None
    generators = _generators(module)
    how = stream.randomness, generators, stream.sequence_parallel
    alike = Alike(stream.group, stream.mesh.device_type, *how)
    alike.note_replicas(module.named_parameters(state.plan.path))
    return alike


def run(
    module: Lowered,
    step: Callable[..., Any],
    alike: Alike,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """What ``step`` gives, at whose end the ranks compare what they held to be alike."""
    with alike.during(_site(module, "what ranks hold alike")) as note:
        out = step(*args, **kwargs)
        for name, x in _given_out(out):
            note(x, Site(module._tpplan.plan.path, f"its result{name}"))
    return out


def watch_loss(module: Lowered, out: Any) -> None:
    """Have the ranks compare the gradients that a loss makes of what the user is given."""
    stream, path = module._tpplan.stream, module._tpplan.plan.path
    site = _site(module, "gradients of what it gives")
    for name, x in _given_out(out):
        if x.requires_grad:
            said = f"what {path or 'the model'} gives{name}"
            compare_gradient(x, said, OTHER_LOSS, stream.group, site, stream.mesh.device_type)


def _by_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Any, Any]:
    """What is given directly, which is told so from what is in a list."""
    return {**dict(enumerate(args)), **kwargs}


def _generators(module: Lowered) -> list[torch.Generator]:
    """Those that it keeps."""
    held = (value for inner in module.modules() for value in vars(inner).values())
    return [value for value in held if isinstance(value, torch.Generator)]


def _site(module: Lowered, what: str) -> Site:
    return Site(module._tpplan.plan.path, f"{what}, compared", phase="startup")


def _given_out(out: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that every rank has whole of what a model gives, with where they are.

    Not those in lists in it: keys and values, of which each rank has those of its own heads.
    """
    for place, x in tensors_in(out):
        if place is not None and len(place) < 2 and type(x) is torch.Tensor:
            yield "".join(f" {key!r}" for key in place), x
