"""A plan and a model become a ``CompiledPlan``, or one error that says everything that is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from tpplan.compat import FakeTensorMode
from tpplan.language import Diagnostic, FrozenMap, Plan, PlanError, Position, Rule
from tpplan.planner import attention, infer
from tpplan.planner.compiled import CompiledPlan, Draws, KernelChoice, ModulePlan, ParameterPlan
from tpplan.planner.flow import Flow, follow
from tpplan.planner.match import Matches, fold, folded, match
from tpplan.planner.probe import probe_modules
from tpplan.planner.shadow import call_for, shadow_of
from tpplan.planner.styles import STYLES, SUPPORTED_OPTIONS
from tpplan.planner.trace import Trace, record

UNMENTIONED_SHARE = 0.01


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
    compiler.check_structure()
    compiler.check_kernels(kernels)
    compiler.stop_if_wrong()
    compiler.examine(inputs)
    compiler.stop_if_wrong()
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
        self.matches: Matches
        self.matches, self.wrong = match(plan, model)
        self.styles = {path: rule.style for path, rule in self.matches.modules.items()}
        self.names = _names(model)
        places: dict[int, str] = {}
        self.first_path = {
            path: places.setdefault(id(module), path)
            for path, module in model.named_modules(remove_duplicate=False)
        }

    def stop_if_wrong(self) -> None:
        if self.wrong:
            raise PlanError(self.wrong)

    def complain(
        self, rule: Rule | None, paths: Iterable[str], message: str, hint: str | None = None
    ) -> None:
        position = self._position_of("rules:") if rule is None else rule.position
        self.wrong.append(Diagnostic(f"{fold(paths)}: {message}", position, hint))

    def _position_of(self, key: str) -> Position:
        """Where a top-level key of the plan is: the place for what no rule is to blame for."""
        for number, line in enumerate(self.plan.text.splitlines(), start=1):
            if line.startswith(key):
                return Position(self.plan.path or self.plan.name, number, 1, line, len(key))
        return self.plan.rules[0].position

    def complain_by_rule(self, found: Mapping[str, str], hint: str | None = None) -> None:
        """One diagnostic for each rule and message, over all the modules it speaks of."""
        groups: dict[tuple[str, str], list[str]] = {}
        for path, message in found.items():
            rule = self.matches.modules.get(path)
            groups.setdefault(("" if rule is None else rule.pattern.text, message), []).append(path)
        for (_, message), paths in groups.items():
            self.complain(self.matches.modules.get(paths[0]), paths, message, hint)

    # --- what can be seen without running anything

    def check_structure(self) -> None:
        """Styles against modules, ties, parameters that nobody mentions."""
        refused = {}
        for path, rule in self.matches.modules.items():
            module = self.model.get_submodule(path)
            complaint = STYLES[rule.style].complain(module, self.tp)
            if complaint is not None:
                refused[path] = f"{rule.style}: {complaint}"
            elif "forward" in vars(module):
                refused[path] = (
                    "its forward was replaced on the instance, which would hide the plan's"
                )
        self.complain_by_rule(refused)
        for rule in self.plan.rules:
            extra = sorted(set(rule.options) - SUPPORTED_OPTIONS[rule.style])
            for option in extra:
                where = rule.option_positions.get(option, rule.position)
                message = f"option '{option}' of '{rule.style}' is not supported by this version"
                self.wrong.append(Diagnostic(message, where))
        for rule in self.matches.parameters.values():
            if rule.style != "replicate":
                message = (
                    f"a bare parameter can only be 'replicate' in this version, not '{rule.style}'"
                )
                self.wrong.append(Diagnostic(message, rule.position))
        if any(_is_dtensor(p) for p in self.model.parameters()):
            message = "the model already holds DTensor parameters"
            hint = "parallelize a model once, and before FSDP"
            self.wrong.append(Diagnostic(message, hint=hint))
        self.check_ties()
        self.check_unmentioned()

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
                self.complain(self.rule_of(first), [first], message, hint)

    def check_unmentioned(self) -> None:
        if self.tp == 1:
            return
        total = sum(p.numel() for p in self.model.parameters())
        left: dict[str, nn.Parameter] = {}
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        for names in self.names.values():
            if all(self.rule_of(name) is None for name in names):
                left[names[0]] = parameters[names[0]]
        large = [name for name, p in left.items() if p.dim() >= 2]
        hint = "give it a rule; 'replicate' leaves it whole on every rank"
        for pattern in dict.fromkeys(folded(name) for name in large):
            members = [name for name in large if folded(name) == pattern]
            shape = tuple(left[members[0]].shape)
            self.complain(None, members, f"no rule mentions this parameter of shape {shape}", hint)
        small = {name: p.numel() for name, p in left.items() if name not in large}
        if sum(small.values()) > UNMENTIONED_SHARE * total:
            share = 100 * sum(small.values()) / total
            message = f"no rule mentions these parameters, together {share:.1f} % of the model"
            self.complain(None, small, message, hint)

    def check_kernels(self, asked: str | Mapping[str, str] | None) -> None:
        wanted = (
            {"all": asked} if isinstance(asked, str) else {**self.plan.kernels, **(asked or {})}
        )
        for kind, implementation in wanted.items():
            if implementation not in ("auto", "torch"):
                message = f"kernels: {kind}: '{implementation}' is not available in this version"
                hint = "use 'auto' or 'torch'"
                self.wrong.append(Diagnostic(message, self._position_of("kernels:"), hint))

    def rule_of(self, parameter: str) -> Rule | None:
        """The rule that governs a parameter: its own, or its module's."""
        own = self.matches.parameters.get(parameter)
        rule = self.matches.modules.get(self.owner(parameter))
        if own is None and rule is not None and rule.style == "attention":
            return None
        return own or rule

    def placement(self, parameter: str) -> Any:
        style = self.styles.get(self.owner(parameter))
        leaf = parameter.rpartition(".")[2]
        return Replicate() if style is None else STYLES[style].placement(leaf)

    def owner(self, parameter: str) -> str:
        """The path of the module that holds a parameter: its first, where it has several."""
        return self.first_path[parameter.rpartition(".")[0]]

    # --- what a trace shows

    def examine(self, inputs: Any) -> None:
        """Run the model's shadow, infer what the plan leaves open, check what it says."""
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        shadow = shadow_of(self.model, mode)
        call = call_for(self.model, inputs)
        self.trace = self.run(shadow.eval(), mode, call)
        drawing = self.run(shadow.train(), mode, call)

        infer.require_called(self.trace, self.styles)
        heads = {
            path
            for path, style in self.styles.items()
            if style == "vocab" and isinstance(self.model.get_submodule(path), nn.Linear)
        }
        self.boundaries = infer.find_boundaries(self.trace, self.styles, heads)
        self.elements = infer.find_elements(self.trace, self.styles, self.plan.layers)
        self.columns = infer.follow_columns(self.trace, self.styles)
        self.geometry = self.columns.heads
        self.probed = probe_modules(self.model, self.styles, self.trace)
        findings = (
            self.styles,
            self.boundaries,
            self.elements,
            {path for path, finding in self.probed.items() if not finding.mixes},
            self.plan.sequence_dim,
        )
        self.flow = follow(self.trace, *findings)
        self.draws = follow(drawing, *findings, _dropouts(self.model)).draws
        self.check_stack()
        self.check_flow(self.flow)
        self.check_heads()
        self.attributes = attention.per_rank_attributes(
            self.model, self.matches.modules, self.geometry, self.tp, self.wrong
        )
        if self.sequence_parallel:
            mixing = [
                path
                for path, finding in self.probed.items()
                if finding.mixes and self.styles[path] == "sequence_parallel"
            ]
            message = "sequence_parallel: its result at one position depends on other positions"
            self.complain_by_rule(dict.fromkeys(mixing, message))

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
            self.wrong.append(Diagnostic(message, self.plan.layers_position))
        elif self.sequence_parallel and "rowwise" in self.styles.values():
            message = "no layer stack was found for the sequence-sharded stream"
            hint = "name it with 'layers:', or turn sequence_parallel off"
            self.complain(None, [""], message, hint)

    def check_flow(self, flow: Flow) -> None:
        self.complain_by_rule(
            dict.fromkeys(flow.unsharded, "rowwise: its input is whole, not sharded"),
            "a row-parallel layer takes what column-parallel layers produce",
        )
        self.complain_by_rule(
            dict.fromkeys(flow.twice, "colwise: its input is already sharded"),
            "make this layer rowwise, or the one before it replicate",
        )
        if flow.unreduced and not flow.unsharded:
            message = "sharded activations leave it: no row-parallel layer reduces them"
            hint = "end each sharded region with a rowwise layer"
            self.complain(None, flow.unreduced, message, hint)
        if self.sequence_parallel:
            for path, maker in flow.mixed.items():
                message = "combines the sequence-sharded stream with a whole tensor" + (
                    f" from {maker}" if maker else ""
                )
                hint = "give the module that makes that tensor the style sequence_parallel"
                self.complain(self.matches.modules.get(maker), [path], message, hint)
        torn = [name for name in self.trace.parameters.values() if self.torn(name)]
        if torn:
            message = "is used both inside and outside a sharded region: its gradient is ambiguous"
            self.complain(None, torn, message)
        self.complain_by_rule(
            {path: f"colwise: {how}" for path, how in self.columns.misused.items()},
            "packed layers, and sums over sharded columns, are not supported by this version",
        )
        for path, maker in flow.torn.items():
            self.complain_mixture(path, maker, "sharded activations", "colwise")
        if self.sequence_parallel:
            self.check_stream(flow)

    def complain_mixture(self, path: str, maker: str, what: str, style: str) -> None:
        source = f" from {fold([maker])}" if maker else ""
        message = f"combines {what} with a whole tensor{source}, whose gradient would be a part"
        hint = f"give the module that makes that tensor the style {style}"
        self.complain(self.matches.modules.get(maker), [path], message, hint)

    def check_stream(self, flow: Flow) -> None:
        """What must hold where each rank has a part of the sequence."""
        for path, maker in flow.torn_stream.items():
            self.complain_mixture(path, maker, "the sequence-sharded stream", "sequence_parallel")
        off = "turn sequence_parallel off"
        for path, op in flow.along.items():
            message = f"'{op}' on the sequence-sharded stream is not known to keep positions apart"
            hint = f"give the module the style sequence_parallel if it does, or {off}"
            self.complain(self.matches.modules.get(path), [path], message, hint)
        for paths, message in (
            (flow.escaping, "gives out more of the sequence-sharded stream than the stream itself"),
            (flow.foreign, "is given a tensor that is not of the sequence-sharded stream"),
            (flow.flattened, "row-parallel output that does not have the stream's shape"),
        ):
            if paths:
                message += ", which this version does not support"
                self.complain(self.matches.modules.get(paths[0]), paths, message, off)

    def torn(self, name: str) -> bool:
        """Whether a replicated parameter's gradient is a part here and the whole there."""
        style = self.styles.get(self.owner(name))
        if style in ("rowwise", "sequence_parallel") or self.tp == 1:
            return False
        if not isinstance(self.placement(name), Replicate):
            return False
        flow = self.flow
        partial, whole = [flow.in_region], [flow.elsewhere]
        (partial if self.sequence_parallel else whole).append(flow.on_stream)
        return any(name in met for met in partial) and any(name in met for met in whole)

    def check_heads(self) -> None:
        counts = [count for count, _ in self.geometry.values()]
        fit = _fitting(counts)
        self.complain_by_rule(
            {
                path: f"colwise: tp {self.tp} does not divide its {count} heads of {width}"
                for path, (count, width) in self.geometry.items()
                if count % self.tp
            },
            f"tp may be {fit}",
        )

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
            unmatched=self.matches.unmatched,
        )

    def parameter_plan(self, names: tuple[str, ...]) -> ParameterPlan:
        parameter = self.model.get_parameter(names[0])
        placement = self.placement(names[0])
        shape = list(parameter.shape)
        if isinstance(placement, Shard):
            shape[placement.dim] = -(-shape[placement.dim] // self.tp)
        return ParameterPlan(
            name=names[0],
            shape=tuple(parameter.shape),
            dtype=parameter.dtype,
            placement=placement,
            local_shape=tuple(shape),
            summed=self.tp > 1 and any(self.summed(name) for name in names),
            aliases=names[1:],
            rule=self.rule_of(names[0]),
        )

    def summed(self, name: str) -> bool:
        """Whether each rank's gradient of a replicated parameter is only a part."""
        if not isinstance(self.placement(name), Replicate):
            return False
        style = self.styles.get(self.owner(name))
        if style in ("rowwise", "sequence_parallel") and not self._in_region(name, style):
            return self.sequence_parallel
        on_stream = self.sequence_parallel and name in self.flow.on_stream
        return name in self.flow.in_region or on_stream

    def _in_region(self, name: str, style: str) -> bool:
        # a row-parallel bias is added after the reduction, wherever the trace saw it added
        return style != "rowwise" and name in self.flow.in_region

    def module_plans(self) -> dict[str, ModulePlan]:
        called = {call.path for call in self.trace.calls}
        special = set(self.styles) | set(self.elements)
        containers = {""} | {
            parent
            for path in special
            for parent in _parents(path)
            if parent in called and not self._in_element(parent)
        }
        plans = {}
        for path, module in self.model.named_modules():
            rule = self.matches.modules.get(path)
            own = tuple(name for name, p in module._parameters.items() if p is not None)
            plan = ModulePlan(
                path=path,
                style=None if rule is None else rule.style,
                rule=rule,
                parameters=own,
                boundary=self.boundaries.get(path),
                element=self.elements.get(path),
                container=path in containers,
                draws=self.drawn(path),
                attributes=FrozenMap(self.attributes.get(path)),
                options=FrozenMap() if rule is None else rule.options,
                kernel=self.kernel(path),
            )
            if plan != ModulePlan(path=path, style=None):
                plans[path] = plan
        return plans

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
        if finding is None or finding.kind is None:
            return None
        return KernelChoice(finding.kind, "torch", "the module's own forward; no fused kernel yet")

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


def _fitting(counts: list[int]) -> str:
    common = math.gcd(*counts) if counts else 1
    return ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)


def _is_dtensor(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, torch.distributed.tensor.DTensor)
