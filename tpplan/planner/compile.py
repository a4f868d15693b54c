"""A plan and a model become a ``CompiledPlan``, or one error that says everything that is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard

from tpplan.compat import FakeTensorMode
from tpplan.compiled import (
    CompiledPlan,
    Draws,
    KernelChoice,
    ModulePlan,
    ParameterPlan,
    WidthNorm,
)
from tpplan.language import Diagnostic, FrozenMap, Plan, PlanError
from tpplan.layout import Rows
from tpplan.observe.caches import no_fakes_kept
from tpplan.observe.fused import fused_modules
from tpplan.observe.probe import probe_modules
from tpplan.observe.shadow import call_for, padded, shadow_of, shortened
from tpplan.observe.tables import read_by_others
from tpplan.observe.trace import Trace, record
from tpplan.observe.twins import same_randomness
from tpplan.places import Argument
from tpplan.planner import checks, infer
from tpplan.planner.complaints import Complaints
from tpplan.planner.flow import follow
from tpplan.planner.kernels import choose, implementations
from tpplan.planner.match import match
from tpplan.planner.placing import Placing
from tpplan.planner.replay import Failure, prove
from tpplan.planner.sizes import Sizes
from tpplan.planner.together import reduced_together
from tpplan.planner.unproved import say_unproved
from tpplan.styles import NONE, named
from tpplan.styles.replicate import REPLICATE


def compile_plan(
    model: nn.Module,
    plan: Plan,
    tp: int,
    sequence_parallel: bool | None = None,
    kernels: str | Mapping[str, str] | None = None,
    inputs: Any = None,
) -> CompiledPlan:
    """Compile ``plan`` onto ``model`` for ``tp`` ranks; nothing of the model changes.

    Args:
        sequence_parallel, kernels: override the plan's.
        inputs: a call the model accepts (a mapping of keyword arguments, a tuple, or a tensor) to
            trace it with; by default token ids of shape (2, 8).

    Raises:
        PlanError: with every problem found.
    """
    with same_randomness():
        compiler = _Compiler(model, plan, tp, sequence_parallel)
        compiler.check_structure(kernels)
        if compiler.complaints.wrong:
            compiler.check_sizes(inputs)
        compiler.complaints.stop_if_any()
        compiler.examine(inputs)
        compiler.complaints.stop_if_any()
        return compiler.result()


class _Compiler:
    def __init__(
        self, model: nn.Module, plan: Plan, tp: int, sequence_parallel: bool | None
    ) -> None:
        if tp < 1:
            raise PlanError([Diagnostic(f"tp must be at least 1, not {tp}")])
        self.model, self.plan, self.tp = model, plan, tp
        asked = plan.sequence_parallel if sequence_parallel is None else sequence_parallel
        self.sequence_parallel = asked and tp > 1
        self.matches, wrong = match(plan, model)
        self.complaints = Complaints(plan, self.matches, wrong)
        self.styles = {path: named(rule.style) for path, rule in self.matches.modules.items()}
        modules = {path: model.get_submodule(path) for path in self.styles}
        # lists with a module for each head
        self.lists = {p for p, style in self.styles.items() if style.is_list(modules[p])}
        self.multihead = {p for p, style in self.styles.items() if style.is_region(modules[p])}
        self.sizes = Sizes(model, tp, self.multihead, self.complaints)
        self.placing = Placing(model, self.lists, self.multihead, self.sizes, self.complaints)

    # --- what can be seen without running anything

    def check_structure(self, kernels: str | Mapping[str, str] | None) -> None:
        """Styles against modules, parameters that nobody mentions, kernels."""
        checks.check_modules(self.model, self.tp, self.complaints)
        if self.tp > 1:
            parameters = dict(self.model.named_parameters())
            mentioned = {
                names[0]
                for names in self.placing.names.values()
                if any(self.placing.rule_of(name) is not None for name in names)
            }
            checks.check_unmentioned(parameters, mentioned, self.complaints)
        self.kernels = implementations(self.plan.kernels, kernels)

    # --- what a trace shows

    def examine(self, inputs: Any) -> None:
        """Run the model's shadow, infer what the plan leaves open, check what it says."""
        call = call_for(self.model, inputs)
        drawing = self.observe(call)
        heads = {
            path
            for path, style in self.styles.items()
            if style.is_head(self.model.get_submodule(path))
        }
        gathers = {
            path: frozenset(rule.options.get("gather") or ())  # type: ignore[call-overload]
            for path, rule in self.matches.modules.items()
        }
        self.boundaries = infer.find_boundaries(
            self.trace, self.sizes.columns, self.multihead, heads, gathers
        )
        self.elements = infer.find_elements(
            self.trace, self.styles, self.plan.layers, self.boundaries, self.multihead
        )
        self.together = reduced_together(
            (self.trace, drawing), self.matches.modules, self.elements, self.complaints
        )
        self.sizes.lay_out(self.trace)
        self.placing.check_ties()
        self.placing.check_contradictions()
        traces = (self.trace, drawing)
        self.read = read_by_others(traces, self.placing.names.values())
        columns, dim = self.sizes.columns, self.plan.sequence_dim
        self.probed = probe_modules(self.model, self.styles, columns, traces, dim)
        self.fused = fused_modules(self.model, self.styles, columns, self.sizes.transposed, traces)
        self.complaints.stop_if_any()
        findings = (
            self.matches.modules,
            self.sizes.columns,
            self.multihead,
            self.boundaries,
            self.elements,
            {path for path, finding in self.probed.items() if not finding.mixes},
            self.plan.sequence_dim,
        )
        self.flow = follow(self.trace, *findings)
        self.draws = follow(drawing, *findings, _dropouts(self.model)).draws
        self.boundaries = {
            path: tuple(
                replace(b, whole=(path, b.arguments[0].name) in self.flow.whole) for b in found
            )
            for path, found in self.boundaries.items()
        }
        self.check_stack()
        checks.check_flow(self.flow, self.sequence_parallel, self.complaints)
        self.check_torn()
        self.check_bare()
        if self.sequence_parallel:
            self.check_apart()
        if not self.complaints.wrong and self.tp > 1:
            self.check_regions(call)

    def observe(self, call: tuple[Any, Any]) -> Trace:
        """Trace the model in evaluation; the trace in training is returned."""
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        shadow = shadow_of(self.model, mode)
        with no_fakes_kept():
            self.trace = self.run(shadow.eval(), mode, call)
            drawing = self.run(shadow.train(), mode, call)
        tied = {
            name.rpartition(".")[0]
            for names in self.placing.names.values()
            if len(names) > 1
            for name in names
        }
        infer.require_called(self.trace, self.matches.modules, {*tied, *self.lists})
        self.sizes.orient(self.trace)
        return drawing

    def check_sizes(self, inputs: Any) -> None:
        """What tp does not fit either, where something else is wrong already."""
        try:
            self.observe(call_for(self.model, inputs))
            self.sizes.lay_out(self.trace)
        except PlanError as error:
            self.complaints.wrong.extend(error.diagnostics)

    def run(self, shadow: nn.Module, mode: FakeTensorMode, call: tuple[Any, Any]) -> Trace:
        try:
            return record(shadow, mode, *call)
        except PlanError:
            raise
        except Exception as error:
            message = f"the model cannot be run on example inputs: {type(error).__name__}: {error}"
            hint = "give inputs= with which the model's forward can be called"
            position = self.plan.rules[0].position
            raise PlanError([Diagnostic(message, position, hint)]) from error

    def check_stack(self) -> None:
        if self.elements:
            return
        if self.plan.layers is not None:
            message = f"layers: '{self.plan.layers.text}' names no module that was called"
            self.complaints.say(message, self.plan.layers_position)
        elif self.sequence_parallel and self.multihead.union(self.of("sums")):
            message = "no layer stack was found for the sequence-sharded stream"
            hint = "name it with 'layers:', or turn sequence_parallel off"
            self.complaints.about(None, [""], message, hint)

    def check_apart(self) -> None:
        """What runs on a part of the sequence must do the same to it as among the rest."""
        mixing, failing = {}, {}
        for path in self.of("rows") & self.probed.keys():
            finding, name = self.probed[path], self.styles[path].name
            if finding.fails is not None:
                failing[path] = f"{name}: it cannot be run on other lengths and numbers"
                failing[path] += f": {finding.fails}"
            elif finding.mixes:
                mixing[path] = f"{name}: its result at one position depends on other positions"
        self.complaints.by_rule(mixing | failing)

    def check_bare(self) -> None:
        """A parameter that is cut by a rule of its own is used in sharded regions only."""
        met = self.flow.on_stream | self.flow.elsewhere
        cut = {
            name: rule
            for names in self.placing.names.values()
            for name in names
            if (rule := self.matches.parameters.get(name)) is not None
            and isinstance(named(rule.style).bare, Shard)
            and not met.isdisjoint(names)
        }
        message = "is used outside a sharded region, where each rank has only its part of it"
        for name, rule in cut.items() if self.tp > 1 else ():
            hint = f"make it {REPLICATE.name}"
            self.complaints.about(rule, [name], f"{rule.style}: {message}", hint)

    def check_torn(self) -> None:
        torn = [name for name in self.trace.parameters.values() if self.torn(name)]
        if torn:
            message = "is used both inside and outside a sharded region: its gradient is ambiguous"
            self.complaints.about(None, torn, message)

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

    def check_regions(self, call: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        """Replay the sharded regions on random numbers."""
        calls = [shortened(call)]
        shared = any(rows.shared() for rows in self.sizes.layouts.values())
        if shared:
            calls += padded(self.model, calls[0])
        failure = self.failure(calls)
        if failure is not None and shared:
            failure = self.with_group_sizes(calls, failure)
        if failure is not None:
            say_unproved(failure, self.sizes.columns, self.trace, self.tp, self.complaints)

    def failure(self, calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> Failure | None:
        plans = self.module_plans()
        parameters = self.matches.parameters
        bare = {n: r for n, r in parameters.items() if isinstance(named(r.style).bare, Shard)}
        columns = self.sizes.columns | self.multihead
        cut = (self.sizes.layouts, columns, bare, self.lists)
        found = (prove(self.model, plans, *cut, self.tp, call) for call in calls)
        return next((failure for failure in found if failure is not None), None)

    def with_group_sizes(
        self, calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]], failure: Failure
    ) -> Failure | None:
        """Find the attribute that holds how many query heads use one key-value head.

        Where several ranks share a head that number is another one on each rank. An attribute
        that no plan states is taken for it if it has its value and the regions are proved with it.
        """
        stated = self.sizes.attributes
        for name, values in self.sizes.geometry.group_sizes(self.tp).items():
            self.sizes.attributes = {
                path: {**stated.get(path, {}), **({name: values[path]} if path in values else {})}
                for path in {*stated, *values}
            }
            if self.failure(calls) is None:
                return None
        self.sizes.attributes = stated
        return failure

    # --- the outcome

    def result(self) -> CompiledPlan:
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
        )

    def parameter_plan(self, names: tuple[str, ...]) -> ParameterPlan:
        parameter = self.model.get_parameter(names[0])
        placement = self.placing.placement(names[0])
        shape = list(parameter.shape)
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
            aliases=names[1:],
            rule=self.placing.rule_of(names[0]),
        )

    def summed(self, name: str) -> bool:
        """Whether each rank's gradient of a parameter, or of rows it shares, is only a part."""
        placement = self.placing.placement(name)
        if isinstance(placement, Rows):
            return bool(placement.shared())
        if not isinstance(placement, Replicate):
            return False
        owner = self.placing.owner(name)
        style, rule = named(self.placing.style_of(owner)), self.matches.modules.get(owner)
        if rule is not None and style.scatters(rule.options):
            return True
        # a row-parallel bias is added after the reduction, wherever the trace saw it added
        if style.sums or (style.rows and name not in self.flow.in_region):
            return self.sequence_parallel
        on_stream = self.sequence_parallel and name in self.flow.on_stream
        around = owner in self.containers()
        if on_stream and around and name not in self.flow.elsewhere:
            return False  # the ops on the stream in its global form sum it themselves
        return name in self.flow.in_region or on_stream

    def of(self, trait: str) -> set[str]:
        """The modules of whose style something is true."""
        return {path for path, style in self.styles.items() if getattr(style, trait)}

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
        containers = self.containers()
        plans = {}
        for path, module in self.model.named_modules():
            rule = self.matches.modules.get(path)
            own = tuple(name for name, p in module._parameters.items() if p is not None)
            plan = ModulePlan(
                path=path,
                style=None if rule is None else rule.style,
                rule=rule,
                parameters=own,
                boundaries=self.boundaries.get(path, ()),
                element=self.elements.get(path),
                rows=self.styles.get(path, NONE).rows,
                stream=self.stream_of(path),
                transposed=path in self.sizes.transposed,
                norm=self.width_norm(path),
                projection=path in self.sizes.columns,
                multihead=path in self.multihead,
                together=self.together.get(path, ()),
                head_inputs=self.sizes.head_inputs.get(path, ()),
                heads=self.heads_of(path),
                container=path in containers,
                draws=self.drawn(path),
                read=self.styles.get(path, NONE).vocabulary
                and any(f"{path}.{name}" in self.read for name in own),
                attributes=FrozenMap(self.sizes.attributes.get(path)),
                options=FrozenMap() if rule is None else rule.options,
                kernel=self.kernel(path),
            )
            if plan != ModulePlan(path=path, style=None):
                plans[path] = plan
        return plans

    def stream_of(self, path: str) -> Argument | None:
        """The argument that carries the stream into a module that runs on its rows, or on all."""
        style = self.styles.get(path, NONE)
        return infer.carrying(self.trace, path) if style.rows or style.apart else None

    def width_norm(self, path: str) -> WidthNorm | None:
        """An RMSNorm of the very columns that a column-parallel layer makes, shown by numbers."""
        finding = self.probed.get(path)
        if not self.styles.get(path, NONE).columns or finding is None or not finding.exact:
            return None
        if finding.kind != "rms_norm":
            return None
        (weight,) = (p for p in self.model.get_submodule(path).parameters())
        width = int(weight.shape[0])
        call = next(c for c in self.trace.calls if c.path == path)
        # not of each head by itself, which has all of the columns that it needs
        shapes, (given, *_) = self.trace.shapes, call.arguments
        made = {c.path: shapes[c.outputs[0]] for c in self.trace.calls if c.outputs}
        for source in infer.sources(self.trace, call, self.styles):
            columns = source in self.sizes.columns and len(made[source]) == len(shapes[given])
            if columns and shapes[given][-1] == width:
                return WidthNorm(width, finding.eps, finding.offset)
        return None

    def heads_of(self, path: str) -> int:
        return self.sizes.geometry.groups[path].heads or 0 if path in self.sizes.head_inputs else 0

    def drawn(self, path: str) -> Draws | None:
        """What the random numbers that a module draws in its own forward are for."""
        kinds = self.draws.get(path, set())
        partial = kinds & ({"region", "stream"} if self.sequence_parallel else {"region"})
        if partial and kinds - partial:
            return "mixed"
        order: tuple[Draws, ...] = ("region", "stream", "whole")
        return next((kind for kind in order if kind in kinds), None)

    def kernel(self, path: str) -> KernelChoice | None:
        finding = self.probed.get(path)
        if finding is not None and finding.kind is not None:
            wide = self.styles.get(path, NONE).columns
            obstacle = "its width is sharded" if wide else None
            return choose(finding.kind, finding.form, self.kernels, obstacle)
        if path in self.fused:
            kind, form, obstacle = self.fused[path]
            return choose(kind, form, self.kernels, obstacle)
        return None

    def _in_element(self, path: str) -> bool:
        return any(e and (path == e or path.startswith(e + ".")) for e in self.elements)


def _dropouts(model: nn.Module) -> set[str]:
    kind = nn.modules.dropout._DropoutNd
    return {path for path, module in model.named_modules() if isinstance(module, kind)}


def _parents(path: str) -> Iterable[str]:
    parts = path.split(".") if path else []
    return (".".join(parts[:i]) for i in range(len(parts)))
