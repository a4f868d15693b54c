"""What must hold before a plan is carried out, and what is said where it does not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

import torch
from torch import nn

from tpplan.compat import FakeTensor
from tpplan.language import Position, Rule
from tpplan.layout import MisfitError
from tpplan.observe.trace import Trace
from tpplan.planner.complaints import Complaints
from tpplan.planner.flow import Flow
from tpplan.planner.match import fold, folded, nearly
from tpplan.planner.stacks import hint_instead
from tpplan.styles import Style, for_parameters, named
from tpplan.styles.attention import ATTENTION
from tpplan.styles.colwise import COLWISE
from tpplan.styles.replicate import REPLICATE
from tpplan.styles.rowwise import ROWWISE
from tpplan.styles.sequence_parallel import SEQUENCE_PARALLEL

UNMENTIONED_SHARE = 0.01


def check_modules(model: nn.Module, tp: int, complaints: Complaints) -> None:
    """Styles against the modules they sit on."""
    refused, hidden, dims = {}, {}, {}
    for path, rule in complaints.matches.modules.items():
        module = model.get_submodule(path)
        style = named(rule.style)
        complaint = (_quantised(module) if style.sharded else None) or style.complaint(module, tp)
        if "dim" in rule.options:
            dims[path] = f"{rule.style}: 'dim' is for bare parameters"
        if complaint is not None:
            refused[path] = f"{rule.style}: {complaint}"
        elif "forward" in vars(module):
            hidden[path] = "its forward was replaced on the instance, which would hide the plan's"
    other = f"give it another style, or modules inside of it this one; {REPLICATE.name} suits all"
    complaints.by_rule(refused, other)
    complaints.by_rule(hidden, "define it on the class")
    complaints.by_rule(dims, "leave it out: of a module it follows from what it computes")
    _check_bare(model, tp, complaints)
    _check_buffers(model, tp, complaints)
    if any(isinstance(p, torch.distributed.tensor.DTensor) for p in model.parameters()):
        message = "the model already holds DTensor parameters"
        complaints.say(message, hint="parallelize a model once, and before FSDP")


def say_no_experts(ep: int, complaints: Complaints) -> None:
    """Where ranks are to share experts, and the plan knows of none."""
    message = f"ep {ep}: no rule of the plan is of experts that these ranks could share"
    hint = "leave the dimension 'ep' to data parallelism, or give the experts a rule"
    complaints.say(message, complaints.position_of("rules:"), hint)


def _quantised(module: nn.Module) -> str | None:
    """What is said of a weight that holds its numbers in a way of its own."""
    weight = module._parameters.get("weight")
    if weight is None or isinstance(weight, torch.distributed.tensor.DTensor | FakeTensor):
        return None
    own = type(weight).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if not own and (weight.is_floating_point() or weight.is_complex()):
        return None
    kind = type(weight).__name__ if own else str(weight.dtype).removeprefix("torch.")
    return f"its weight is quantised ({kind}), which cannot be cut"


def _check_buffers(model: nn.Module, tp: int, complaints: Complaints) -> None:
    """Rules for buffers, which are not multiplied by: of a product each rank would have a part."""
    held: dict[str, tuple[torch.Tensor, Rule]] = {}
    refused: dict[Position, tuple[Rule, list[str]]] = {}
    for name, rule in complaints.matches.buffers.items():
        if named(rule.style).bare is None or named(rule.style).sums:
            refused.setdefault(rule.position, (rule, []))[1].append(name)
        else:
            held[name] = model.get_buffer(name), rule
    for rule, names in refused.values():
        message = f"a buffer can be {COLWISE.name} or {REPLICATE.name}, not {rule.style}"
        hint = f"{COLWISE.name} gives each rank what is of its columns or heads"
        complaints.about(rule, names, message, hint)
    _check_tensors(held, tp, complaints)


def check_buffers(trace: Trace, cut: Mapping[str, Rule], complaints: Complaints) -> None:
    """A buffer of which each rank is to have a part is read by its module, and not written to."""
    written = {trace.buffers.get(n) for op in trace.ops for n in op.written}
    called = {call.path for call in trace.calls}
    for name, rule in cut.items():
        message = ""
        if name in written:
            message = "the model's code writes to this buffer, of which each rank has the whole"
        elif name.rpartition(".")[0] not in called:
            message = "the module that holds this buffer is not called: other code reads it"
        if message:
            hint = f"make it {REPLICATE.name}"
            complaints.about(rule, [name], f"{rule.style}: {message}", hint)


def _check_bare(model: nn.Module, tp: int, complaints: Complaints) -> None:
    """Rules for bare parameters."""
    bare: dict[str, tuple[torch.Tensor, Rule]] = {}
    for name, rule in complaints.matches.parameters.items():
        style = named(rule.style)
        if style.bare is None:
            known = ", ".join(f"'{style}'" for style in for_parameters())
            message = f"a bare parameter can be one of {known}, not '{rule.style}'"
            hint = f"{COLWISE.name} cuts its first dimension, {REPLICATE.name} leaves it whole"
            complaints.say(message, rule.position, hint)
            continue
        bare[name] = model.get_parameter(name), rule
    _check_tensors(bare, tp, complaints)


def _check_tensors(
    held: Mapping[str, tuple[torch.Tensor, Rule]], tp: int, complaints: Complaints
) -> None:
    """The options of rules for single tensors, and whether tp fits these."""
    misfits: dict[tuple[str, str], list[str]] = {}
    for name, (tensor, rule) in held.items():
        style = named(rule.style)
        assert style.bare is not None
        for option in sorted(rule.options.keys() - style.bare):
            message = f"{rule.style}: '{option}' says nothing of a bare parameter"
            misfits.setdefault((message, "leave it out"), []).append(name)
        try:
            style.place(tensor, rule, tp)
        except MisfitError as error:
            message, hint = error.args
            misfits.setdefault((f"{rule.style}: {message}", hint), []).append(name)
    for (message, hint), names in misfits.items():
        complaints.about(held[names[0]][1], names, message, hint)


def check_unmentioned(
    parameters: Mapping[str, nn.Parameter], mentioned: set[str], complaints: Complaints
) -> None:
    """Large parameters that no rule speaks of.

    Args:
        parameters: each once, under its first name.
        mentioned: those of which any name has a rule.
    """
    total = sum(p.numel() for p in parameters.values())
    left = {name: p for name, p in parameters.items() if name not in mentioned}
    large = [name for name, p in left.items() if p.dim() >= 2]
    hint = f"give it a rule; '{REPLICATE.name}' leaves it whole on every rank"
    for pattern in dict.fromkeys(folded(name) for name in large):
        members = [name for name in large if folded(name) == pattern]
        shape = tuple(left[members[0]].shape)
        message = f"no rule mentions this parameter of shape {shape}"
        rule, cure = nearly(members[0], complaints.matches)
        complaints.about(rule, members, message, cure or hint)
    small = {name: p.numel() for name, p in left.items() if name not in large}
    if sum(small.values()) > UNMENTIONED_SHARE * total:
        share = 100 * sum(small.values()) / total
        message = f"no rule mentions these parameters, together {share:.1f} % of the model"
        complaints.about(None, small, message, hint)


def check_evaluating(regions: Set[str], drawing: Set[str], complaints: Complaints) -> None:
    """Whose own code is to run as in evaluation, and cannot.

    Args:
        regions: torch's own attention; drawing: the modules that draw random numbers in training.
    """
    refused = {}
    for path, rule in complaints.matches.modules.items():
        if not rule.options.get("eval"):
            continue
        if path in regions:
            refused[path] = "eval: says nothing of torch's own attention, whose code is not run"
        elif path in drawing:
            refused[path] = "eval: its own code draws random numbers in training, as for dropout"
    complaints.by_rule(refused, "leave 'eval' out, or have the module draw none", "eval")


def check_blocks(
    asked: Mapping[str, Rule],
    found: Set[str],
    elements: Set[str],
    sequence_parallel: bool,
    complaints: Complaints,
) -> None:
    """What gives a sum that is reduced there.

    Args:
        asked: the modules of which that is said, and the rules that say it.
        found: those that do give one.
    """
    layers = {path for path in found if path.rpartition(".")[2].isdigit()}
    lone = sorted(layers | (found & elements))
    for path in [p for p in lone if named(asked[p].style).stacked][:1]:
        message = "an element of the stack calls experts itself, not a module around these"
        hint = "give the experts 'reduce: here', in plain TP, or put them into a module with what "
        hint += "routes to them"
        complaints.about(asked[path], lone, message, hint)
    here = {p: rule for p, rule in asked.items() if named(rule.style).closes(rule.options)}
    none = "reduce: it gives no sum of row-parallel layers inside of it"
    stack = "reduce: an element of the stack gives the stream, not a part of a sum"
    refused = {p: none for p in here.keys() - found if not named(asked[p].style).stacked}
    refused |= dict.fromkeys(here.keys() & elements, stack)
    hint = "leave it out, each row-parallel layer is reduced by itself then"
    complaints.by_rule(refused, hint, "reduce")
    if sequence_parallel:
        rows = "reduce: each rank has tokens of its own under sequence parallelism, not their batch"
        alone = {p: rows for p, rule in here.items() if named(rule.style).stacked}
        complaints.by_rule(alone, "turn sequence_parallel off", "reduce")


def check_flow(flow: Flow, sequence_parallel: bool, complaints: Complaints) -> None:
    """What the flow of tensors through the regions and the stream shows."""
    complaints.by_rule(
        _each(flow.unsharded, "its input is whole, not sharded", complaints),
        "a row-parallel layer takes what column-parallel layers produce",
    )
    complaints.by_rule(
        _each(flow.unsplit, "it does more to a whole tensor than multiply it", complaints),
        "only what multiplies by its weight can make columns of its own",
    )
    twice = {}
    for path, makers in flow.twice.items():
        style = complaints.matches.modules[path].style
        by = f", by {fold(makers)}" if makers else ""
        twice[path] = f"{style}: its input is already sharded{by}"
    hint = f"make this layer {ROWWISE.name}, or what sharded its input {REPLICATE.name}"
    complaints.by_rule(twice, hint)
    if flow.unreduced and not flow.unsharded:
        message = "sharded activations leave it: no row-parallel layer reduces them"
        hint = f"end each sharded region with a {ROWWISE.name} layer"
        complaints.about(None, flow.unreduced, message, hint)
    for path, maker in _once({p: m for p, m in flow.torn.items() if p not in flow.made_of}):
        _mixture(path, maker, "sharded activations", COLWISE, complaints)
    for path, name in _once({p: n for p, n in flow.made_of.items() if p in flow.torn}):
        message = f"combines sharded activations with what it makes of {fold([name])}, which is "
        message += "whole, and whose gradient would be a part"
        rule = complaints.matches.parameters.get(name)
        hint = f"give {fold([name])} the style {COLWISE.name}, with 'dim:' where its columns are "
        complaints.about(rule, [path], message, f"{hint}not along its first dimension")
    inside = {
        path: f"it is inside of {fold([around])}, which runs whole on every rank"
        for path, around in flow.inside.items()
    }
    complaints.by_rule(inside, "leave one of the two rules out")
    if sequence_parallel:
        _check_stream(flow, complaints)


def _each(paths: Iterable[str], message: str, complaints: Complaints) -> dict[str, str]:
    """What is said of modules, after the style that each has."""
    rules = complaints.matches.modules
    return {path: f"{rules[path].style}: {message}" for path in paths}


def _once(makers: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    """Of what is alike but for numbers, the first."""
    found: dict[tuple[str, str], tuple[str, str]] = {}
    for path, maker in makers.items():
        found.setdefault((folded(path), folded(maker)), (path, maker))
    return found.values()


def _check_torn_stream(flow: Flow, off: str, complaints: Complaints) -> None:
    """What an element's rows meet that is whole, and is not for all of them."""
    # of code that mixes positions nothing more can be told
    torn = {path: maker for path, maker in flow.torn_stream.items() if path not in flow.along}
    for path, maker in _once(torn):
        source = f" from {fold([maker])}" if maker else ""
        message = f"combines the sequence-sharded stream with a whole tensor{source}, whose "
        message += "gradient would be a part"
        hint = "if that tensor has rows of the sequence, give the module that makes it the style "
        hint += f"{SEQUENCE_PARALLEL.name}; if it is one for all of them, make it in a module of "
        hint += f"the layer with {REPLICATE.name}"
        if flow.twofold:
            other = fold(dict.fromkeys(flow.twofold)) or "the model"
            message += f", and of which {other} makes another use"
            hint = f"compute it from what the layer is given in a module with {REPLICATE.name} "
            hint += "inside of the layer, for this use alone"
        rule = complaints.matches.modules.get(maker)
        complaints.about(rule, [path], message, f"{hint}; or {off}")


