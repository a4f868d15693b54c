"""Models with peft's adapters: rules name the modules of the model that was adapted.

peft puts a layer of its own around each that it adapts, and itself around the model, so that
``model.layers.0.self_attn.q_proj`` is ``base_model.model.model.layers.0.self_attn.q_proj`` and
its weight is in a ``base_layer``. What becomes of LoRA's two factors follows from the style of
the layer they are added to. peft is not imported: where a model has adapters, it is there.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from tpplan.language import FrozenMap, Rule
from tpplan.styles import named

_FACTORS = "lora_A", "lora_B"
_TUNERS, _LORA = "peft.tuners.tuners_utils", "peft.tuners.lora.layer"


@dataclass(frozen=True)
class Wrapping:
    """What peft put around the modules of a model.

    Attributes:
        names: the path of each module -> what it is called in the model that was adapted.
        held: the path of a module of peft's -> what now stands where it does.
        layers: the paths of layers that adapters were added to; of them it depends on the style
            whether a rule is for the layer or for what it holds, of others it is for the latter.
    """

    names: Mapping[str, str]
    held: Mapping[str, tuple[str, ...]]
    layers: frozenset[str]

    def called(self, path: str) -> tuple[str, ...]:
        """What a pattern may call a module: by its path, or as the model did that was adapted."""
        name = self.names.get(path, path)
        return (path,) if path in self.inner or name == path else (path, name)

    @functools.cached_property
    def inner(self) -> frozenset[str]:
        """What stands where a module of peft's does, which is matched for both."""
        return frozenset(path for paths in self.held.values() for path in paths)


def wrapping_of(model: nn.Module) -> Wrapping:
    """What is wrapped where in a model; in one that peft did not adapt, nothing."""
    names: dict[str, str] = {}
    held: dict[str, tuple[str, ...]] = {}
    layers = set()
    if "peft" not in sys.modules:
        return Wrapping(names, held, frozenset())
    inner: dict[str, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        around, _, leaf = path.rpartition(".")
        outer = names.get(around, around)
        names[path] = inner.get(path, f"{outer}.{leaf}".lstrip("."))
        paths = tuple(f"{path}.{name}".lstrip(".") for name in _holds(module))
        if paths:
            held[path] = paths
            inner.update(dict.fromkeys(paths, names[path]))
        if _is_layer(module):
            layers.add(path)
    return Wrapping(names, held, frozenset(layers)) if held else Wrapping({}, {}, frozenset())


def adapted_model(model: nn.Module) -> nn.Module:
    """The model that peft put itself around; any other is given back as it is."""
    while not _is_layer(model) and len(held := _holds(model)) == 1:
        model = model.get_submodule(held[0])
    return model


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


def _is_layer(module: nn.Module) -> bool:
    tuners: Any = sys.modules.get(_TUNERS)
    return tuners is not None and isinstance(module, tuners.BaseTunerLayer)


def _holds(module: nn.Module) -> tuple[str, ...]:
    """Where a module of peft's has what was at its place."""
    peft: Any = sys.modules.get("peft")
    if peft is None or not type(module).__module__.startswith("peft."):
        return ()
    if isinstance(module, peft.PeftModel):
        return ("base_model",)
    if isinstance(module, peft.tuners.tuners_utils.BaseTuner):
        return ("model",)
    if _is_layer(module):
        return ("base_layer",)
    if isinstance(module, peft.utils.other.ModulesToSaveWrapper):
        kept = (f"modules_to_save.{name}" for name in module.modules_to_save)
        return ("original_module", *kept)
    return ()
