"""Blocks, which enter once and are reduced once: around experts, or where a rule says so.

Inside of a block every rank computes with the whole of what has entered: routers are whole, the
experts give a part of a sum, and so do the row-parallel layers beside them, which are not reduced
by themselves. What the block gives of these is reduced at its end. Only what is linear may be done
with parts; the replay of the regions runs it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from tpplan.compiled import CompiledPlan, Summed
from tpplan.kernels.experts import held_in
from tpplan.language import FrozenMap, Plan, Rule
from tpplan.observe.experts import OfSizes
from tpplan.observe.trace import Call, Trace
from tpplan.places import Place
from tpplan.planner.bare import BareRegion
from tpplan.planner.kept import kept_in
from tpplan.styles import NONE, Style, named


def block_rules(rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """The modules that are to be blocks, and the rule of each: its experts', or its own."""
    found = {p: r for p, r in rules.items() if named(r.style).closes(r.options)}
    for path, rule in rules.items():
        if named(rule.style).stacked and path not in found:
            found[path.rpartition(".")[0]] = rule
    return found


def blocks(
    trace: Trace, styles: Mapping[str, Style], rules: Mapping[str, Rule]
) -> dict[str, BareRegion]:
    """The blocks of a model, as the regions that they are.

    Args:
        rules: see ``block_rules``.
    """
    found: dict[str, BareRegion] = {}
    for block in trace.calls:
        if block.path not in rules:
            continue
        region = _region(trace, block, styles)
        if region is not None:
            known = found.setdefault(block.path, region)
            parts, rows = known.parts | region.parts, known.rows | region.rows
            found[block.path] = replace(known, parts=parts, rows=rows)
    return found


def escapes(
    traces: Iterable[tuple[Trace, Mapping[str, BareRegion]]],
) -> tuple[dict[str, tuple[Place, ...]], list[str]]:
    """What leaves blocks besides their sum (what their routers gave): by the module that gives it.

    That is the innermost around the block, or itself, that gives it; the block itself of what is
    kept in it. Also the blocks of which something is used outside that no module gives.
    """
    found: dict[str, dict[Place, None]] = {}
    lost: dict[str, None] = {}
    for trace, regions in traces:
        _note_escapes(trace, regions, found, lost)
    return {path: tuple(places) for path, places in found.items()}, list(lost)


def _note_escapes(
    trace: Trace,
    regions: Mapping[str, BareRegion],
    found: dict[str, dict[Place, None]],
    lost: dict[str, None],
) -> None:
    used: dict[int, list[int]] = {}
    for index, op in enumerate(trace.ops):
        for n in op.inputs:
            used.setdefault(n, []).append(index)
    for block in trace.calls:
        region = regions.get(block.path)
        if region is None or not region.block or region.summed is None:
            continue
        around = {call.path for call in trace.ancestors(block.parent)}
        made = {n for op in trace.ops[block.first_op : block.last_op] for n in op.outputs}
        made = (made & trace.floating) - {block.output_at(place) for place in region.summed.outputs}
        given = {n for call in trace.ancestors(block.index) for n in call.outputs}
        kept: dict[int, list[Place]] = {}
        for number, place in kept_in(trace, block.path):
            if number in made - region.parts:
                kept.setdefault(number, []).append(place)
                found.setdefault(block.path, {})[place] = None
        for number in sorted(made):
            uses = used.get(number, [])
            if number not in given and not any(index >= block.last_op for index in uses):
                continue
            giving = _giving(trace, block, number, uses)
            if number in kept and (giving is None or giving[0] in around):
                continue  # it is found in the attribute, where it is put right
            if giving is None:
                lost[block.path] = None
            else:
                path, places = giving
                found.setdefault(path, {}).update(dict.fromkeys(places))