def _mixture(path: str, maker: str, what: str, style: Style, complaints: Complaints) -> None:
    source = f" from {fold([maker])}" if maker else ""
    message = f"combines {what} with a whole tensor{source}, whose gradient would be a part"
    hint = f"give the module that makes that tensor the style {style.name}"
    rule = complaints.matches.modules.get(maker)
    if style is COLWISE and rule is not None and named(rule.style).sums:
        hint = f"if the code goes on with the sum, give {fold([maker])} 'output: inside'"
    complaints.about(rule, [path], message, hint)


def _for_mixture(path: str, maker: str, giving: str) -> str:
    """What to write where code outside the stack works on the stream and something whole."""
    if maker:
        return f"give the module that makes that tensor the style {SEQUENCE_PARALLEL.name}"
    if giving:
        return f"give '{folded(giving)}' the style {REPLICATE.name}: it gives all positions then"
    if path:
        name = fold([path])
        return f"give '{name}' the style {REPLICATE.name}: it is given all positions then"
    return f"put this code, a pooling perhaps, in a module with the style {REPLICATE.name}"


def _stack_within(layers: Iterable[str], sums: Iterable[str]) -> str:
    """What may be the stack instead of layers: the one module in each that all regions are in."""
    within = {
        (layer, ".".join([layer, *path.removeprefix(f"{layer}.").split(".")[:1]]))
        for layer in layers
        for path in sums
        if path.startswith(f"{layer}.")
    }
    found = {(folded(layer), folded(inner)) for layer, inner in within}
    if len(found) != 1 or not {inner for _, inner in within}.isdisjoint(sums):
        return ""
    ((layer, inner),) = found
    return (
        f"; or make the stack of what is in it, 'layers: {inner}' with '{layer}: {REPLICATE.name}'"
    )


