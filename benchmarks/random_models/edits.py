"""Edits of a right plan: what a user might get wrong, or write otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from torch import nn

from benchmarks.random_models.habits import HABITS, fits
from benchmarks.random_models.judge import built
from benchmarks.random_models.model import Case, case_of, plan_text, written
from benchmarks.random_models.part import Rules
from benchmarks.random_models.recipe import Recipe, settled

STYLES = ("colwise", "rowwise", "sequence_parallel", "vocab", "replicate")
_DROPPED = "(dropped)"


@dataclass(frozen=True)
class Edit:
    """What is changed of a plan: rules by pattern, options by key of the plan, the rule's kind."""

    kind: str = ""
    rules: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)

    def of(self, recipe: Recipe) -> Case:
        """The recipe's model with its plan edited."""
        case = case_of(recipe)
        if not self.kind:
            return case
        _, plan = written(recipe)
        rules = {p: rule for p, rule in plan["rules"].items() if self.rules.get(p) != _DROPPED}
        rules.update({p: rule for p, rule in self.rules.items() if rule != _DROPPED})
        keys = {k: v for k, v in plan.items() if k != "rules"}
        text = plan_text({**keys, **self.keys, "rules": rules})
        return replace(case, plan=text, right=False)


def drawn(random: Random, recipe: Recipe) -> tuple[Recipe, Edit]:
    """A random edit of the recipe's plan, or of its model's code."""
    habits = [name for name in HABITS if fits(recipe, name)]
    if habits and random.random() < 0.4:
        name = random.choice(habits)
        return settled(replace(recipe, habit=name)), Edit()
    source, plan = written(recipe)
    model, _ = built(Case(source, ""))
    return recipe, random.choice(_EDITS)(random, plan["rules"], model)


def _styled(random: Random, rules: Rules, model: nn.Module) -> Edit:
    pattern = random.choice(list(rules))
    return Edit("another style", {pattern: random.choice(STYLES)})


def _dropped(random: Random, rules: Rules, model: nn.Module) -> Edit:
    return Edit("a rule dropped", {random.choice(list(rules)): _DROPPED})


def _swapped(random: Random, rules: Rules, model: nn.Module) -> Edit:
    first, second = random.choice(list(rules)), random.choice(list(rules))
    return Edit("two rules swapped", {first: rules[second], second: rules[first]})


def _elsewhere(random: Random, rules: Rules, model: nn.Module) -> Edit:
    """A rule on a module or parameter that has none, or beside one that has."""
    modules = [path for path, _ in model.named_modules() if path]
    parameters = [path for path, _ in model.named_parameters()]
    path = random.choice(modules if random.random() < 0.5 else parameters)
    if random.random() < 0.5:
        path = ".".join("*" if part.isdigit() else part for part in path.split("."))
    return Edit("a rule on another module", {path: random.choice(STYLES)})


def _one_layer(random: Random, rules: Rules, model: nn.Module) -> Edit:
    """One layer of the stack is treated otherwise."""
    many = [p for p in rules if ".*" in p or "?" in p]
    if not many:
        return _styled(random, rules, model)
    pattern = random.choice(many)
    number = random.choice(("0", "1", "[01]", "7"))
    narrowed = (
        pattern.replace("*", number, 1) if "*" in pattern else pattern.replace("?", number, 1)
    )
    if random.random() < 0.3:
        return Edit("a narrower pattern", {pattern: _DROPPED, narrowed: rules[pattern]})
    return Edit("one layer otherwise", {narrowed: random.choice(STYLES)})


def _misspelt(random: Random, rules: Rules, model: nn.Module) -> Edit:
    pattern = random.choice(list(rules))
    at = random.randrange(len(pattern))
    wrong = random.choice((pattern[:at] + pattern[at + 1 :], pattern[:at] + "x" + pattern[at:]))
    if not wrong or wrong in rules:
        return _dropped(random, rules, model)
    return Edit("a misspelt pattern", {pattern: _DROPPED, wrong: rules[pattern]})


