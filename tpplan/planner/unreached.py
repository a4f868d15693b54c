"""Layers that no call came to with which the model was traced."""

from __future__ import annotations

from collections.abc import Mapping, Set

from torch import nn

from tpplan.language import Diagnostic, PlanError, Rule
from tpplan.observe.trace import Trace
from tpplan.planner.match import fold
from tpplan.styles import named, runs_as


def unreached(
    model: nn.Module,
    trace: Trace,
    rules: Mapping[str, Rule],
    bare: Mapping[str, Rule],
    tied: Set[str],
) -> frozenset[str]:
    """The sharded layers that no call came to, which are cut all the same.

    Args:
        bare: the rules of parameters that are cut by themselves, under all their names.
        tied: modules that share their parameters with others, and may only hold them.

    Raises:
        PlanError: for what is not one of torch's layers, or is read by other code: it cannot be
            told how it is to be cut, or what would become of it.
    """
    called = {c.path for c in trace.calls} | tied
    sharded = {path for path, rule in rules.items() if named(rule.style).sharded} - called
    sharded = {path for path in sharded if not runs_as(model.get_submodule(path), nn.Identity)}
    met = {n for op in trace.ops for n in op.inputs}
    read = {name for number, name in trace.parameters.items() if number in met}
    silent: dict[str, list[str]] = {}
    for path in sorted(sharded):
        module = model.get_submodule(path)
        known = runs_as(module, nn.Linear) or runs_as(module, nn.Embedding)
        held = {f"{path}.{name}" for name, _ in module.named_parameters()}
        if not known or not held.isdisjoint(read):
            silent.setdefault(rules[path].pattern.text, []).append(path)
    for name in trace.parameters.values():
        if name in bare and name not in read:
            silent.setdefault(bare[name].pattern.text, []).append(name)
    message = "was not called in the forward pass that was traced"
    hint = "give inputs= with which the model calls it, or leave it out of the plan"
    if silent:
        every = {**bare, **rules}
        raise PlanError(
            [
                Diagnostic(f"{fold(paths)}: {message}", every[paths[0]].position, hint)
                for paths in silent.values()
            ]
        )
    return frozenset(sharded)
