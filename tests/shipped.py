"""The models that the shipped plans list, as the zoo builds them, and the ways to run them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks import zoo
from tpplan.language import Plan
from tpplan.shipped import shipped_plans

WAYS = [(tp, sp) for tp in (2, 4) for sp in (False, True)]


@cache
def plans() -> Mapping[str, Plan]:
    """By the name of the class."""
    return {cls: plan for plan in shipped_plans() for cls in plan.models}


def class_of(label: str) -> str:
    """The name of the class that the zoo builds under this label."""
    name, _, cls = label.partition(" (")
    kind = zoo.VARIANTS[name][0] if name in zoo.VARIANTS else name
    return cls.removesuffix(")") or str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])


def listed() -> list[str]:
    """The labels of the zoo's models that a shipped plan lists."""
    return [label for label in zoo.makers() if class_of(label) in plans()]


def ways(labels: list[str]) -> list[tuple[str, int, bool]]:
    """Model, tp, sequence parallelism."""
    return [(label, tp, sp) for label in labels for tp, sp in WAYS]
