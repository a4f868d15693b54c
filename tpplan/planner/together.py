"""Row-parallel layers whose outputs the model only adds up: one reduction serves them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tpplan.language import Rule
from tpplan.planner.compiled import Element
from tpplan.planner.complaints import Complaints
from tpplan.planner.infer import KEEPING, VIEWS
from tpplan.planner.match import fold
from tpplan.planner.trace import Trace

_SUMS = frozenset({"add", "add_"})


def reduced_together(
    traces: Sequence[Trace],
    rules: Mapping[str, Rule],
    elements: Mapping[str, Element],
    complaints: Complaints,
) -> dict[str, tuple[str, ...]]:
    """Row-parallel layer -> the layers, in order of execution, that are reduced with it.

    Those are the ones of one element whose outputs the model adds before it does anything else
    with them (``reduce: separate`` keeps a layer out of it).

    Args:
        traces: in evaluation and in training: a dropout between two layers keeps them apart.
    """
    groups: dict[str, list[str]] = {}
    trace = traces[0]
    for call in trace.calls:
        rule = rules.get(call.path)
        if rule is None or rule.style != "rowwise" or rule.options.get("reduce") == "separate":
            continue
        element = next((c.path for c in trace.ancestors(call.index) if c.path in elements), None)
        if element is None:
            continue
        members = groups.setdefault(element, [])
        if call.path not in members:
            members.append(call.path)
    result: dict[str, tuple[str, ...]] = {}
    for members in groups.values():
        if len(members) > 1 and all(_only_added(trace, members) for trace in traces):
            result.update(dict.fromkeys(members, tuple(members)))
            continue
        asked = [path for path in members if rules[path].options.get("reduce") == "together"]
        for path in asked[:1]:
            rule = rules[path]
            where = rule.option_positions.get("reduce", rule.position)
            message = f"{fold(members)}: reduce: the model does more than add their outputs"
            complaints.say(message, where, "leave 'reduce' out, each is reduced on its own then")
    return result


def _only_added(trace: Trace, members: list[str]) -> bool:
    held: dict[int, frozenset[str]] = {}
    everyone = frozenset(members)
    for call in trace.calls:
        if call.path in everyone and call.outputs:
            held[call.outputs[0]] = frozenset([call.path])
    complete = False
    for op in trace.ops:
        if trace.calls[op.call].path in everyone:
            continue
        met = [held[n] for n in op.inputs if n in held]
        if not met:
            continue
        joined = frozenset().union(*met)
        name = op.name.removeprefix("aten.").split(".")[0]
        if not (name in _SUMS or name in KEEPING or name in VIEWS):
            return False
        if joined == everyone:
            complete = True
            for number in (*op.inputs, *op.outputs):
                held.pop(number, None)
        else:
            held.update(dict.fromkeys(op.outputs, joined))
    return complete
