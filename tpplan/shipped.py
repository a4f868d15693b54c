"""Plans by name: those that are shipped, and whatever else a plan can be given as.

Nothing here needs torch, which takes seconds to import.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpplan.language import Diagnostic, Plan, PlanError, load, parse_mapping

if TYPE_CHECKING:
    from torch import nn

PlanSource = Plan | str | os.PathLike[str] | Mapping[str, Any]


def plan_directories() -> list[Path]:
    """Where shipped plans lie: in the installed package, or beside it in a source tree.

    What lies beside an installed package is not ours.
    """
    package = Path(__file__).resolve().parent
    return [d for d in (package / "plans", package.parent / "plans") if d.is_dir()][:1]


def shipped_plans() -> list[Plan]:
    """Every shipped plan, by name."""
    files = (f for d in plan_directories() for f in sorted(d.glob("*.yaml")))
    return [load(file, search=plan_directories()) for file in files]


def load_plan(source: PlanSource, model: nn.Module | None = None) -> Plan:
    """A plan from a file, a shipped plan's name, or a mapping with a plan's content.

    Args:
        source: "auto" chooses the shipped plan that lists the class of ``model``.

    Raises:
        PlanError: with everything that is wrong in it, by line.
    """
    if isinstance(source, Plan):
        return source
    if isinstance(source, Mapping):
        return parse_mapping(source, "<mapping>", search=plan_directories())
    if source == "auto":
        if model is None:
            raise PlanError([Diagnostic("plan 'auto' needs a model to choose by")])
        return _chosen(model)
    return load(source, search=plan_directories())


def _chosen(model: nn.Module) -> Plan:
    """The shipped plan that lists the class of ``model``, or one that it derives from, and fits."""
    names = {cls.__name__ for cls in type(model).__mro__}
    listing = [plan for plan in shipped_plans() if names & set(plan.models)]
    paths = [path for path, _ in model.named_modules()] + [n for n, _ in model.named_parameters()]
    strange = []
    for plan in listing:
        patterns = [rule.pattern for rule in plan.rules if not rule.optional]
        missing = [p.text for p in patterns if not any(map(p.matches, paths))]
        if not missing:
            return plan
        strange.append(f"{plan.name}: it has no {', '.join(missing[:3])}")
    message = f"no shipped plan lists {type(model).__name__}"
    if strange:
        message = f"no shipped plan fits this {type(model).__name__} ({'; '.join(strange)})"
    raise PlanError([Diagnostic(message, hint="see 'tpplan list', or write a plan")])
