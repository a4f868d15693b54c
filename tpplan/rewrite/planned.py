"""The project's own ``ParallelStyle``: what ``parallelize_module`` applies to each module."""

from __future__ import annotations

import functools

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from tpplan import compiled as data
from tpplan.comm import Group, Site, Stream, Transition
from tpplan.comm.distribute import distributed, distributed_over_ep
from tpplan.comm.meshes import ep_of
from tpplan.compiled import CompiledPlan, ModulePlan
from tpplan.kernels.forms import GeluForm
from tpplan.kernels.launch import chosen
from tpplan.planner.attributes import assign
from tpplan.planner.match import folded
from tpplan.roles.dispatch import WAYS
from tpplan.roles.draws import Draws
from tpplan.roles.entry import Entry
from tpplan.roles.experts import Escaping
from tpplan.roles.fused import ROLES, Around, Swapped, common, partner_of
from tpplan.roles.given import Given
from tpplan.roles.handing import Handing
from tpplan.roles.heads import HeadInputs, OwnBuffers, keep_own
from tpplan.roles.kept import Keeping
from tpplan.roles.lowered import Lowered, State, lower, numbers_of
from tpplan.roles.members import summing_site
from tpplan.roles.narrow import Widened
from tpplan.roles.parameters import Own, successor
from tpplan.roles.sequence import Spreading
from tpplan.roles.streams import Container, Entering, InStack
from tpplan.roles.unreached import Unreached
from tpplan.styles import named
from tpplan.styles.replicate import REPLICATE
from tpplan.styles.rowwise import ROWWISE


class PlannedStyle(ParallelStyle):
    """Rewrites one module as its ``ModulePlan`` says."""

    def __init__(
        self,
        plan: ModulePlan,
        root: nn.Module,
        compiled: CompiledPlan,
        stream: Stream,
        installed: dict[str, nn.Parameter],
        entries: dict[tuple[int | str, ...], Entry],
        source: int | None,
        mesh: DeviceMesh,
    ) -> None:
        super().__init__()
        self.mesh = mesh
        self.plan, self.root, self.compiled, self.stream = plan, root, compiled, stream
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
                everywhere = entry.over_ep is not None
                place = functools.partial(
                    distributed_over_ep if everywhere else distributed,
                    mesh=self.mesh if everywhere else device_mesh,
                    placement=entry.placement,
                    source=self.source,
                )
                self.installed[entry.name] = successor(parameter, place)
            module._parameters[leaf] = self.installed[entry.name]
        for name, (_, local) in self.plan.attributes.items():
            assign(module, name, local)
        for name, (dim, heads) in self.plan.cut.items():
            group = self.stream.group
            keep_own(module, name, dim, heads, group.rank, group.size)
        fused = self._fused(device_mesh.device_type)
        roles, inner = roles_of(self.plan, module, fused)
        if roles or inner is not None:
            site = summing_site(self.plan.path)
            means = self.compiled.ep if self.plan.dispatched else 1
            tp = Group.of(self.stream.mesh)
            own = Own(module, self.plan.parameters, summed, site, tp, means)
            partner = partner_of(self.plan.path, module, self.plan.kernel, self.root)
            ways = self._transition(), self._entries(), partner, self._dispatch()
            state = State(self.plan, self.stream, own, *ways)
            table = isinstance(module, nn.Embedding) and self.plan.style != REPLICATE.name
            if fused is not None or self.plan.norm is not None or table:
                state.numbers = numbers_of(module)
            lower(module, roles, state, inner)
        return module

    def _fused(self, device_type: str) -> type[nn.Module] | None:
        choice = self.plan.kernel
        if choice is None or not runs_fused(self.plan, device_type):
            return None
        return ROLES[type(choice.form)]

    def _transition(self) -> Transition:
        plan, rule = self.plan, _text(self.plan)
        style = ROWWISE if plan.summed is not None else named(plan.style)
        forward, backward = style.reasons(plan)
        return Transition(
            self.stream.group, Site(plan.path, forward, rule), Site(plan.path, backward, rule)
        )

    def _dispatch(self) -> tuple[Transition, Transition] | None:
        """The ways of tokens to their experts, and back."""
        ep = ep_of(self.mesh, self.compiled.ep) if self.plan.dispatched else None
        if ep is None:
            return None
        rule, group = _text(self.plan), Group.of(ep)
        sites = [Site(self.plan.path, why, rule, routed=True) for why in WAYS]
        return Transition(group, *sites[:2]), Transition(group, *sites[2:])

    def _entries(self) -> tuple[Entry, ...]:
        return tuple(self._entry(boundary) for boundary in self.plan.boundaries)

    def _entry(self, boundary: data.Boundary) -> Entry:
        key: tuple[int | str, ...] = (boundary.number, *boundary.shared)
        if key not in self.entries:
            entering = {
                consumer
                for path in boundary.shared
                for other in self.compiled.modules[path].boundaries
                if other.number == boundary.number
                for consumer in other.consumers
            }
            # not as they are called, which code may do in the order of a set
            consumers = [path for path in self.compiled.modules if path in entering]
            inner = (folded(c.removeprefix(f"{self.plan.path}.")) for c in consumers)
            names = ", ".join(dict.fromkeys(inner))
            rule = _text(self.compiled.modules[consumers[0]])
            transition = Transition(
                self.stream.group,
                Site(self.plan.path, f"input of {names}", rule),
                Site(self.plan.path, f"input gradient of {names}", rule),
            )
            served = [self.compiled.modules[path] for path in consumers]
            # where a plan says what is gathered, others may read it as well
            said = any("gather" in self.compiled.modules[p].options for p in boundary.shared)
            projections = not said and all(
                m.projection or named(m.style).vocabulary for m in served
            )
            again = Site(self.plan.path, f"input of {names}, gathered again", rule)
            shared = len(boundary.shared)
            entry = Entry(transition, again, shared, boundary.whole, projections)
            if projections and self.stream.pieces is not None:
                paths = [m.path for m in served if m.projection]
                entry.served = [self.root.get_submodule(path) for path in paths]  # type: ignore[misc]
                entry.columns = sum(map(self._columns, paths))
                entry.around = functools.reduce(common, boundary.shared)
            self.entries[key] = entry
        return self.entries[key]

    def _columns(self, path: str) -> int:
        """How many the first rank has of a column-parallel weight."""
        plan = self.compiled.modules[path]
        shape = self.compiled.parameter(f"{path}.weight".lstrip(".")).local_shape
        return shape[1 if plan.transposed else 0]


