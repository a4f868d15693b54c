"""A plan and a model become a ``CompiledPlan``, or one error that says everything that is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from tpplan.compat import FakeTensorMode
from tpplan.language import Diagnostic, FrozenMap, Plan, PlanError, Rule
from tpplan.layout import Rows
from tpplan.planner import checks, infer
from tpplan.planner.compiled import (
    CompiledPlan,
    Draws,
    ModulePlan,
    ParameterPlan,
    WidthNorm,
)
from tpplan.planner.complaints import Complaints
from tpplan.planner.flow import follow
from tpplan.planner.forms import KernelChoice
from tpplan.planner.fused import fused_modules
from tpplan.planner.kernels import choose, implementations
from tpplan.planner.match import match
from tpplan.planner.probe import probe_modules
from tpplan.planner.replay import Failure, prove
from tpplan.planner.shadow import call_for, padded, shadow_of, shortened
from tpplan.planner.sizes import Sizes
from tpplan.planner.styles import is_multihead, placement_in
from tpplan.planner.together import reduced_together
from tpplan.planner.trace import Trace, record
from tpplan.planner.unproved import say_unproved


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
        self.styles = {path: rule.style for path, rule in self.matches.modules.items()}
        # lists with a module for each head
        self.lists = {
            path
            for path, module in model.named_modules()
            if self.styles.get(path) == "colwise" and isinstance(module, nn.ModuleList)
        }
        self.names = _names(model)
        self.multihead = {
            path
            for path, style in self.styles.items()
            if style == "attention" and is_multihead(model.get_submodule(path))
        }
        self.sizes = Sizes(model, tp, self.multihead, self.complaints)
        places: dict[int, str] = {}
        self.first_path = {
            path: places.setdefault(id(module), path)
            for path, module in model.named_modules(remove_duplicate=False)
        }

    # --- what can be seen without running anything

    def check_structure(self, kernels: str | Mapping[str, str] | None) -> None:
        """Styles against modules, parameters that nobody mentions, kernels."""
        checks.check_modules(self.model, self.tp, self.complaints)
        if self.tp > 1:
            parameters = dict(self.model.named_parameters())
            mentioned = {
                names[0]
                for names in self.names.values()
                if any(self.rule_of(name) is not None for name in names)
            }
            checks.check_unmentioned(parameters, mentioned, self.complaints)
        self.kernels = implementations(self.plan.kernels, kernels)

    def check_ties(self) -> None:
        for names in self.names.values():
            places = {str(self.placement(name)): name for name in names}
            if len(places) > 1:
                first, *others = places.values()
                message = (
                    f"is tied to {', '.join(others)}, but the plan places them differently "
                    f"({', '.join(places)})"
                )
                hint = "give both the same style: they are one parameter"
                self.complaints.about(self.rule_of(first), [first], message, hint)

    def rule_of(self, parameter: str) -> Rule | None:
        """The rule that governs a parameter: its own, or its module's."""
        own = self.matches.parameters.get(parameter)
        owner = self.owner(parameter)
        around = owner.rpartition(".")[0] if owner.endswith(".out_proj") else ""
        rule = self.matches.modules.get(around if around in self.multihead else owner)
        attention = rule is not None and rule.style == "attention"
        if own is None and attention and not {around, owner} & self.multihead:
            return None
        if own is None and rule is None:
            heads = self.list_of(parameter)
            return None if heads is None else self.matches.modules[heads]
        return own or rule

    def list_of(self, parameter: str) -> str | None:
        """The list with a module for each head that a parameter is in."""
        return next((path for path in self.lists if parameter.startswith(f"{path}.")), None)

    def placement(self, parameter: str) -> Placement:
        """Where a parameter goes, by any of its names."""
        own = self.matches.parameters.get(parameter)
        if own is not None:
            return Replicate() if own.style == "replicate" else Shard(0)
        owner, leaf = self.owner(parameter), parameter.rpartition(".")[2]
        style = self.style_of(owner)
        if style is None:
            return Replicate()
        return placement_in(
            style,
            leaf,
            self.model.get_submodule(owner),
            owner in self.sizes.transposed,
            self.sizes.layouts.get(owner),
        )

    def style_of(self, path: str) -> str | None:
        """The style of a module; the output projection of torch's attention is row-parallel."""
        around, _, leaf = path.rpartition(".")
        inside = leaf == "out_proj" and around in self.multihead
        return "rowwise" if inside else self.styles.get(path)

    def owner(self, parameter: str) -> str:
        """The path of the module that holds a parameter: its first, where it has several."""
        return self.first_path[parameter.rpartition(".")[0]]

    # --- what a trace shows

    def examine(self, inputs: Any) -> None:
        """Run the model's shadow, infer what the plan leaves open, check what it says."""
        call = call_for(self.model, inputs)
        drawing = self.observe(call)
        heads = {
            path
            for path, style in self.styles.items()
            if style == "vocab" and isinstance(self.model.get_submodule(path), nn.Linear)
        }
        gathers = {
            path: frozenset(rule.options.get("gather") or ())  # type: ignore[call-overload]
            for path, rule in self.matches.modules.items()
        }
        self.boundaries = infer.find_boundaries(
            self.trace, self.sizes.columns, self.multihead, heads, gathers
        )
        self.elements = infer.find_elements(
            self.trace, self.styles, self.plan.layers, self.boundaries
        )
        self.together = reduced_together(
            (self.trace, drawing), self.matches.modules, self.elements, self.complaints
        )
        self.sizes.lay_out(self.trace)
        self.check_ties()
        self.probed = probe_modules(self.model, self.styles, self.sizes.columns, self.trace)
        self.fused = fused_modules(
            self.model,
            self.styles,
            self.sizes.columns,
            self.sizes.transposed,
            (self.trace, drawing),
        )
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
        if self.sequence_parallel:
            mixing = [
                path
                for path, finding in self.probed.items()
                if finding.mixes and self.styles[path] == "sequence_parallel"
            ]
            message = "sequence_parallel: its result at one position depends on other positions"
            self.complaints.by_rule(dict.fromkeys(mixing, message))
        if not self.complaints.wrong and self.tp > 1:
            self.check_regions(call)

    def observe(self, call: tuple[Any, Any]) -> Trace:
        """Trace the model in evaluation; the trace in training is returned."""
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        shadow = shadow_of(self.model, mode)
        self.trace = self.run(shadow.eval(), mode, call)
        drawing = self.run(shadow.train(), mode, call)
        tied = {
            name.rpartition(".")[0]
            for names in self.names.values()
            if len(names) > 1
            for name in names
        }
        infer.require_called(self.trace, self.styles, {*tied, *self.lists})
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
            raise PlanError([Diagnostic(message, hint=hint)]) from error

    def check_stack(self) -> None:
        if self.elements:
            return
        if self.plan.layers is not None:
            message = f"layers: '{self.plan.layers.text}' names no module that was called"
            self.complaints.say(message, self.plan.layers_position)
        elif self.sequence_parallel and "rowwise" in self.styles.values():
            message = "no layer stack was found for the sequence-sharded stream"
            hint = "name it with 'layers:', or turn sequence_parallel off"
            self.complaints.about(None, [""], message, hint)

    def check_torn(self) -> None:
        torn = [name for name in self.trace.parameters.values() if self.torn(name)]
        if torn:
            message = "is used both inside and outside a sharded region: its gradient is ambiguous"
            self.complaints.about(None, torn, message)

    def torn(self, name: str) -> bool:
        """Whether a replicated parameter's gradient is a part here and the whole there."""
        style = self.style_of(self.owner(name))
        if style in ("rowwise", "sequence_parallel") or self.tp == 1:
            return False
        if not isinstance(self.placement(name), Replicate):
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
        bare = {name for name, r in self.matches.parameters.items() if r.style != "replicate"}
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
            names[0]: self.parameter_plan(names) for names in self.names.values() if names
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
        placement = self.placement(names[0])
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
            apart=any(self.list_of(name) is not None for name in names),
            aliases=names[1:],
            rule=self.rule_of(names[0]),
        )

    def summed(self, name: str) -> bool:
        """Whether each rank's gradient of a parameter, or of rows it shares, is only a part."""
        placement = self.placement(name)
        if isinstance(placement, Rows):
            return bool(placement.shared())
        if not isinstance(placement, Replicate):
            return False
        style = self.style_of(self.owner(name))
        if self.scatters(self.owner(name)):
            return True
        if style in ("rowwise", "sequence_parallel") and not self._in_region(name, style):
            return self.sequence_parallel
        on_stream = self.sequence_parallel and name in self.flow.on_stream
        return name in self.flow.in_region or on_stream

    def scatters(self, path: str) -> bool:
        """Whether each rank gets its columns of a row-parallel layer's result."""
        rule = self.matches.modules.get(path)
        return (
            rule is not None and rule.style == "rowwise" and rule.options.get("output") == "shard"
        )

    def _in_region(self, name: str, style: str) -> bool:
        # a row-parallel bias is added after the reduction, wherever the trace saw it added
        return style != "rowwise" and name in self.flow.in_region

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
                transposed=path in self.sizes.transposed,
                norm=self.width_norm(path),
                projection=path in self.sizes.columns,
                multihead=path in self.multihead,
                together=self.together.get(path, ()),
                head_inputs=self.sizes.head_inputs.get(path, ()),
                heads=self.heads_of(path),
                container=path in containers,
                draws=self.drawn(path),
                attributes=FrozenMap(self.sizes.attributes.get(path)),
                options=FrozenMap() if rule is None else rule.options,
                kernel=self.kernel(path),
            )
            if plan != ModulePlan(path=path, style=None):
                plans[path] = plan
        return plans

    def width_norm(self, path: str) -> WidthNorm | None:
        finding = self.probed.get(path)
        if self.styles.get(path) != "colwise" or finding is None or finding.kind != "rms_norm":
            return None
        (weight,) = (p for p in self.model.get_submodule(path).parameters())
        return WidthNorm(int(weight.shape[0]), finding.eps, finding.offset)

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
            wide = self.styles.get(path) == "colwise"
            obstacle = "its width is sharded" if wide else None
            return choose(finding.kind, finding.form, self.kernels, obstacle)
        if path in self.fused:
            kind, form, obstacle = self.fused[path]
            return choose(kind, form, self.kernels, obstacle)
        return None

    def _in_element(self, path: str) -> bool:
        return any(e and (path == e or path.startswith(e + ".")) for e in self.elements)


def _names(model: nn.Module) -> dict[int, tuple[str, ...]]:
    names: dict[int, tuple[str, ...]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)] = (*names.get(id(parameter), ()), name)
    return names


def _dropouts(model: nn.Module) -> set[str]:
    kind = nn.modules.dropout._DropoutNd
    return {path for path, module in model.named_modules() if isinstance(module, kind)}


def _parents(path: str) -> Iterable[str]:
    parts = path.split(".") if path else []
    return (".".join(parts[:i]) for i in range(len(parts)))
