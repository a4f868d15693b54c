"""The rewritten modules inside of another, whose local tensors are made together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tpplan import compat
from tpplan.comm import Site
from tpplan.comm.collectives import UNTRANSFORMED
from tpplan.roles.kept import Keeping, put_right
from tpplan.roles.lowered import Lowered
from tpplan.roles.parameters import Own, make
from tpplan.roles.structure import look


def summing_site(path: str) -> Site:
    """What the sum of the gradients of replicated parameters in ``path`` is reported under."""
    return Site(path, "sum of the gradients of replicated parameters", phase="gradient_sync")


def members_of(module: Lowered) -> list[tuple[Lowered, Own]]:
    """Those that have parameters of their own, found when first asked for."""
    state = module._tpplan
    found = state.members
    if found is None:
        found = _holding(module)
        if not torch.compiler.is_compiling():  # its graph would not serve a second time
            state.members = found
    return found


def _holding(module: nn.Module) -> list[tuple[Lowered, Own]]:
    """The rewritten modules inside of ``module`` that have parameters of their own."""
    lowered = (m for m in module.modules() if isinstance(m, Lowered))
    return [(m, m._tpplan.own) for m in lowered if m._tpplan.own.names]


def prepare(module: Lowered, summed_only: bool) -> None:
    """Make the local tensors that are missing inside ``module``, with one autograd function."""
    jobs: list[tuple[Lowered, Own, int]] = []
    for inner, own in members_of(module):
        if (summed_only and True not in own.summed) or own.current(inner) is not None:
            continue
        stale = own.stale(inner)
        jobs += [(inner, own, index) for index in stale if own.summed[index] or not summed_only]
    if jobs:
        # a graph is told no path: one of an element serves them all
        path = "" if torch.compiler.is_compiling() else module._tpplan.plan.path
        make(jobs, summing_site(path))


def hand_over_late(module: Lowered) -> None:
    """Let the gradients of an element's weights wait for the collectives of the one before it.

    In backward that one comes after it, and hides what is still to be computed of them. So do those
    of the head, beside the collective of its input's gradient already.
    """
    stream = module._tpplan.stream
    if torch.compiler.is_compiling() or compat.in_backward() or not torch.is_grad_enabled():
        return
    before, stream.started = stream.started, compat.sequence_number()
    for _, own in members_of(module):
        local = None if own.summed[0] else own.kept(0)
        if local is not None and local.grad_fn is not None:
            compat.run_after(local.grad_fn, stream.started if before is None else before)
            return


def outermost(
    module: Lowered, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What ``step`` gives, as ``module`` was called with no rewritten module around that runs.

    No context: of what runs once for a call, each frame is paid for with cold caches.

    Raises:
        RuntimeError: in a transform of torch.func's, which these autograd functions do not know;
            where what is inside was replaced by what cannot be run.
    """
    state = module._tpplan
    if compat.is_transformed():
        raise RuntimeError(f"{state.plan.path or 'the model'}: {UNTRANSFORMED}")
    if not state.apart and compat.backward_is_split():
        state.apart = True
        for _, own in members_of(module):
            own.part()
    if not torch.compiler.is_compiling() and (
        state.structure is None or not state.structure.holds()
    ):
        look(module)
    stream = state.stream
    start = stream.begin()
    try:
        out = step(*args, **kwargs)
    finally:
        stream.end(start, state.plan.path)
    for keeping in _keeping_in(module):
        put_right(keeping)
    return out


def _keeping_in(module: Lowered) -> list[Keeping]:
    """The modules inside that keep what a loss may read, found when first asked for."""
    state = module._tpplan
    found = state.keeping
    if found is None:
        found = [inner for inner in module.modules() if isinstance(inner, Keeping)]
        if not torch.compiler.is_compiling():
            state.keeping = found
    return found


class OwnMembers(Lowered, nn.ModuleList):
    """A list with a module for each head: this rank's code meets those of its own heads."""

    def _tpplan_join(self) -> None:
        """Tell the modules which of them run in each other's place on other ranks."""
        members = list(self._modules.values())
        each = len(members) // self._tpplan.transition.group.size
        for place in range(each):
            for mates in zip(*map(_holding, members[place::each]), strict=True):  # type: ignore[arg-type]
                for _, own in mates:
                    own.mates = mates

    def _tpplan_missing(self) -> bool:
        return any(own.stale(module) for module, own in members_of(self))

    def _own(self) -> list[nn.Module]:
        group = self._tpplan.transition.group
        each = len(self._modules) // group.size
        return list(self._modules.values())[each * group.rank :][:each]  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self._modules) // self._tpplan.transition.group.size

    def _tpplan_require_alike(self) -> None:
        """Refuse what would have each rank gather and scatter other parameters than the rest."""
        from torch.distributed.fsdp import FSDPModule  # which takes long to import

        for name, module in self.named_modules():
            if module is not self and isinstance(module, FSDPModule):
                raise RuntimeError(
                    f"{self._tpplan.plan.path}.{name} is sharded by FSDP by itself, but ranks run "
                    "different modules of that list; apply fully_shard to a module around it"
                )

    def __iter__(self) -> Iterator[nn.Module]:
        if self._tpplan_missing():
            self._tpplan_require_alike()
            prepare(self, summed_only=True)
        return iter(self._own())

    def __getitem__(self, index: Any) -> Any:
        if self._tpplan_missing():
            self._tpplan_require_alike()
        return self._own()[index]
