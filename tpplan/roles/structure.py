"""The modules inside of one that is called: looked at then, and again where they have changed."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from tpplan.comm import Site
from tpplan.comm.agreement import compare_gradient
from tpplan.roles.later import (
    added_to,
    is_over,
    require_at_home,
    require_none_added,
    require_none_replaced,
    watch_forwards,
)
from tpplan.roles.lowered import Lowered, State

_ADDED = (
    "it was added, or put in the place of another one, after tpplan.parallelize, where each rank "
    "has a part of its gradient: add it before, or freeze it (requires_grad_(False))"
)


class Structure:
    """What is inside of a module, as it was when it was looked at.

    It is compared at each call: without a frame of Python for each module.
    """

    def __init__(self, module: Lowered) -> None:
        self._modules = list(module.modules())
        self._tables = [m._modules for m in self._modules]
        self._attributes = [vars(m) for m in self._modules]
        self._parameters = [m._parameters for m in self._modules]
        self._kinds = list({_written(m): None for m in self._modules})
        self._numbers = [
            (vars(m), name)
            for m in self._modules
            if isinstance(known := vars(m).get("_tpplan"), State)
            for name in known.numbers or ()
        ]
        self._added = [p for _, p in added_to(module)]
        self._then = self._now()

    def _now(self) -> tuple[list[Any], ...]:
        return (
            [*map(tuple, map(dict.values, self._tables))],
            [*map(type, self._modules)],
            [*map(dict.get, self._attributes, itertools.repeat("forward"))],
            [*map(len, self._parameters)],
            [kind.forward for kind in self._kinds],
            [attributes.get(name) for attributes, name in self._numbers],
            [p.requires_grad and torch.is_grad_enabled() for p in self._added],
        )

    def holds(self) -> bool:
        """Whether all is as it was."""
        return self._then == self._now()

    def __reduce__(self) -> Any:
        return type(None), ()  # to be looked at where it comes to


def _written(module: Any) -> Any:
    """The class that its user wrote."""
    origin = getattr(type(module), "_tpplan_origin", None)
    return type(module) if origin is None else origin[1]


# a graph of it would be none of the model's
@torch.compiler.disable  # type: ignore[untyped-decorator]
def look(module: Lowered) -> None:
    """Look at what is inside of ``module``, which is called and is not what it was.

    Raises:
        RuntimeError: where it is not what can be run any more, with a path.
    """
    state = module._tpplan
    stream = state.stream
    require_none_replaced(module)
    require_at_home(module)
    if torch.is_grad_enabled():
        if stream.sequence_parallel:
            require_none_added(module, stream.group)
        for name, p in added_to(module):
            if p.requires_grad and not is_over(p, stream.group):
                said = ".".join(filter(None, (state.plan.path, name)))
                site = Site(state.plan.path, "gradients of parameters added since")
                device_type = stream.mesh.device_type
                compare_gradient(p, f"'{said}'", _ADDED, stream.group, site, device_type)
    watch_forwards(module)
    for inner in module.modules():
        if isinstance(inner, Lowered):
            inner._tpplan.watched = None
    state.structure = Structure(module)
