"""Which rule governs which module: patterns against the paths of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import nn

from tpplan.language import Diagnostic, FrozenMap, Plan, Position, Rule, nearest
from tpplan.language.styles import WHOLE
from tpplan.planner.adapters import factor_rules
from tpplan.styles import named
from tpplan.wrapping import Wrapping, wrapping_of


@dataclass(frozen=True)
class Matches:
    """Rules by module path and by bare parameter name, and the optional patterns left over.

    Attributes:
        buffers: those of buffers, by name.
        adapted: what a layer with a low-rank adapter is made of -> the path of that layer.
    """

    modules: Mapping[str, Rule]
    parameters: Mapping[str, Rule]
    unmatched: tuple[str, ...]
    adapted: Mapping[str, str]
    buffers: Mapping[str, Rule] = FrozenMap()


def match(plan: Plan, model: nn.Module) -> tuple[Matches, list[Diagnostic]]:
    """Match a plan's rules; an exact path beats a pattern, two patterns on one are an error."""
    places: dict[int, str] = {}
    # a module that stands in several places has one plan, under its first path
    modules = {
        path: places.setdefault(id(module), path)
        for path, module in model.named_modules(remove_duplicate=False)
    }
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    buffers = [name for name, _ in model.named_buffers()]
    wrapping = wrapping_of(model)
    called = {path: wrapping.called(path) for path in modules}
    for name in (*parameters, *buffers):
        owner, _, leaf = name.rpartition(".")
        called[name] = name, f"{wrapping.names.get(owner, owner)}.{leaf}".lstrip(".")
    claims: dict[str, list[Rule]] = {}
    diagnostics: list[Diagnostic] = []
    unmatched: list[str] = []
    for rule in plan.rules:
        hits = [p for p in modules if any(map(rule.pattern.matches, called[p]))]
        bare = () if hits else (*parameters, *buffers)
        hits += [p for p in bare if any(map(rule.pattern.matches, called[p]))]
        for path in dict.fromkeys(modules.get(hit, hit) for hit in hits):
            claims.setdefault(path, []).append(rule)
        if hits:
            continue
        if rule.optional:
            unmatched.append(rule.pattern.text)
            continue
        message = f"pattern '{rule.pattern.text}' matches no module of {type(model).__name__}"
        guess = nearest(rule.pattern, [*modules, *parameters, *buffers])
        hint = (
            f"did you mean '{guess}'?"
            if guess
            else "put the rule under 'optional:' if it need not match"
        )
        diagnostics.append(Diagnostic(message, rule.position, hint))

    chosen, clashing = _chosen(plan, claims)
    diagnostics += clashing
    of_modules = {p: r for p, r in chosen.items() if p in modules}
    of_buffers = {name: chosen.pop(name) for name in buffers if name in chosen}
    of_parameters = {p: r for p, r in chosen.items() if p not in modules}
    adapted = _settle(model, wrapping, of_modules, diagnostics)
    found = Matches(of_modules, of_parameters, tuple(unmatched), adapted, of_buffers)
    return found, diagnostics


def _chosen(
    plan: Plan, claims: Mapping[str, list[Rule]]
) -> tuple[dict[str, Rule], list[Diagnostic]]:
    """The rule of each path, and what is said where two patterns claim one."""
    chosen: dict[str, Rule] = {}
    diagnostics: list[Diagnostic] = []
    clashes: dict[tuple[str, str], list[str]] = {}
    for path, rules in claims.items():
        exact = [r for r in rules if r.pattern.is_exact]
        chosen[path] = (exact or rules)[0]
        if not exact and len(rules) > 1:
            for other in rules[1:]:
                clashes.setdefault((rules[0].pattern.text, other.pattern.text), []).append(path)
    by_text = {r.pattern.text: r for r in plan.rules}
    for (first, second), paths in clashes.items():
        diagnostics.append(
            Diagnostic(
                f"two patterns claim {fold(paths)}",
                by_text[second].position,
                "make one of them narrower, or name the module by its exact path",
                (("the other pattern", by_text[first].position),),
            )
        )
    return chosen, diagnostics


def _settle(
    model: nn.Module, wrapping: Wrapping, rules: dict[str, Rule], wrong: list[Diagnostic]
) -> dict[str, str]:
    """Hand rules on to what peft has wrapped; the parts of adapted layers, by their paths."""
    for path in wrapping.held:
        if path not in wrapping.layers and path in rules:
            rule = rules.pop(path)
            for inner in wrapping.held[path]:
                rules.setdefault(inner, rule)
    refused: dict[tuple[Position, str, str], list[str]] = {}
    adapted: dict[str, str] = {}
    for path in wrapping.held:
        claim = rules.get(path) or rules.get(wrapping.held[path][0])
        if path not in wrapping.layers or claim is None or not named(claim.style).sharded:
            continue
        (held,) = wrapping.held[path]
        factors = factor_rules(model, path, rules.setdefault(held, claim))
        if isinstance(factors, str):
            refused.setdefault((claim.position, claim.style, factors), []).append(path)
            rules[path] = replace(claim, style=WHOLE, options=FrozenMap())  # all in it is spoken of
            del rules[held]
            continue
        rules.pop(path, None)
        adapted.update(dict.fromkeys((held, *factors), path))
        for factor, its in factors.items():
            rules.setdefault(factor, its)
    hint = f"of peft's adapters LoRA on a Linear can be; or make the layer {WHOLE}"
    for (position, style, message), paths in refused.items():
        said = f"{fold(paths)}: {style}: {message}, which cannot be sharded"
        wrong.append(Diagnostic(said, position, hint))
    return adapted


def nearly(parameter: str, matches: Matches) -> tuple[Rule | None, str]:
    """The rule that comes nearest to a parameter that none covers, and why it does not."""
    for rule in matches.modules.values():
        if rule.pattern.matches(parameter):
            only = f"'{rule.pattern.text}' matches modules, and so leaves parameters out"
            taken = any(folded(path) == folded(parameter) for path in matches.modules)
            name = parameter if taken else folded(parameter)
            return rule, f"{only}: give '{name}' a rule of its own"
    owner = parameter.rpartition(".")[0]
    around = owner
    while around and around not in matches.modules:
        around = around.rpartition(".")[0]
    rule_around = matches.modules.get(around)
    if rule_around is None:
        return None, ""
    only = f"the rule '{rule_around.pattern.text}' does not cover what is inside of its modules"
    return rule_around, f"{only}: give '{folded(owner)}' a rule of its own"


def folded(path: str) -> str:
    """A path with its layer numbers replaced by ``*``."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def fold(paths: Iterable[str]) -> str:
    """Paths that differ only in layer numbers, as one pattern and a count."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(folded(path), []).append(path)
    # a lone "1" of a Sequential is not every module
    shown = [
        f"{p} ({len(of)} of them)" if len(of) > 1 else of[0] if p == "*" else p
        for p, of in groups.items()
    ]
    if len(shown) > 4:
        shown[4:] = [f"and {len(shown) - 4} more"]
    return ", ".join(p if p else "the model itself" for p in shown)
