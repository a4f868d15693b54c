"""How a rewritten module reads its DTensor parameters: as local tensors, still in the graph.

Each module keeps the local tensors of its own parameters. They are made by one autograd function
for a whole group of modules (an element of the stack; all parameters with summed gradients), and
kept for as long as every parameter is the very object, with the very storage, they were made
from. Under FSDP2, which swaps parameters in and out, they are made anew for each forward.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tpplan import compat
from tpplan.comm import Site, Stream, localize

_Source = tuple[str, Any, torch.Tensor, bool]
_Job = tuple["Own", int, DTensor]


class Own:
    """The parameters of one module, and the local tensors it computes with.

    Attributes:
        names: of the parameters, in the order computation wants them.
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
        self.summed = tuple(summed)
        self.apart = tuple(apart) or (False,) * len(self.names)
        self.site = site
        self.adopt(module)

    def adopt(self, module: nn.Module) -> None:
        """Take the parameters the module holds now for the installed ones."""
        self.installed = tuple(module._parameters[name] for name in self.names)
        self.drop()

    def drop(self) -> None:
        """Forget the local tensors (and let go of the graph nodes that hold the parameters)."""
        self._kept: list[Any] = [None] * len(self.names)
        self._sources: list[_Source | None] = [None] * len(self.names)
        self._passing: dict[int, torch.Tensor] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Own:
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.names, twin.summed, twin.site = self.names, self.summed, self.site
        twin.apart = self.apart
        twin.installed = copy.deepcopy(self.installed, memo)
        twin.drop()
        return twin

    def read(self, module: nn.Module, stream: Stream) -> Sequence[torch.Tensor]:
        """The local tensors of the module's parameters, in the order of ``names``."""
        parameters: dict[str, Any] = module._parameters
        for source in self._sources:
            if (
                source is None
                or parameters[source[0]] is not source[1]
                or source[1]._local_tensor is not source[2]
                or source[1].requires_grad is not source[3]
            ):
                return self._renewed(module, stream)
        return self._kept

    def stale(self, module: nn.Module) -> list[int]:
        """Which of the parameters have no local tensor, or one that is no longer theirs."""
        parameters: dict[str, Any] = module._parameters
        return [
            i
            for i, source in enumerate(self._sources)
            if source is None
            or parameters[source[0]] is not source[1]
            or source[1]._local_tensor is not source[2]
            or source[1].requires_grad is not source[3]
        ]

    def _renewed(self, module: nn.Module, stream: Stream) -> Sequence[torch.Tensor]:
        missing = [i for i in self.stale(module) if i not in self._passing]
        if missing:
            make([(module, self, i) for i in missing], stream, self.site)
        passing, self._passing = self._passing, {}
        return [passing.get(i, kept) for i, kept in enumerate(self._kept)]


def make(jobs: Iterable[tuple[nn.Module, Own, int]], stream: Stream, site: Site) -> None:
    """Make the local tensors of parameters of several modules with one autograd function.

    A parameter that is not on the tensor-parallel mesh at this moment (FSDP2 has not unsharded it
    yet) is left out; its module will ask again when it runs.
    """
    installed: list[_Job] = []
    passing: list[_Job] = []
    for module, own, index in jobs:
        parameter = module._parameters[own.names[index]]
        if isinstance(parameter, DTensor) and compat.mesh_of(parameter) == stream.mesh:
            keep = parameter is own.installed[index] and not torch.compiler.is_compiling()
            (installed if keep else passing).append((own, index, parameter))
    for own, index, origin, local in _localized(installed, stream, site, keep=True):
        own._kept[index] = local
        source = (own.names[index], origin, compat.local_of(origin), origin.requires_grad)
        own._sources[index] = source
    for own, index, _, local in _localized(passing, stream, site, keep=False):
        own._passing[index] = local


def _localized(
    jobs: Sequence[_Job], stream: Stream, site: Site, keep: bool
) -> Iterable[tuple[Own, int, DTensor, torch.Tensor]]:
    trained = [job for job in jobs if job[2].requires_grad]
    for own, index, parameter in jobs:
        if not parameter.requires_grad:
            yield own, index, parameter, compat.local_of(parameter)
    if not trained:
        return
    # what is kept outlives this forward, which may be one without gradients
    with torch.inference_mode(False), torch.enable_grad():
        locals_ = localize(
            [parameter for _, _, parameter in trained],
            [own.summed[index] for own, index, _ in trained],
            stream.group,
            site,
            [own.apart[index] for own, index, _ in trained],
        )
    if keep:
        compat.run_when_ready(locals_[0].grad_fn)
    for (own, index, parameter), local in zip(trained, locals_, strict=True):
        yield own, index, parameter, local
