"""Plans by name: those that are shipped, and whatever else a plan can be given as.

Nothing here needs torch, which takes seconds to import.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Container, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from tpplan.language import Diagnostic, Pattern, Plan, PlanError, as_written, load, parse_mapping
from tpplan.language.styles import WHOLE

if TYPE_CHECKING:
    from torch import nn

# in the plans that are shipped, rules come last
_HEAD = re.compile(r"^(?:rules|optional):", re.MULTILINE)

_OTHERWISE = "see 'tpplan list', or write a plan"

PlanSource = Plan | str | os.PathLike[str] | Mapping[str, Any]


def plan_directories() -> list[Path]:
    """Where shipped plans lie: in the installed package, or beside it in a source tree.

    What lies beside an installed package is not ours.
    """
    package = Path(__file__).resolve().parent
    return [d for d in (package / "plans", package.parent / "plans") if d.is_dir()][:1]


def shipped_plans(listing: Container[str] | None = None) -> list[Plan]:
    """Every shipped plan, by name.

    Args:
        listing: names of classes, where only plans that list one of them are wanted; to read them
            all takes a second.
    """
    files = _files()
    if listing is not None:
        said = zip(files, described(), strict=True)
        files = [f for f, its in said if any(name in listing for name in its.models)]
    return [load(file, search=plan_directories()) for file in files]


def _files() -> list[Path]:
    return [f for d in plan_directories() for f in sorted(d.glob("*.yaml"))]


class Shipped(NamedTuple):
    """What is listed of a shipped plan, its own or that of the plan it extends.

    Attributes:
        models: names of classes.
    """

    name: str
    description: str
    models: tuple[str, ...]


def described() -> list[Shipped]:
    """Every shipped plan, by name; their rules, which take a second, are not read."""
    heads = {f.name: _HEAD.split(f.read_text(encoding="utf-8"), maxsplit=1)[0] for f in _files()}
    stated = {name: yaml.safe_load(head) for name, head in heads.items()}

    def of(name: str, key: str) -> Any:
        found = stated[name]
        if key in found or "extends" not in found:
            return found.get(key)
        return of(f"{Path(found['extends']).stem}.yaml", key)

    named = ((name, of(name, "description"), of(name, "models")) for name in stated)
    return [Shipped(n, (said or "").strip(), tuple(models or ())) for n, said, models in named]


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
    """The shipped plan that lists the class of ``model``, or one that it derives from, and fits.

    A model with another head, or without one, has the plan of its family; see ``_adapted``.
    """
    names = {cls.__name__ for cls in type(model).__mro__}
    strange = []
    for plan in shipped_plans(names):
        missing = _missing(plan, model)
        if not missing:
            return plan
        strange.append(f"{plan.name}: it has no {', '.join(missing[:3])}")
    # what the file that defines the model's class defines besides is of its family
    home = vars(sys.modules.get(type(model).__module__, object))
    family = (_adapted(plan, model) for plan in shipped_plans(home))
    adapted = next((plan for plan in family if plan is not None), None)
    if adapted is not None:
        return adapted
    if not strange:
        raise not_listed(model)
    message = f"no shipped plan fits this {type(model).__name__} ({'; '.join(strange)})"
    raise PlanError([Diagnostic(message, hint=_OTHERWISE)])


def not_listed(model: nn.Module) -> PlanError:
    """What is said of a model that no shipped plan is for."""
    return PlanError([Diagnostic(f"no shipped plan lists {type(model).__name__}", hint=_OTHERWISE)])


def _missing(plan: Plan, model: nn.Module) -> list[str]:
    """The patterns of a plan that name nothing in a model."""
    paths = _paths(model)
    patterns = [rule.pattern for rule in plan.rules if not rule.optional]
    return [p.text for p in patterns if not any(map(p.matches, paths))]


def _paths(model: nn.Module) -> list[str]:
    parameters = (name for name, _ in model.named_parameters(remove_duplicate=False))
    buffers = (name for name, _ in model.named_buffers())
    return [*(path for path, _ in model.named_modules()), *parameters, *buffers]


def _adapted(plan: Plan, model: nn.Module) -> Plan | None:
    """A family's plan for one of its models: without the rules of a head that this one does not
    have, and with its own head left whole. None where it is not the stack that the plan is for.

    What others of the family hold under a name may be the model itself, or have another name.
    """
    first = next((r.pattern.text for r in plan.rules if "*" in r.pattern.text), "").split(".")[0]
    names = [f"{first}.", "", *(f"{name}." for name, _ in model.named_children())]
    for name in names if "*" not in first else names[:1]:
        rules = _renamed(plan, f"{first}.", name, _paths(model))
        if rules is not None:
            break
    else:
        return None
    _follow_ties(model, rules)
    _leave_whole(model, rules)
    stated = {
        "layers": None if plan.layers is None else plan.layers.text.replace(f"{first}.", name, 1),
        "sequence_dim": plan.sequence_dim,
        "sequence_parallel": plan.sequence_parallel,
    }
    keys = {key: value for key, value in stated.items() if value is not None}
    title = f"{plan.name} for {type(model).__name__}"
    return parse_mapping({"tpplan": 1, **keys, "rules": rules}, title)


def _renamed(plan: Plan, old: str, new: str, paths: list[str]) -> dict[str, Any] | None:
    """The rules that match with another name in front; None where one of the stack does not."""
    rules: dict[str, Any] = {}
    for rule in plan.rules:
        text = rule.pattern.text
        text = new + text.removeprefix(old) if text.startswith(old) else text
        if any(map(Pattern(text).matches, paths)):
            rules[text] = {"style": rule.style, **as_written(rule.options)}
        elif "*" in text and not rule.optional:
            return None
    return rules


def _follow_ties(model: nn.Module, rules: dict[str, Any]) -> None:
    """What has the weight of a module with a rule (another stack's table) has its style too."""
    patterns = {text: Pattern(text) for text in rules}
    styles: dict[int, str] = {}
    left: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        text = next((text for text, p in patterns.items() if p.matches(path)), None)
        if text is None:
            left[path] = module
        else:
            styles |= dict.fromkeys(map(id, module.parameters(recurse=False)), rules[text]["style"])
    for path, module in left.items():
        for parameter in module.parameters(recurse=False):
            if id(parameter) in styles:
                rules[path] = {"style": styles[id(parameter)]}


def _leave_whole(model: nn.Module, rules: dict[str, Any]) -> None:
    """Leave whole the modules with matrices of which no rule speaks, the outermost of them."""
    patterns = [Pattern(text) for text in rules]
    spoken = [path for path in _paths(model) if any(p.matches(path) for p in patterns)]
    for path, module in model.named_modules():
        around = any(f"{path}.".startswith(f"{other}.") for other in spoken)
        inside = any(f"{other}.".startswith(f"{path}." if path else "") for other in spoken)
        if not around and not inside and any(p.dim() > 1 for p in module.parameters()):
            rules[path] = WHOLE
            spoken.append(path)
