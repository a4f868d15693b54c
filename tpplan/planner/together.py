"""Row-parallel layers whose outputs the model only adds up: one reduction serves them all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tpplan.compiled import Element
from tpplan.language import Rule
from tpplan.observe.trace import Call, Op, Trace
from tpplan.planner.complaints import Complaints
from tpplan.planner.match import fold
from tpplan.planner.views import VIEWS
from tpplan.styles import named

_SAME = VIEWS | {"alias", "clone", "contiguous"}


def reduced_together(
    traces: Sequence[Trace],
    rules: Mapping[str, Rule],
    elements: Mapping[str, Element],
    complaints: Complaints,
    blocks: Mapping[str, Rule],
) -> dict[str, tuple[str, ...]]:
    """Row-parallel layer -> the layers, in order of execution, that are reduced with it.

    Those are the ones of one element whose outputs the model adds before it does anything else
    with them (``reduce: separate`` keeps a layer out of it).

    Args:
        traces: in evaluation and in training: a dropout between two layers keeps them apart.
        blocks: those of experts, which are reduced as such layers are, and the experts' rule.
    """
    groups: dict[str, list[str]] = {}
    summing = {**_summing(rules), **blocks}
    for element, calls in _runs(traces[0], summing, elements):
        members = groups.setdefault(element.path, [])
        members += [call.path for call in calls if call.path not in members]
    result: dict[str, tuple[str, ...]] = {}
    for path, members in groups.items():
        runs = [
            [run for run in _runs(trace, summing, elements) if run[0].path == path]
            for trace in traces
        ]
        if len(members) > 1 and all(
            found
            and all([call.path for call in calls] == members for _, calls in found)
            and all(_only_added(trace, element, calls) for element, calls in found)
            for trace, found in zip(traces, runs, strict=True)
        ):
            result.update(dict.fromkeys(members, tuple(members)))
            continue
        asked = [path for path in members if summing[path].options.get("reduce") == "together"]
        for path in asked[:1]:
            rule = summing[path]
            where = rule.option_positions.get("reduce", rule.position)
            message = f"{fold(members)}: reduce: the model does more than add their outputs"
            complaints.say(message, where, "leave 'reduce' out, each is reduced on its own then")
    return result


def _summing(rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """The row-parallel layers that may be reduced together with others."""
    found = {}
    for path, rule in rules.items():
        style = named(rule.style)
        alone = style.scatters(rule.options) or rule.options.get("reduce") == "separate"
        if style.sums and not alone:
            found[path] = rule
    return found


def _runs(
    trace: Trace, rules: Mapping[str, Rule], elements: Mapping[str, Element]
) -> Iterator[tuple[Call, list[Call]]]:
    """Each call of an element, and the calls in it of layers that may be reduced together."""
    runs: dict[int, list[Call]] = {}
    for call in trace.calls:
        if call.path not in rules:
            continue
        element = next((c for c in trace.ancestors(call.index) if c.path in elements), None)
        if element is not None:
            runs.setdefault(element.index, []).append(call)
    for index, calls in runs.items():
        yield trace.calls[index], calls


def _only_added(trace: Trace, element: Call, calls: Sequence[Call]) -> bool:
    """Whether ``element`` uses each call's output once, to add it to the others' sum.

    What holds a part of the sum may be read by nothing else then, nor be given out by the element.
    """
    everyone = frozenset(call.index for call in calls)
    held: dict[int, frozenset[int]] = {}
    for call in calls:
        if len(call.outputs) != 1:
            return False
        held[call.outputs[0]] = frozenset([call.index])
    if len(held) != len(calls) or len({trace.shapes[number] for number in held}) > 1:
        return False
    # before the last of them ran they answer with one zero, expanded, which cannot be written to
    zeros = set(held) - {calls[-1].outputs[0]}
    spent: set[int] = set()
    whole: int | None = None
    for op in trace.ops:
        if not spent.isdisjoint(op.inputs):
            return False
        met = [n for n in op.inputs if n in held]
        around = {call.index for call in trace.ancestors(op.call)} if met else set()
        met = [n for n in met if held[n].isdisjoint(around)]  # the layer's own work
        if not met:
            continue
        joined = _joined(trace, op, met, held, zeros)
        if joined is None:
            return False
        for number in met:
            del held[number]
        spent.update(met)
        spent.difference_update(op.outputs)
        if joined == everyone:
            whole = op.outputs[0]
        else:
            held[op.outputs[0]] = joined
    given = {n for call in trace.ancestors(element.index) for n in call.outputs}
    return whole is not None and given.isdisjoint(spent)


def _joined(
    trace: Trace,
    op: Op,
    met: Sequence[int],
    held: Mapping[int, frozenset[int]],
    zeros: set[int],
) -> frozenset[int] | None:
    """Whose outputs the result of ``op`` holds the sum of, of those its inputs hold; else None."""
    name = op.name.removeprefix("aten.").split(".")[0]
    if len(op.outputs) != 1 or len(set(met)) != len(met):
        return None
    if name in _SAME and len(met) == 1:
        if met[0] in zeros:
            zeros.add(op.outputs[0])
        return held[met[0]]
    if name not in ("add", "add_") or op.scaled:
        return None
    if name == "add_" and (op.inputs[0] in zeros or op.inputs[0] not in held):
        return None
    if any(trace.shapes[n] != trace.shapes[op.outputs[0]] for n in met):
        return None
    return frozenset().union(*(held[n] for n in met))
