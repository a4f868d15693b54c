"""A plan and a model become a ``CompiledPlan``, or one error that says everything that is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from tpplan.compat import FakeTensorMode, NeedsValuesError, as_written
from tpplan.compiled import CompiledPlan, Element, Spread
from tpplan.language import Diagnostic, Plan, PlanError, Position, Rule
from tpplan.observe.caches import no_fakes_kept
from tpplan.observe.calls import Call, calls_for, drawn_ids, routed
from tpplan.observe.chance import dropouts, same_randomness
from tpplan.observe.examples import GIVE_INPUTS, cannot_run
from tpplan.observe.fused import fused_modules
from tpplan.observe.gated import gated_norms
from tpplan.observe.probe import probe_modules
from tpplan.observe.ran import ran_in
from tpplan.observe.shadow import computing_shadow_of, shadow_of
from tpplan.observe.tables import read_by_others
from tpplan.observe.trace import Numbers, Trace, record
from tpplan.observe.untouched import as_before
from tpplan.planner import checks, infer, stacks
from tpplan.planner.bare import BareRegion, bare_regions
from tpplan.planner.causes import Causes, led
from tpplan.planner.closures import on_copies
from tpplan.planner.complaints import Complaints
from tpplan.planner.elements import find_elements
from tpplan.planner.experts import block_rules, blocks, escapes, hide
from tpplan.planner.flow import Flow, given_in_parts
from tpplan.planner.kept import kept_parts
from tpplan.planner.kernels import implementations
from tpplan.planner.known import Known
from tpplan.planner.match import match
from tpplan.planner.outcome import Outcome
from tpplan.planner.placing import Placing
from tpplan.planner.regions import Regions
from tpplan.planner.sizes import Sizes
from tpplan.planner.spreads import followed
from tpplan.planner.stops import WITHOUT_NUMBERS, Stop, kind_of, place_of, stopped_at
from tpplan.planner.together import reduced_together
from tpplan.planner.unreached import unreached
from tpplan.planner.walk import Walk
from tpplan.styles import NONE, Style, named
from tpplan.styles.colwise import COLWISE
from tpplan.styles.replicate import REPLICATE
from tpplan.styles.rowwise import ROWWISE


def compile_plan(
    model: nn.Module,
    plan: Plan,
    tp: int,
    sequence_parallel: bool | None = None,
    kernels: str | Mapping[str, str] | None = None,
    inputs: Any = None,
    ep: int = 1,
    known: Known | None = None,
) -> CompiledPlan:
    """Compile ``plan`` onto ``model`` for ``tp`` ranks; nothing of the model changes.

    Args:
        ep: how many ranks, each with tokens of its own, share whole experts.
        sequence_parallel, kernels: override the plan's.
        inputs: a call the model accepts (a mapping of keyword arguments, a tuple, or a tensor) to
            trace it with, or a list of calls; by default token ids of shape (2, 8).
        known: what was found for other ranks, and is not looked for again.

    Raises:
        PlanError: with every problem found.
    """
    with same_randomness(0), as_written(), as_before(model) as kept:
        compiler = _Compiler(model, plan, tp, sequence_parallel, ep, known or Known())
        compiler.check_structure(kernels)
        if compiler.complaints.wrong:
            compiler.check_sizes(inputs)
        compiler.complaints.stop_if_any()
        with on_copies(model, plan):
            compiler.examine(inputs)
            compiler.complaints.stop_if_any()
        return compiler.result(kept.drawn)


def speaks_of_all(model: nn.Module, plan: Plan) -> bool:
    """Whether the rules of a plan speak of every matrix of a model."""
    mentioned = _Compiler(model, plan, 2, None, 1, Known()).placing.mentioned
    return all(p.dim() < 2 or name in mentioned for name, p in model.named_parameters())


class _Compiler(Outcome):
    """Finds it all, step by step."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        tp: int,
        sequence_parallel: bool | None,
        ep: int,
        known: Known,
    ) -> None:
        for name, size in (("tp", tp), ("ep", ep)):
            if size < 1:
                raise PlanError([Diagnostic(f"{name} must be at least 1, not {size}")])
        self.model, self.plan, self.tp, self.ep, self.known = model, plan, tp, ep, known
        asked = plan.sequence_parallel if sequence_parallel is None else sequence_parallel
        self.sequence_parallel = asked and tp > 1
        self.matches, wrong = match(plan, model)
        self.complaints = Complaints(plan, self.matches, wrong)
        self.styles = {path: named(rule.style) for path, rule in self.matches.modules.items()}
        modules = {path: model.get_submodule(path) for path in self.styles}
        # lists with a module for each head
        self.lists = {p for p, style in self.styles.items() if style.is_list(modules[p])}
        self.multihead = {p for p, style in self.styles.items() if style.is_region(modules[p])}
        self.sizes = Sizes(model, tp, self.multihead, self.complaints, ep, known)
        self.placing = Placing(model, self.lists, self.multihead, self.sizes, self.complaints)

    # --- what can be seen without running anything

    def check_structure(self, kernels: str | Mapping[str, str] | None) -> None:
        """Styles against modules, parameters that nobody mentions, kernels."""
        checks.check_modules(self.model, self.tp, self.complaints)
        if self.ep > 1 and not self.of("stacked"):
            checks.say_no_experts(self.ep, self.complaints)
        if self.tp > 1:
            parameters = dict(self.model.named_parameters())
            checks.check_unmentioned(parameters, self.placing.mentioned, self.complaints)
        self.kernels = implementations(self.plan.kernels, kernels)

    # --- what a trace shows

    def examine(self, inputs: Any) -> None:
        """Run the model's shadow, infer what the plan leaves open, check what it says."""
        calls = calls_for(self.model, inputs)
        if hidden := frozenset(self.of("stacked")):
            calls = (*(routed(self.model, calls[0]) or calls[:1]), *calls[1:])
        self.trace, drawing = self.known.any_plan.once(
            (self.model, inputs), ("traces", hidden), lambda: self.traces(calls, inputs)
        )
        self.orient()
        drawn = self.find_regions(drawing)
        self.sizes.lay_out(self.trace)
        buffers = self.matches.buffers.items()
        cut = {name: rule for name, rule in buffers if named(rule.style).columns}
        checks.check_buffers(self.trace, cut, self.complaints)
        self.placing.check_ties()
        self.placing.check_contradictions()
        traces = (self.trace, drawing)
        self.read = read_by_others(traces, self.placing.names.values())
        dim, columns = self.plan.sequence_dim, self.sizes.columns
        self.probed = self.known.once(
            (self.model, self.plan, inputs),
            ("probed", frozenset(columns)),
            lambda: probe_modules(self.model, self.styles, columns, traces, dim),
        )
        self.gated = gated_norms(self.model, self.styles, columns, self.trace, self.tp)
        self.fused = fused_modules(self.model, self.styles, columns, self.sizes.transposed, traces)
        self.complaints.stop_if_any()
        self.follow(drawing, drawn)
        self.check_flow()
        if not self.complaints.wrong and self.tp > 1:
            Regions(self).check(calls)

    def find_regions(self, drawing: Trace) -> Mapping[str, BareRegion]:
        """Where the stream enters and leaves them; the bare ones of the trace in training."""
        heads = {
            path
            for path, style in self.styles.items()
            if style.is_head(self.model.get_submodule(path))
        }
        gathers = {
            path: frozenset(rule.options.get("gather") or ())  # type: ignore[call-overload]
            for path, rule in self.matches.modules.items()
        }
        cut = self.cut_styles()
        aliases = {names[0]: names for names in self.placing.names.values()}
        self.bare, drawn = (
            bare_regions(trace, cut, self.styles, aliases) for trace in (self.trace, drawing)
        )
        made = block_rules(self.matches.modules)
        for trace, regions in ((self.trace, self.bare), (drawing, drawn)):
            regions.update(blocks(trace, self.styles, made))
        gathers |= {
            path: gathers.get(path, frozenset())
            | {a.name for names in region.entering.values() for a in names}
            for path, region in self.bare.items()
            if region.block
        }
        summing = {path for path, region in self.bare.items() if region.summed is not None}
        columns, adapted = self.sizes.columns, self.matches.adapted
        self.boundaries = infer.find_boundaries(
            self.trace, columns, self.multihead, heads, gathers, self.bare, adapted, self.staying
        )
        around = self.boundaries, self.multihead, summing, infer.gathering(self.matches.modules)
        self.elements = find_elements(self.trace, self.styles, self.plan.layers, *around)
        found = self.block_rules.keys()
        elements, rows = self.elements.keys(), self.sequence_parallel
        checks.check_blocks(made, found, elements, rows, self.complaints)
        self.together = reduced_together(
            (self.trace, drawing),
            {p: r for p, r in self.matches.modules.items() if p not in self.partial | self.staying},
            self.elements,
            self.complaints,
            self.block_rules,
        )
        return drawn

    def follow(self, drawing: Trace, drawn: Mapping[str, BareRegion]) -> None:
        """The flow of tensors, in evaluation, and for what draws random numbers in training."""
        before = self.matches.modules, self.sizes.columns, self.multihead, self.boundaries
        after = (
            {path for path, finding in self.probed.items() if not finding.mixes},
            self.plan.sequence_dim,
            self.cut_styles().keys() | self.shared_experts(),
        )
        self.escaping, lost = escapes(((self.trace, self.bare), (drawing, drawn)))
        if lost:
            message = "code outside of it uses what is made inside of it, but is not given that"
            hint = "let the module return it"
            self.complaints.about(self.block_rules[lost[0]], lost, message, hint)

        def walk(elements: Mapping[str, Element], found: Mapping[str, Spread]) -> Flow:
            return Walk(self.trace, *before, elements, *after, self.bare, spreads=found).run()

        if self.sequence_parallel:
            about = self.trace, self.styles, self.elements, self.plan.sequence_dim
            self.flow, self.elements, self.spreads = followed(walk, *about)
        else:
            self.flow, self.spreads = walk(self.elements, {}), {}
        findings = *before, self.elements, *after, drawn, dropouts(self.model), self.spreads
        trained = Walk(drawing, *findings).run()
        self.draws = trained.draws
        self.given = given_in_parts((self.flow, trained), self.sequence_parallel)
        apart = set(self.elements if self.sequence_parallel else ()).union(*self.together.values())
        flows = (self.trace, self.flow), (drawing, trained)
        self.kept = kept_parts(flows, self.boundaries, apart, self.escaping)
        self.ran = ran_in((self.trace, drawing), self.elements)
        self.boundaries = {
            path: tuple(
                replace(b, whole=(path, b.arguments[0].name) in self.flow.whole) for b in found
            )
            for path, found in self.boundaries.items()
        }

    def traces(self, calls: Sequence[Call], inputs: Any) -> tuple[Trace, Trace]:
        """The model's traces in evaluation and in training."""
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with no_fakes_kept():
            try:
                shadow = shadow_of(self.model, mode)
                hide(shadow, self.of("stacked"))
                return self.trace_both(shadow, mode, calls)
            except NeedsValuesError as error:
                computing = computing_shadow_of(self.model)
                if computing is None:
                    raise self.cannot_run(error) from error
                hide(computing, self.of("stacked"))
                drawn = drawn_ids(self.model, calls, inputs)
                return self.trace_both(computing, Numbers(), drawn)

    def orient(self) -> None:
        """Of what the trace shows, what is the same on any number of ranks."""
        tied = {
            name.rpartition(".")[0]
            for names in self.placing.names.values()
            if len(names) > 1
            for name in names
        }
        rules, held = self.matches.modules, {*tied, *self.lists}
        self.cut = self.cut_by_own_rules()
        self.unreached = unreached(self.model, self.trace, rules, self.cut, held)
        self.sizes.orient(self.trace)

    def check_sizes(self, inputs: Any) -> None:
        """What tp does not fit either, where something else is wrong already."""
        try:
            self.trace, _ = self.traces(calls_for(self.model, inputs), inputs)
            self.orient()
            self.sizes.lay_out(self.trace)
        except PlanError as error:
            self.complaints.wrong.extend(error.diagnostics)

    def trace_both(
        self, shadow: nn.Module, mode: FakeTensorMode | Numbers, calls: Sequence[Call]
    ) -> tuple[Trace, Trace]:
        """Trace in evaluation, and in training.

        Raises:
            NeedsValuesError: where the model's code hangs on numbers that are not there.
        """
        try:
            return record(shadow.eval(), mode, calls), record(shadow.train(), mode, calls)
        except (PlanError, *NeedsValuesError):
            raise
        except Exception as error:
            raise self.cannot_run(error) from error

    def cannot_run(self, error: Exception) -> PlanError:
        position, place = self.plan.rules[0].position, stopped_at(place_of(error))
        hint = WITHOUT_NUMBERS if kind_of(error) is Stop.NUMBERS else GIVE_INPUTS
        return cannot_run(error, position, hint, place)

    def check_flow(self) -> None:
        """What the flow of tensors shows; what follows from one mistake is said under it."""
        said = len(self.complaints.wrong)
        self.check_stack()
        stacked = len(self.complaints.wrong) == said  # without a stack the stream is nowhere
        checks.check_flow(self.flow, self.sequence_parallel and stacked, self.complaints)
        self.check_torn()
        rules, styles = {**self.matches.modules}, {**self.styles}
        for path, region in self.bare.items():
            own = (rule for name, rule in self.cut.items() if name.rpartition(".")[0] == path)
            rules[path] = self.block_rules[path] if region.block else next(own)
            styles[path] = ROWWISE if region.summed else COLWISE if region.columns else NONE
        cause = Causes(self.model, self.trace, rules, styles, self.elements).of(self.flow)
        if cause is not None:
            self.complaints.wrong[said:] = [led(cause, self.complaints.wrong[said:])]
        self.check_bare()
        drawing = {path for path, kinds in self.draws.items() if kinds}
        checks.check_evaluating(self.multihead, drawing, self.complaints)
        if self.sequence_parallel:
            self.check_rows()

    def check_stack(self) -> None:
        if self.elements:
            return
        if self.plan.layers is not None:
            stacks.say_unused(self.plan, self.model, self.trace, self.complaints)
        elif self.sequence_parallel and (rows := self.multihead.union(self.of("sums"))):
            stacks.say_none_found(sorted(rows), self.of("rows"), self.trace, self.complaints)

    def check_rows(self) -> None:
        """What runs on a part of the sequence must do the same to it as among the rest."""
        mixing, failing = {}, {}
        for path, finding in self.probed.items():
            name = self.styles[path].name
            if not self.styles[path].rows:
                continue
            if finding.fails is not None:
                failing[path] = f"{name}: it cannot be run on other lengths and numbers"
                failing[path] += f": {finding.fails}"
            elif finding.mixes:
                mixing[path] = f"{name}: its result at one position depends on other positions"
        whole = f"{{style: {REPLICATE.name}, input: gather}}"
        self.complaints.by_rule(mixing | failing, f"make it {whole}, to run it on all positions")

    def cut_styles(self) -> dict[str, Style]:
        """The styles of the parameters that are cut by rules of their own."""
        cut = {name: named(rule.style) for name, rule in self.cut.items()}
        return {name: style for name, style in cut.items() if style.columns or style.sums}

    def shared_experts(self) -> set[str]:
        """The parameters of which each rank has a part of every expert."""
        stacked = self.sizes.stacked.items()
        return {f"{path}.{name}" for path, shared in stacked for name in shared.cut}

    def cut_by_own_rules(self) -> dict[str, Rule]:
        """The rule of each parameter that is cut by one of its own, under all its names."""
        return {
            other: rule
            for names in self.placing.names.values()
            for name in names
            if (rule := self.matches.parameters.get(name)) is not None and named(rule.style).sharded
            for other in names
        }

    def check_bare(self) -> None:
        """A parameter that is cut by a rule of its own is used in sharded regions only."""
        met = self.flow.on_stream | self.flow.elsewhere
        aliases = {name: names for names in self.placing.names.values() for name in names}
        cut = {
            name: rule
            for name, rule in self.cut.items()
            if name in self.matches.parameters and not met.isdisjoint(aliases[name])
        }
        message = "is used outside a sharded region, where each rank has only its part of it"
        by_rule: dict[Position, list[str]] = {}
        for name, rule in cut.items() if self.tp > 1 else ():
            by_rule.setdefault(rule.position, []).append(name)
        for found in by_rule.values():
            rule, hint = cut[found[0]], f"make it {REPLICATE.name}"
            self.complaints.about(rule, found, f"{rule.style}: {message}", hint)

    def check_torn(self) -> None:
        torn = [name for name in self.trace.parameters.values() if self.torn(name)]
        if torn:
            message = "is used both inside and outside a sharded region: its gradient is ambiguous"
            hint = f"let its module be used on one side, or make that region {REPLICATE.name}"
            inside, outside = (self.flow.users.get((torn[0], side)) for side in (True, False))
            if inside is not None and outside is not None:
                where = f"{torn[0]} is used inside in {inside or 'the model itself'}"
                hint = f"{where}, and outside in {outside or 'the model itself'}: {hint}"
            self.complaints.about(None, torn, message, hint)
