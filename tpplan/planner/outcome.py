"""What was found of a model, and the ``CompiledPlan`` that follows from it."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Mapping

from torch import nn
from torch.distributed.tensor import Replicate, Shard

from tpplan.compat import Site
from tpplan.compiled import (
    Boundary,
    CompiledPlan,
    Element,
    KernelChoice,
    ModulePlan,
    ParameterPlan,
    Spread,
    Summed,
    WidthNorm,
)
from tpplan.language import FrozenMap, Plan, Rule
from tpplan.layout import Rows
from tpplan.observe.fused import Findings
from tpplan.observe.probe import Finding
from tpplan.observe.trace import Trace
from tpplan.places import Argument, Place
from tpplan.planner import infer
from tpplan.planner.bare import BareRegion, partial_rows
from tpplan.planner.complaints import Complaints
from tpplan.planner.experts import block_rules
from tpplan.planner.flow import Flow
from tpplan.planner.handed import Handed
from tpplan.planner.kernels import choose
from tpplan.planner.known import Known
from tpplan.planner.match import Matches
from tpplan.planner.noise import drawn_at, drawn_for
from tpplan.planner.placing import Placing
from tpplan.planner.sizes import Sizes
from tpplan.styles import NONE, Style, named


class Outcome:
    """What whoever examines the model fills in; see the rooms that each comes from.

    Attributes:
        known: of the model, from compiling it before.
        multihead: the modules that are regions by themselves.
        draws: module path -> where its code draws random numbers -> what for.
        ran: path of an element -> a digest of what ran inside.
        bare: the modules that compute with cut parameters of their own.
        escaping: where, in what modules give, is what a block of experts has besides its sum.
        handed: where modules give a rank's part of what leaves the model, and along what.
        kept: attributes that hold a rank's part, or the gradient of which is one, by module;
            whether only the gradient is.
        spreads: whole values that meet a rank's rows of the stream, by the module that has them.
        unreached: layers with a style that no call came to.
        read: the parameters that code of other modules reads.
        gated: norms of columns that are gated, and cannot run on a rank's columns as they are.
    """

    model: nn.Module
    plan: Plan
    tp: int
    ep: int
    known: Known
    sequence_parallel: bool
    matches: Matches
    styles: dict[str, Style]
    multihead: set[str]
    sizes: Sizes
    placing: Placing
    complaints: Complaints
    kernels: Mapping[str, str]
    trace: Trace
    flow: Flow
    spreads: Mapping[str, Spread]
    bare: Mapping[str, BareRegion]
    escaping: Mapping[str, tuple[Place, ...]]
    handed: Handed = FrozenMap()
    kept: Mapping[str, tuple[tuple[str, bool], ...]]
    unreached: frozenset[str]
    boundaries: Mapping[str, tuple[Boundary, ...]]
    elements: Mapping[str, Element]
    together: Mapping[str, tuple[str, ...]]
    draws: Mapping[str, Mapping[Site, set[str]]]
    given: tuple[Argument, ...]
    ran: Mapping[str, str]
    read: set[str]
    probed: Mapping[str, Finding]
    gated: Mapping[str, WidthNorm]
    fused: Findings

    def result(self, draws: Collection[str] = ()) -> CompiledPlan:
        parameters = {
            names[0]: self.parameter_plan(names) for names in self.placing.names.values() if names
        }
        return CompiledPlan(
            plan=self.plan,
            tp=self.tp,
            sequence_parallel=self.sequence_parallel,
            modules=FrozenMap(self.module_plans()),
            parameters=FrozenMap(parameters),
            kernels=FrozenMap(self.kernels),
            unmatched=self.matches.unmatched,
            ep=self.ep,
            draws=tuple(sorted(draws)),
        )

    def parameter_plan(self, names: tuple[str, ...]) -> ParameterPlan:
        parameter = self.model.get_parameter(names[0])
        placement = self.placing.placement(names[0])
        shape = list(parameter.shape)
        over_ep = self.sizes.over_ep(self.placing.owner(names[0]))
        if over_ep is not None:
            shape[over_ep.dim] //= self.ep
        if isinstance(placement, Rows):
            shape[placement.dim] = placement.length()
        elif isinstance(placement, Shard):
            shape[placement.dim] = -(-shape[placement.dim] // self.tp)
        return ParameterPlan(
            name=names[0],
            shape=tuple(parameter.shape),
            dtype=parameter.dtype,
            placement=placement,
            local_shape=tuple(shape),
            summed=self.tp > 1 and any(self.summed(name) for name in names),
            over_ep=over_ep,
            aliases=names[1:],
            rule=self.placing.rule_of(names[0]),
        )

    def summed(self, name: str) -> bool:
        """Whether each rank's gradient of a parameter, or of rows it shares, is only a part."""
        placement = self.placing.placement(name)
        if self.placing.owner(name) in self.unreached:
            return False
        if isinstance(placement, Rows):
            return bool(placement.shared())
        if not isinstance(placement, Replicate):
            return False
        owner = self.placing.owner(name)
        style, rule = named(self.placing.style_of(owner)), self.matches.modules.get(owner)
        if rule is not None and style.scatters(rule.options):
            return True
        if owner in self.partial:
            return True  # a bias that the first rank alone adds
        if rule is not None and style.stays(rule.options):
            return False  # added to the sum, of which the whole gradient comes back
        # a row-parallel bias is added after the reduction, wherever the trace saw it added
        if style.sums or (style.rows and name not in self.flow.in_region):
            return self.sequence_parallel
        on_stream = self.sequence_parallel and name in self.flow.on_stream
        if on_stream and owner in self.containers and name not in self.flow.elsewhere:
            return False  # the ops on the stream in its global form sum it themselves
        return name in self.flow.in_region or on_stream

    def summed_in(self, path: str) -> Summed | None:
        """What a module gives a part of, or adds once to what it gives a part of."""
        summed = self.bare[path].summed if path in self.bare else None
        shared = self.sizes.stacked.get(path)
        if shared is None:
            return summed
        # ranks of ep alone have whole experts, and tokens of their own
        return Summed(() if summed is None or self.tp == 1 else summed.outputs, shared.added)

    def boundaries_of(self, path: str) -> tuple[Boundary, ...]:
        """Where the stream enters at a module."""
        whole = self.tp == 1 and path in self.sizes.stacked
        return () if whole else self.boundaries.get(path, ())

    @functools.cached_property
    def block_rules(self) -> dict[str, Rule]:
        """The rule that makes each block one."""
        rules = block_rules(self.matches.modules)
        return {path: rules[path] for path, region in self.bare.items() if region.block}

    @functools.cached_property
    def partial(self) -> frozenset[str]:
        """See ``partial_rows``."""
        return partial_rows(self.bare)

    @functools.cached_property
    def staying(self) -> frozenset[str]:
        """See ``infer.staying``."""
        return infer.staying(self.matches.modules)

    def of(self, trait: str) -> set[str]:
        """The modules of whose style something is true."""
        return {path for path, style in self.styles.items() if getattr(style, trait)}

    @functools.cached_property
    def containers(self) -> set[str]:
        """The modules that the stream passes through in its global form."""
        called = {call.path for call in self.trace.calls}
        special = set(self.styles) | set(self.elements)
        return {""} | {
            parent
            for path in special
            for parent in _parents(path)
            if parent in called and not self._in_element(parent)
        }

    def module_plans(self) -> dict[str, ModulePlan]:
        containers = self.containers
        narrowed = (b for found in self.boundaries.values() for b in found if b.narrowed)
        widened = {consumer for boundary in narrowed for consumer in boundary.consumers}
        plans = {}
        for path, module in self.model.named_modules():
            rule = self.matches.modules.get(path)
            own = self._own(path, module)
            drawn = self.draws.get(path, {})
            plan = ModulePlan(
                path=path,
                style=None if rule is None else rule.style,
                rule=rule,
                parameters=own,
                boundaries=self.boundaries_of(path),
                element=self.elements.get(path),
                ran=self.ran.get(path, ""),
                rows=self.styles.get(path, NONE).rows,
                stream=self.stream_of(path),
                transposed=path in self.sizes.transposed,
                norm=self.width_norm(path),
                projection=path in self.sizes.columns,
                multihead=path in self.multihead,
                together=self.together.get(path, ()),
                head_inputs=self.sizes.head_inputs.get(path, ()),
                heads=self.heads_of(path),
                summed=self.summed_in(path),
                partial=path in self.partial,
                escaping=self.escaping.get(path, ()),
                handed=self.handed.get(path, ()),
                given=() if path or self.tp == 1 else self.given,
                kept=self.kept.get(path, ()),
                thin=self.sizes.stacked[path].thin if path in self.sizes.stacked else None,
                dispatched=self.sizes.over_ep(path) is not None,
                detour=self.flow.detours.get(path) if self.sequence_parallel else None,
                spread=self.spreads.get(path),
                container=path in containers,
                draws=drawn_for(drawn, self.sequence_parallel),
                drawn_at=drawn_at(drawn, self.sequence_parallel),
                read=self.lends(path, own),
                attributes=FrozenMap(self.sizes.attributes.get(path)),
                cut=FrozenMap(self.sizes.cut.get(path)),
                buffers=FrozenMap(self.sizes.buffers.get(path)),
                options=FrozenMap() if rule is None else rule.options,
                kernel=self.kernel(path),
                widened=path in widened,
                unreached=path in self.unreached,
            )
            if plan != ModulePlan(path=path, style=None):
                plans[path] = plan
        return plans

    def lends(self, path: str, own: Iterable[str]) -> bool:
        """Whether other modules' code computes with a module's parameters."""
        style, around = self.styles.get(path, NONE), path.rpartition(".")[0]
        possible = style.vocabulary or style.apart or style.rows or style is NONE
        # torch's own attention reads those of its parts, and so does what takes its place
        return (
            possible
            and around not in self.multihead
            and any(f"{path}.{name}".lstrip(".") in self.read for name in own)
        )

    def stream_of(self, path: str) -> Argument | None:
        """The argument that carries the stream into a module that runs on its rows, or on all."""
        style = self.styles.get(path, NONE)
        return infer.carrying(self.trace, path) if style.rows or style.apart else None

    def _own(self, path: str, module: nn.Module) -> tuple[str, ...]:
        """The names of a module's parameters: a weight, or what scales, before all else.

        A module holds them in the order in which they were made, and one that was put anew (where
        weight norm or pruning was taken off again) stands last.
        """
        finding = self.probed.get(path)
        first = ("weight",) if finding is None or not finding.names else finding.names
        held = [name for name, p in module._parameters.items() if p is not None]
        return (*(n for n in first if n in held), *(n for n in held if n not in first))

    def width_norm(self, path: str) -> WidthNorm | None:
        """A norm of the very columns that a column-parallel layer makes, shown by numbers."""
        if path in self.gated:
            return self.gated[path]
        finding = self.probed.get(path)
        if not self.styles.get(path, NONE).columns or finding is None or not finding.exact:
            return None
        call = next(c for c in self.trace.calls if c.path == path)
        shapes, (given, *_) = self.trace.shapes, call.arguments
        width, centred = shapes[given][-1], finding.kind == "layer_norm"
        # not of each head by itself, which has all of the columns that it needs
        made = {c.path: shapes[c.outputs[0]] for c in self.trace.calls if c.outputs}
        rows = math.prod(shapes[given][:-1])
        for source in infer.sources(self.trace, call, self.styles):
            if source in self.sizes.columns and math.prod(made[source][:-1]) == rows:
                return WidthNorm(width, finding.eps, finding.offset, centred)
        return None

    def heads_of(self, path: str) -> int:
        return self.sizes.geometry.groups[path].heads or 0 if path in self.sizes.head_inputs else 0

    def kernel(self, path: str) -> KernelChoice | None:
        finding = self.probed.get(path)
        if finding is not None and finding.kind is not None and finding.names:
            wide = self.styles.get(path, NONE).columns
            obstacle = "its width is sharded" if wide else None
            return choose(finding.kind, finding.form, self.kernels, obstacle)
        if path in self.fused:
            kind, form, obstacle = self.fused[path]
            return choose(kind, form, self.kernels, obstacle)
        return None

    def _in_element(self, path: str) -> bool:
        return any(p in self.elements for p in (path, *_parents(path)) if p)

    def torn(self, name: str) -> bool:
        """Whether a replicated parameter's gradient is a part here and the whole there."""
        style = named(self.placing.style_of(self.placing.owner(name)))
        if style.sums or self.tp == 1:
            return False
        if style.rows and self.sequence_parallel:
            return False  # a part everywhere
        if not isinstance(self.placing.placement(name), Replicate):
            return False
        flow = self.flow
        partial, whole = [flow.in_region], [flow.elsewhere]
        (partial if self.sequence_parallel else whole).append(flow.on_stream)
        return any(name in met for met in partial) and any(name in met for met in whole)


def _parents(path: str) -> Iterable[str]:
    parts = path.split(".") if path else []
    return (".".join(parts[:i]) for i in range(len(parts)))