def _check_stream(flow: Flow, complaints: Complaints) -> None:
    """What must hold where each rank has a part of the sequence."""
    rowless = {
        path: f"{SEQUENCE_PARALLEL.name}: it is given {shape}, which has no rows of the sequence"
        for path, shape in flow.rowless.items()
    }
    complaints.by_rule(rowless, f"make it {REPLICATE.name}, which runs whole on every rank")
    for path, maker in _once(flow.mixed):
        source = f" from {fold([maker])}" if maker else ""
        message = f"combines the sequence-sharded stream with a whole tensor{source}"
        giving = flow.giving.get(path, "")
        rule = complaints.matches.modules.get(maker or giving)
        complaints.about(rule, [path], message, _for_mixture(path, maker, giving))
    off = "turn sequence_parallel off"
    along = {
        path: f"'{op}' on the sequence-sharded stream is not known to keep positions apart"
        for path, op in flow.along.items()
    }
    rows, whole = SEQUENCE_PARALLEL.name, f"{{style: {REPLICATE.name}, input: gather}}"
    hint = f"give the module the style {rows} if it does, or {whole} to run it on all positions"
    own = {path: along.pop(path) for path in flow.inlined if path in along}
    rules = complaints.matches.modules
    sums = {path for path, rule in rules.items() if named(rule.style).sums}
    around = {path for path in along if any(p.startswith(f"{path}.") for p in sums)} - own.keys()
    summing = {path: along.pop(path) for path in sorted(around)}
    here = f"{{style: {ATTENTION.name}, reduce: here}}, to run on all positions and be reduced once"
    complaints.by_rule(summing, f"give the module {here}; or {off}")
    move = "put this code in a module of the layer, and give that the style "
    inner = _stack_within(own, sums)
    complaints.by_rule(own, f"{move}{whole} to run it on all positions{inner}; or {off}")
    complaints.by_rule(along, f"{hint}; or {off}")
    _check_torn_stream(flow, off, complaints)
    norms = [path for path, rule in rules.items() if named(rule.style) is SEQUENCE_PARALLEL]
    for paths, message, hint in (
        (
            flow.escaping,
            "gives out more of the sequence-sharded stream than the stream itself",
            hint_instead(flow.escaping, norms),
        ),
        (
            [path for path, _ in sorted(flow.whole & flow.streamed)],
            "is given the sequence-sharded stream in one call and a whole tensor in another",
            off,
        ),
        (
            # where the layer's code mixes positions, that is to be mended first
            [p for p in flow.flattened if not any(p.startswith(f"{path}.") for path in own)],
            "row-parallel output that does not have the stream's shape",
            f"give the module around it that is given the stream {here}; or {off}",
        ),
    ):
        if paths:
            rule = complaints.matches.modules.get(paths[0])
            complaints.about(rule, paths, f"{message}, which this version does not support", hint)