def _text(plan: ModulePlan) -> str | None:
    return None if plan.rule is None else plan.rule.pattern.text


def runs_fused(plan: ModulePlan, device_type: str) -> bool:
    """Whether a fused kernel stands for the module on this device."""
    choice = plan.kernel
    if choice is None or choice.form is None:
        return False
    return chosen(choice.implementation, device_type)


def swap_kernels(model: nn.Module, compiled: CompiledPlan, device_type: str) -> None:
    """The fused kernels of a model that is not sharded."""
    around: dict[str, None] = {}
    for path, plan in compiled.modules.items():
        choice = plan.kernel
        if choice is None or not runs_fused(plan, device_type):
            continue
        module = model.get_submodule(path)
        partner = partner_of(path, module, choice, model)
        lower(module, [ROLES[type(choice.form)]], Swapped(choice, partner))
        if isinstance(choice.form, GeluForm):
            around[common(path, choice.form.linear)] = None
    for path in around:
        lower(model.get_submodule(path), [Around], Swapped(None))


def roles_of(
    plan: ModulePlan, module: nn.Module, fused: type[nn.Module] | None
) -> tuple[list[type[nn.Module]], type[Lowered] | None]:
    """The classes a module takes on, the outermost first, and the one in torch's class's place.

    ``fused``: the one whose kernel stands for the module's own forward, if any.
    """
    around = {
        Keeping: plan.kept,
        Given: plan.given,
        Widened: plan.widened,
        Container: plan.container,
        Draws: plan.draws is not None,
        InStack: plan.element is not None,
        Spreading: plan.spread is not None,
        HeadInputs: plan.head_inputs,
        Entering: plan.boundaries,
        Escaping: plan.escaping,
        Handing: plan.handed,
        OwnBuffers: plan.buffers,
    }
    if plan.unreached:
        return [Unreached], None
    roles, inner = named(plan.style).roles(plan, module, fused)
    return [role for role, taken in around.items() if taken] + roles, inner
