"""Why a module is treated as it is: the answer of ``tpplan explain``."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping

from torch import nn

from tpplan.compiled import Boundary, CompiledPlan, DrawnFor, ModulePlan, ParameterPlan
from tpplan.kernels.forms import UnbiasedForm
from tpplan.layout import Rows


def explain(model: nn.Module, compiled: CompiledPlan, path: str) -> str:
    """What the plan makes of the module or parameter at ``path``, and what was inferred.

    Raises:
        KeyError: where the model has neither.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if path in parameters and path not in modules:
        return "\n".join([path, f"  {_parameter(compiled.parameter(path))}"])
    if path not in modules:
        raise KeyError(path)
    plan = compiled.modules.get(path)
    lines = [f"{path or '(model)'}: {type(modules[path]).__name__}"]
    lines += [f"  {line}" for line in _module(compiled, plan, path)]
    return "\n".join(lines)


def _module(compiled: CompiledPlan, plan: ModulePlan | None, path: str) -> list[str]:
    served = _served_by(compiled, path)
    if plan is None:
        return ["no rule, and no parameters of its own: left as it is", *served]
    lines = [_rule(plan)]
    for leaf in plan.parameters:
        lines.append(_parameter(compiled.parameter(f"{path}.{leaf}" if path else leaf)))
    return [*lines, *inferences(compiled, plan), *served]


def _entering(boundary: Boundary, sequence_parallel: bool) -> list[str]:
    enters = "all-gathered along the sequence" if sequence_parallel else "copied in"
    leaves = "reduce-scattered" if sequence_parallel else "all-reduced"
    consumers = ", ".join(boundary.consumers)
    names = ", ".join(argument.name for argument in boundary.arguments)
    lines = [
        f"inferred: '{names}' enters the sharded region here, for "
        f"{consumers}: {enters}, its gradient {leaves}"
    ]
    if boundary.narrowed:
        lines.append("inferred: its code is shown a rank's share of the width of what enters")
    if len(boundary.shared) > 1:
        lines.append(f"inferred: one collective serves {', '.join(boundary.shared)}")
    return lines


def inferences(compiled: CompiledPlan, plan: ModulePlan) -> list[str]:
    """What was found out about a module beyond its rule and its parameters, a line each."""
    lines = _run(plan)
    for boundary in plan.boundaries:
        lines += _entering(boundary, compiled.sequence_parallel)
    if plan.transposed:
        lines.append("inferred: its weight is stored (in, out)")
    if len(plan.together) > 1:
        lines.append(f"inferred: one reduction serves {', '.join(plan.together)}")
    if plan.norm is not None:
        kind = "a LayerNorm" if plan.norm.centred else "an RMSNorm"
        told = (
            "the ranks' means and squares are put together"
            if plan.norm.centred
            else ("its squares are summed")
        )
        lines.append(f"inferred: {kind} over the sharded width; {told}")
    for argument, dim in plan.head_inputs:
        lines.append(f"each rank takes its heads of '{argument.name}', along dimension {dim}")
    if plan.element is not None:
        lines.append(
            f"inferred: an element of the layer stack; '{plan.element.argument}' carries the stream"
        )
    lines += _spread(plan)
    if plan.container:
        lines.append("the stream passes through it in its global form")
    for name, (present, local) in plan.attributes.items():
        said = "" if name in _stated(plan) else "inferred: "
        lines.append(f"{said}{name}: {present}, on each rank {local}")
    lines += [
        f"inferred: of the {heads} heads of '{name}', along dimension {dim}, each rank has its own"
        for name, (dim, heads) in plan.cut.items()
    ]
    lines += [
        f"buffer {name}: each rank computes with {rows.length()} along dimension {rows.dim}"
        for name, rows in plan.buffers.items()
    ]
    lines += _draws(plan, compiled.sequence_parallel)
    if plan.kernel is not None:
        kernel = plan.kernel
        lines.append(f"computes {kernel.kind} {kernel.reason}")
        if isinstance(kernel.form, UnbiasedForm):
            lines.append(f"leaves its bias to the kernel of {kernel.form.activation}")
    return lines


def _run(plan: ModulePlan) -> list[str]:
    """Whether a module can be run, and what is made of what it gives."""
    if plan.unreached:
        return ["no call came to it: each rank has its part of it, and it cannot be run"]
    if plan.summed is None:
        return []
    once = [f"inferred: '{name}' is added to the sum once" for name in plan.summed.added]
    return ["inferred: what it gives is summed over the ranks", *once]


def _spread(plan: ModulePlan) -> list[str]:
    """What a module has whole that meets a rank's rows of the stream."""
    if plan.spread is None:
        return []
    names = [f"'{argument.name}'" for argument in plan.spread.arguments]
    held = ", ".join([*names, *(["what it gives"] if plan.spread.outputs else [])])
    return [f"inferred: {held} meets a rank's rows of the stream: its gradient is all-reduced"]


def _stated(plan: ModulePlan) -> Container[str]:
    """The attributes of which the plan speaks."""
    stated = plan.options.get("attributes")
    return stated if isinstance(stated, Mapping) else ()


def _draws(plan: ModulePlan, sequence_parallel: bool) -> list[str]:
    """What random numbers are drawn for, and by whom."""
    if plan.draws is None:
        return []
    kinds = {kind for _, kind in plan.drawn_at} or {plan.draws}
    return [_drawn(kind, sequence_parallel) for kind in sorted(kinds)]


def _drawn(kind: DrawnFor, sequence_parallel: bool) -> str:
    if kind == "mixed":
        return "dropout at one place of sharded and whole tensors: refused in training with p > 0"
    own = kind == "region" or (kind == "stream" and sequence_parallel)
    masks = "each rank draws its own mask" if own else "all ranks draw the same mask"
    what = {
        "region": "of this rank's part of a sharded region",
        "stream": "of the residual stream",
        "whole": "of whole tensors",
    }[kind]
    return f"dropout in training, {what}: {masks}"


def _rule(plan: ModulePlan) -> str:
    if plan.rule is None:
        return "no rule"
    at = plan.rule.position
    return f"{plan.style}, by '{plan.rule.pattern.text}' ({at.file}:{at.line})"


def _parameter(entry: ParameterPlan) -> str:
    share = 100 * math.prod(entry.local_shape) / max(math.prod(entry.shape), 1)
    text = (
        f"{entry.name} {entry.shape}: {entry.placed}, {entry.local_shape} on the first rank "
        f"({share:.0f} %)"
    )
    if isinstance(entry.placement, Rows):
        held = ", ".join(f"{start}:{stop}" for start, stop in entry.placement.pieces[0])
        text += f"; the first rank holds {held} along dimension {entry.placement.dim}"
    if entry.summed:
        text += "; its gradient is summed over the ranks"
    if entry.rule is None:
        text += "; no rule mentions it, it is small and left replicated"
    if entry.aliases:
        text += f"; tied to {', '.join(entry.aliases)}"
    return text


def _served_by(compiled: CompiledPlan, path: str) -> list[str]:
    for other in compiled.modules.values():
        served = (boundary.consumers for boundary in other.boundaries)
        if other.path != path and any(path in consumers for consumers in served):
            return [f"inferred: its input enters the sharded region at {other.path}"]
    return []