def _packed(random: Random, rules: Rules, model: nn.Module) -> Edit:
    """Another packed layout."""
    columns = [p for p, rule in rules.items() if _style(rule) == "colwise"]
    if not columns:
        return _styled(random, rules, model)
    layouts: Sequence[Any] = (
        None,
        ["q", "k", "v"],
        ["q", "v", "k"],
        ["k", "v", "q"],
        ["a", "b"],
        ["a"],
        ["q", "k", "v", "g"],
        {"parts": ["q", "k", "v"], "repeat": "heads"},
        {"parts": ["q", "k", "v"], "repeat": "kv_heads"},
        {"parts": ["a", "b"], "repeat": 4},
        {"parts": ["a", "b"], "repeat": 2},
    )
    layout = random.choice(layouts)
    rule = "colwise" if layout is None else {"style": "colwise", "packed": layout}
    return Edit("another layout", {random.choice(columns): rule})


def _option(random: Random, rules: Rules, model: nn.Module) -> Edit:
    """Another option of a rule."""
    by_style: Mapping[str, Sequence[tuple[str, Any]]] = {
        "colwise": (("transposed", True), ("transposed", False)),
        "rowwise": (
            *(("transposed", True), ("reduce", "separate"), ("reduce", "together")),
            ("output", "shard"),
        ),
        "vocab": (("output", "gather"), ("output", "shard")),
        "attention": (
            *(("heads", 2), ("heads", 8), ("kv_heads", 1), ("kv_heads", 4), ("head_dim", 8)),
            *(
                ("gather", ["x"]),
                ("head_inputs", {"mask": 1}),
                ("attributes", {"heads": "kv_heads"}),
            ),
            *(("attributes", {"heads": "heads"}), ("attributes", {"head_dim": "head_dim"})),
        ),
    }
    able = [p for p, rule in rules.items() if _style(rule) in by_style]
    if not able:
        return _styled(random, rules, model)
    pattern = random.choice(able)
    rule = rules[pattern]
    name, value = random.choice(by_style[_style(rule)])
    known = {"style": rule} if isinstance(rule, str) else rule
    return Edit("another option", {pattern: {**known, name: value}})


def _attributes(random: Random, rules: Rules, model: nn.Module) -> Edit:
    """An attribute left out, or said otherwise."""
    stated = [p for p, rule in rules.items() if isinstance(rule, dict) and "attributes" in rule]
    if not stated:
        return _option(random, rules, model)
    pattern = random.choice(stated)
    attributes = dict(rules[pattern]["attributes"])
    name = random.choice(list(attributes))
    if random.random() < 0.5:
        del attributes[name]
    else:
        wrong = ("heads", "kv_heads", "head_dim", "heads * head_dim", "heads // 2", "4", "1")
        attributes[name] = random.choice(wrong)
    rule = {**rules[pattern], "attributes": attributes}
    if not attributes:
        del rule["attributes"]
    return Edit("another attribute", {pattern: rule})


def _key(random: Random, rules: Rules, model: nn.Module) -> Edit:
    """Something of the whole plan."""
    stack = next((p.split(".*")[0] for p in rules if ".*" in p), "layers")
    key, value = random.choice(
        (
            *(
                ("sequence_dim", 0),
                ("sequence_dim", 1),
                ("layers", f"{stack}.*"),
                ("layers", stack),
            ),
            *(("layers", f"{stack}.0"), ("kernels", "torch"), ("kernels", "auto")),
        )
    )
    return Edit("another key", {}, {key: value})


def _style(rule: Any) -> str:
    return str(rule if isinstance(rule, str) else rule["style"])


_EDITS: Sequence[Callable[[Random, Rules, nn.Module], Edit]] = (
    *(_styled, _dropped, _swapped, _elsewhere, _elsewhere, _one_layer, _misspelt, _packed),
    *(_option, _option, _attributes, _key),
)
