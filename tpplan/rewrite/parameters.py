"""How a rewritten module reads its DTensor parameters: as local tensors, still in the graph.

Each module keeps the local tensors of its own parameters. They are made by one autograd function
for a whole group of modules (an element of the stack; all parameters with summed gradients), and
kept for as long as every parameter is the very object, with the very storage, they were made
from. Under FSDP2, which swaps parameters in and out, they are made anew for each forward; so are
those of whatever else stands in a parameter's place (``functional_call``, a parametrization, a
parameter of the unsharded model), which is placed as planned first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tpplan import compat
from tpplan.comm import Site, Stream, localize
from tpplan.comm.distribute import placed

_Source = tuple[str, Any, torch.Tensor, bool]


class _Job:
    """A parameter whose local tensor is to be made."""

    def __init__(self, own: Own, index: int, held: Any, parameter: DTensor) -> None:
        self.own, self.index = own, index
        self.held = held  # what the module has in the parameter's place
        self.parameter = parameter  # the same, placed as planned


class Own:
    """The parameters of one module, and the local tensors it computes with.

    Attributes:
        names: of the parameters, in the order computation wants them.
        specs: for each, how it was planned to be placed.
        summed: for each, whether its gradient is summed over the ranks.
        apart: for each, whether only some of the ranks use it.
        site: what a summing collective is reported under when the module is on its own.
    """

    def __init__(
        self,
        module: nn.Module,
        names: Sequence[str],
        summed: Sequence[bool],
        site: Site,
        apart: Sequence[bool] = (),
    ) -> None:
        self.names = tuple(names)
        self.specs = tuple(compat.spec_of(module._parameters[name]) for name in names)  # type: ignore[arg-type]
        self.summed = tuple(summed)
        self.apart = tuple(apart) or (False,) * len(self.names)
        self.site = site
        self.adopt(module)

    def adopt(self, module: nn.Module) -> None:
        """Take the parameters the module holds now for the installed ones."""
        self.installed: list[Any] = [module._parameters[name] for name in self.names]
        self.drop()

    def drop(self) -> None:
        """Forget the local tensors (and let go of the graph nodes that hold the parameters)."""
        self._kept: list[Any] = [None] * len(self.names)
        self._sources: list[_Source | None] = [None] * len(self.names)
        self._passing: dict[int, tuple[Any, torch.Tensor]] = {}

    def release(self, index: int) -> None:
        """Let go of a parameter that FSDP2 has put another one in the place of."""
        self.installed[index] = self._kept[index] = self._sources[index] = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Own:
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.names, twin.specs, twin.site = self.names, self.specs, self.site
        twin.summed, twin.apart = self.summed, self.apart
        twin.installed = copy.deepcopy(self.installed, memo)
        twin.drop()
        return twin

    def read(self, module: nn.Module, stream: Stream) -> Sequence[torch.Tensor]:
        """The local tensors of the module's parameters, in the order of ``names``."""
        parameters: Any = module._parameters
        for source in self._sources:
            if (
                source is None
                or parameters.get(source[0]) is not source[1]
                or source[1]._local_tensor is not source[2]
                or source[1].requires_grad is not source[3]
            ):
                return self._renewed(module, stream)
        return self._kept

    def stale(self, module: nn.Module) -> list[int]:
        """Which of the parameters have no local tensor, or one that is no longer theirs."""
        parameters: Any = module._parameters
        return [
            i
            for i, source in enumerate(self._sources)
            if source is None
            or parameters.get(source[0]) is not source[1]
            or source[1]._local_tensor is not source[2]
            or source[1].requires_grad is not source[3]
        ]

    def _renewed(self, module: nn.Module, stream: Stream) -> Sequence[torch.Tensor]:
        stale = self.stale(module)
        held = module._parameters
        missing = [
            i
            for i in stale
            if i not in self._passing or self._passing[i][0] is not held.get(self.names[i])
        ]
        if missing:
            make([(module, self, i) for i in missing], stream, self.site)
        passing, self._passing = self._passing, {}
        # what was made for good just now is among the kept; what FSDP2 holds back is nowhere
        due = {i: passing[i][1] if i in passing else self._kept[i] for i in stale}
        for i, local in due.items():
            if local is None:
                raise RuntimeError(
                    f"{self.title(i)} is sharded by FSDP at this moment; call the module that "
                    "fully_shard was applied to, or its unshard() first"
                )
        return [due.get(i, kept) for i, kept in enumerate(self._kept)]

    def title(self, index: int) -> str:
        """The name of a parameter, for messages."""
        return ".".join(filter(None, (self.site.module, self.names[index])))

    def placed(self, index: int, held: Any) -> DTensor | None:
        """``held``, which stands in a parameter's place, as planned; None: FSDP2 shards it now."""
        spec, name = self.specs[index], self.title(index)
        if not isinstance(held, torch.Tensor):
            raise RuntimeError(f"{name} is gone: the module has {held!r} in its place")
        if held.shape != spec.shape:
            raise RuntimeError(
                f"{name} has the shape {tuple(held.shape)} now, where {tuple(spec.shape)} is due; "
                "give it whole, each rank takes its own part"
            )
        if isinstance(held, DTensor):
            given = compat.spec_of(held)
            if given.mesh != spec.mesh:
                return None
            if given.placements == spec.placements:
                return held
        with torch.inference_mode(False), torch.enable_grad():
            return placed(held, spec)