def _giving(
    trace: Trace, block: Call, number: int, uses: Sequence[int]
) -> tuple[str, list[Place]] | None:
    """The module that gives a tensor of a block to all that use it outside, and where it does.

    Args:
        uses: the ops that the tensor goes into.
    """
    # innermost: hooks that keep what a router gives see what that gives out
    last = max((i for i in uses if i < block.last_op), default=-1)
    inner = [
        call
        for call in reversed(trace.calls[block.index + 1 :])
        if block.first_op <= call.first_op < block.last_op and last < call.last_op <= block.last_op
    ]
    around = trace.ancestors(block.index)
    giving = next((call for call in (*inner, *around) if number in call.outputs), None)
    if giving is None or any(block.last_op <= i < giving.last_op for i in uses):
        return None
    places = [p for n, p in zip(giving.outputs, giving.places, strict=True) if n == number]
    known = [place for place in places if place is not None]
    return (giving.path, known) if len(known) == len(places) else None


def _region(trace: Trace, block: Call, styles: Mapping[str, Style]) -> BareRegion | None:
    parts: set[int] = set()
    rows: set[str] = set()
    for op in trace.ops[block.first_op : block.last_op]:
        style, path = NONE, ""
        for call in trace.ancestors(op.call):
            if call.index == block.index:
                break
            if call.path in styles and (styles[call.path].sums or styles[call.path].stacked):
                style, path = styles[call.path], call.path
        if style is not NONE:
            parts.update(op.outputs)
            rows.update([path] if style.sums else [])
        elif not parts.isdisjoint(op.inputs):
            parts.update(op.outputs)
    if styles.get(block.path, NONE).stacked:
        parts.update(block.outputs)
    made = zip(block.outputs, block.places, strict=True)
    outputs = tuple(place for n, place in made if n in parts and place is not None)
    entering = {n: names for n, names in block.arguments.items() if n in trace.floating}
    if not outputs or not entering:
        return None
    return BareRegion(entering, Summed(outputs, ()), False, frozenset(parts), True, frozenset(rows))


def ways(plan: Plan) -> dict[str, Plan]:
    """The plan with each way in which ranks may share experts, by its word; none where there are
    no experts."""

    def changed(rule: Rule, way: str) -> Rule:
        options = named(rule.style).ways().get(way)
        changes = FrozenMap({**rule.options, **(options or {})})
        return rule if options is None else replace(rule, options=changes)

    words = dict.fromkeys(way for rule in plan.rules for way in named(rule.style).ways())
    return {w: replace(plan, rules=tuple(changed(rule, w) for rule in plan.rules)) for w in words}


def stacked_in(compiled: CompiledPlan) -> list[str]:
    """The modules that hold stacked experts."""
    return [path for path, plan in compiled.modules.items() if named(plan.style).stacked]


def holds_stacks(module: nn.Module) -> bool:
    """Whether it holds several stacks of matrices, as those of experts are: as many of each."""
    stacks = [p for p in module._parameters.values() if p is not None and p.dim() == 3]
    counts = {int(p.shape[0]) for p in stacks}
    alike = len(counts) == 1 or held_in(stacks) is not None
    return len(stacks) > 1 and alike and min(counts) > 1


def hide(shadow: nn.Module, paths: Iterable[str]) -> None:
    """Make one op of stacked experts: which rows go to which hangs on numbers, of which a shadow
    has none."""
    for path in paths:
        module = shadow.get_submodule(path)
        if any(p.dim() >= 3 for p in module.parameters(recurse=False)):  # else it is refused
            module.forward = OfSizes(module)  # type: ignore[method-assign]


def experts_in(compiled: CompiledPlan) -> int:
    """What divides the number of experts in every block; 0 where there are none."""
    held = {path: compiled.modules[path].parameters for path in stacked_in(compiled)}
    shapes = [compiled.parameter(f"{p}.{leaf}").shape for p, own in held.items() for leaf in own]
    return math.gcd(*(shape[0] for shape in shapes if len(shape) == 3))
