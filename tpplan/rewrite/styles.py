"""The project's own ``ParallelStyle``: what ``parallelize_module`` applies to each module."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from tpplan.comm import Site, Stream, Transition
from tpplan.planner import CompiledPlan, ModulePlan
from tpplan.rewrite.draws import Draws
from tpplan.rewrite.entry import Entry
from tpplan.rewrite.linear import Colwise, Rowwise
from tpplan.rewrite.lowered import LocalParameters, Lowered, State, lower
from tpplan.rewrite.parameters import Own
from tpplan.rewrite.streams import (
    Boundary,
    Container,
    Element,
    SequenceParallel,
    summing_site,
)
from tpplan.rewrite.vocab import VocabEmbedding, VocabHead

# what the collectives of a style are for, forward and backward
_REASONS: Mapping[str | None, tuple[str, str]] = {
    "rowwise": ("its partial outputs, summed", "gradient of its output"),
    "vocab": ("look-ups of each rank's rows, summed", "gradient of its output"),
    "head": ("logits, gathered", "gradient of the logits"),
}
_PASSING = ("a whole tensor where the stream is sharded", "gradient of a whole tensor")
_COMPUTES: Mapping[str, type[Lowered]] = {"colwise": Colwise, "rowwise": Rowwise}


class PlannedStyle(ParallelStyle):
    """Rewrites one module as its ``ModulePlan`` says."""

    def __init__(
        self,
        plan: ModulePlan,
        compiled: CompiledPlan,
        stream: Stream,
        installed: dict[str, nn.Parameter],
        entries: dict[tuple[str, ...], Entry],
        source: int | None,
    ) -> None:
        super().__init__()
        self.plan, self.compiled, self.stream = plan, compiled, stream
        self.installed, self.entries, self.source = installed, entries, source

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        summed = []
        for leaf in self.plan.parameters:
            name = f"{self.plan.path}.{leaf}" if self.plan.path else leaf
            entry = self.compiled.parameter(name)
            summed.append(entry.summed)
            if entry.name not in self.installed:
                parameter = module._parameters[leaf]
                assert parameter is not None
                self.installed[entry.name] = distributed(
                    parameter, device_mesh, entry.placement, self.source
                )
            module._parameters[leaf] = self.installed[entry.name]
        for name, (_, local) in self.plan.attributes.items():
            setattr(module, name, local)
        roles = roles_of(self.plan, module)
        if roles:
            own = Own(module, self.plan.parameters, summed, summing_site(self.plan.path))
            state = State(self.plan, self.stream, own, self._transition(), self._entry())
            lower(module, roles, state)
        return module

    def _transition(self) -> Transition:
        plan, rule = self.plan, _text(self.plan)
        style = "head" if plan.style == "vocab" and plan.boundary is not None else plan.style
        forward, backward = _REASONS.get(style, _PASSING)
        return Transition(
            self.stream.group, Site(plan.path, forward, rule), Site(plan.path, backward, rule)
        )

    def _entry(self) -> Entry | None:
        boundary = self.plan.boundary
        if boundary is None:
            return None
        if boundary.shared not in self.entries:
            consumers = [
                c
                for path in boundary.shared
                for c in self.compiled.modules[path].boundary.consumers  # type: ignore[union-attr]
            ]
            names = ", ".join(c.removeprefix(f"{self.plan.path}.") for c in consumers)
            rule = _text(self.compiled.modules[consumers[0]])
            transition = Transition(
                self.stream.group,
                Site(self.plan.path, f"input of {names}", rule),
                Site(self.plan.path, f"input gradient of {names}", rule),
            )
            self.entries[boundary.shared] = Entry(transition, len(boundary.shared))
        return self.entries[boundary.shared]


def _text(plan: ModulePlan) -> str | None:
    return None if plan.rule is None else plan.rule.pattern.text


def roles_of(plan: ModulePlan, module: nn.Module) -> list[type[Lowered]]:
    """The classes a module takes on, the outermost first."""
    roles: list[type[Lowered]] = []
    if plan.container:
        roles.append(Container)
    if plan.draws is not None:
        roles.append(Draws)
    if plan.element is not None:
        roles.append(Element)
    if plan.boundary is not None:
        roles.append(Boundary)
    if plan.style == "vocab":
        roles.append(VocabEmbedding if isinstance(module, nn.Embedding) else VocabHead)
    elif plan.style is not None and plan.style in _COMPUTES:
        roles.append(_COMPUTES[plan.style])
    else:
        if plan.style == "sequence_parallel":
            roles.append(SequenceParallel)
        if plan.parameters:
            roles.append(LocalParameters)
    return roles


def distributed(
    parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement, source: int | None
) -> nn.Parameter:
    """``parameter`` as a DTensor on ``mesh``, with the values of rank ``source`` of the group.

    ``source`` None trusts each rank's own values. The given parameter is not changed: a replica
    is broadcast into a copy.
    """
    value = parameter.detach()
    if placement.is_replicate():
        value = value.clone()
    shard = distribute_tensor(value, mesh, [placement], src_data_rank=source)
    return nn.Parameter(shard, requires_grad=parameter.requires_grad)
