"""Models with peft's adapters: what becomes of them follows from the layers they are added to.

peft is not imported: where a model has adapters, it is there.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from torch import nn

from tpplan.language import FrozenMap, Rule
from tpplan.styles import named

_FACTORS = "lora_A", "lora_B"
_LORA = "peft.tuners.lora.layer"


def factor_rules(model: nn.Module, path: str, rule: Rule) -> dict[str, Rule] | str:
    """The rules of the factors of an adapted layer that is sharded; what keeps it from being.

    Args:
        rule: of the layer that it holds.
    """
    layer: Any = model.get_submodule(path)
    kinds = named(rule.style).low_rank(rule.options)
    lora = sys.modules.get(_LORA)
    if lora is None or type(layer) is not lora.Linear:
        return f"its adapter is a {type(layer).__module__}.{type(layer).__name__}"
    variants = sorted({type(v).__name__ for v in layer.lora_variant.values()})
    if variants:
        return f"its adapter is a {', '.join(variants)} (DoRA is one)"
    if kinds is None:
        return "with its options no style suits the factors of its adapter"
    rules = {}
    for factor, (style, options) in zip(_FACTORS, kinds, strict=True):
        for name in getattr(layer, factor):
            rules[f"{path}.{factor}.{name}"] = replace(
                rule, style=style, options=FrozenMap(options)
            )
    return rules
