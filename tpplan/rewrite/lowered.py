"""What every rewritten module has in common: its class is swapped, its data stays on it.

The new class derives from the module's own, so every isinstance check that held still holds; it
keeps the name, so ``repr`` and the model's own look-ups by class name are unchanged. Nothing is
captured in closures: a deep copy computes with the copy's weights.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tpplan.comm import Stream, Transition
from tpplan.comm.agreement import Schedule
from tpplan.comm.distribute import distributed
from tpplan.planner import ModulePlan
from tpplan.rewrite.entry import Entry
from tpplan.rewrite.parameters import Own


class State:
    """What a rewritten module knows.

    Attributes:
        plan: what was decided for the module.
        stream: shared by all rewritten modules of the model.
        own: the module's own parameters.
        transition: the sites of the collectives its style issues.
        entries: its boundaries, each shared with the modules that enter with the same tensor.
        partner: the module whose bias it adds, if any.
        members: rewritten modules inside it, found when first needed.
        schedule: when the ranks compare what it is called with.
        within_own: whether it was called while the rank drew from its own random sequence.
    """

    def __init__(
        self,
        plan: ModulePlan,
        stream: Stream,
        own: Own,
        transition: Transition,
        entries: tuple[Entry, ...] = (),
        partner: nn.Module | None = None,
    ) -> None:
        self.plan = plan
        self.stream = stream
        self.own = own
        self.transition = transition
        self.entries = entries
        self.partner = partner
        self.members: list[tuple[Lowered, Own]] | None = None
        self.schedule = Schedule()
        self.within_own = False

    def __deepcopy__(self, memo: dict[int, Any]) -> State:
        own, entries, partner = copy.deepcopy((self.own, self.entries, self.partner), memo)
        twin = State(self.plan, self.stream, own, self.transition, entries, partner)
        memo[id(self)] = twin
        return twin


class Lowered(nn.Module):
    """Base of the classes that rewritten modules take on. Never instantiated itself."""

    _tpplan: State

    def _locals(self) -> Sequence[torch.Tensor]:
        state = self._tpplan
        return state.own.read(self, state.stream)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # what a conversion leaves behind is installed anew, and the old local tensors let go
        own = self._tpplan.own
        before = tuple(self._parameters[name] for name in own.names)
        installed = all(p is q for p, q in zip(before, own.installed, strict=True))
        result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if installed:
            own.adopt(self)
        return result

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *rest: Any
    ) -> None:
        # a checkpoint of the unsharded model loads as before: each rank takes its own shard
        own = self._tpplan.own
        held = [self._parameters[name] for name in own.names]
        for name in own.names:
            given, here = state_dict.get(prefix + name), self._parameters[name]
            if not isinstance(given, torch.Tensor) or isinstance(given, DTensor):
                continue
            if isinstance(here, DTensor) and given.shape == here.shape:
                state_dict[prefix + name] = distributed(
                    given.detach(), here.device_mesh, here.placements[0], None
                )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
        if all(p is q for p, q in zip(held, own.installed, strict=True)):
            own.adopt(self)


class LocalParameters(Lowered):
    """Runs the module's own forward with local tensors standing in for its parameters."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        names = self._tpplan.own.names
        if not names:
            return super().forward(*args, **kwargs)
        own = self._parameters
        outer = [own[name] for name in names]
        for name, local in zip(names, self._locals(), strict=True):
            own[name] = local  # type: ignore[assignment]
        try:
            return super().forward(*args, **kwargs)
        finally:
            for name, parameter in zip(names, outer, strict=True):
                own[name] = parameter


def lower(
    module: nn.Module,
    roles: Sequence[type[nn.Module]],
    state: object,
    inner: type[Lowered] | None = None,
) -> None:
    """Give ``module`` the classes ``roles`` (the outermost first) in front of its own.

    Args:
        state: what they know.
        inner: a role that takes the place of torch's class that the module's own derives from,
            so that what the module's own class adds to it goes on working.
    """
    module.__class__ = _class(tuple(roles), type(module), inner)  # type: ignore[arg-type]
    object.__setattr__(module, "_tpplan", state)


@functools.cache
def _class(
    roles: tuple[type[nn.Module], ...], original: type[nn.Module], inner: type[Lowered] | None
) -> type[nn.Module]:
    body: dict[str, Any] = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
    }
    # a copy of the outermost role's forward that shows the original's signature: Trainer and
    # generate() read the names of a model's arguments from it
    outermost = next((role for role in roles if "forward" in vars(role)), None)
    if outermost is not None:
        forward = types.FunctionType(
            outermost.forward.__code__,
            outermost.forward.__globals__,
            outermost.forward.__name__,
            outermost.forward.__defaults__,
            outermost.forward.__closure__,
        )
        forward.__kwdefaults__ = outermost.forward.__kwdefaults__
        body["forward"] = functools.update_wrapper(forward, original.forward)
    bases = (*roles, original) if inner is None else (*roles, original, inner)
    return type(original.__name__, bases, body)