def successor(parameter: nn.Parameter, place: Callable[[torch.Tensor], DTensor]) -> nn.Parameter:
    """The parameter that takes another's place, with all that users have put on that one.

    Hooks are in one table for both: a handle that the user holds takes them off the new one.
    """
    new = nn.Parameter(place(parameter.detach()), requires_grad=parameter.requires_grad)
    vars(new).update(vars(parameter))
    if parameter.grad is not None:
        new.grad = place(parameter.grad.detach())
    compat.share_hooks(parameter, new)
    return new


def make(jobs: Iterable[tuple[nn.Module, Own, int]], stream: Stream, site: Site) -> None:
    """Make the local tensors of parameters of several modules with one autograd function.

    A parameter that is not on the tensor-parallel mesh at this moment (FSDP2 has not unsharded it
    yet) is left out; its module will ask again when it runs.
    """
    installed: list[_Job] = []
    passing: list[_Job] = []
    for module, own, index in jobs:
        held = module._parameters.get(own.names[index])
        whole = getattr(module, own.names[index], None) if held is None else held
        parameter = own.placed(index, whole)
        if parameter is None:
            own.release(index)
            continue
        keep = parameter is own.installed[index] and not torch.compiler.is_compiling()
        (installed if keep else passing).append(_Job(own, index, held, parameter))
    for job, local in _localized(installed, stream, site, keep=True):
        own, index, origin = job.own, job.index, job.parameter
        own._kept[index] = local
        source = (own.names[index], origin, compat.local_of(origin), origin.requires_grad)
        own._sources[index] = source
    for job, local in _localized(passing, stream, site, keep=False):
        job.own._passing[job.index] = job.held, local


def _localized(
    jobs: Sequence[_Job], stream: Stream, site: Site, keep: bool
) -> Iterable[tuple[_Job, torch.Tensor]]:
    trained = [job for job in jobs if job.parameter.requires_grad]
    frozen = [job for job in jobs if not job.parameter.requires_grad]
    locals_: tuple[torch.Tensor, ...] = ()
    # what is kept outlives this forward, which may be one without gradients
    with torch.inference_mode(False), torch.enable_grad():
        shards = compat.shards_of([job.parameter for job in frozen]) if frozen else ()
        if trained:
            locals_ = localize(
                [job.parameter for job in trained],
                [job.own.summed[job.index] for job in trained],
                stream.group,
                site,
                [job.own.apart[job.index] for job in trained],
            )
    if keep and trained:
        compat.run_when_ready(locals_[0].grad_fn)
    return zip((*frozen, *trained), (*shards, *locals_), strict=True)
