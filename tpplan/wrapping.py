"""What peft puts around a model and its layers, and what is called how since.

peft puts a layer of its own around each that it adapts, and itself around the model, so that
``model.layers.0.self_attn.q_proj`` is ``base_model.model.model.layers.0.self_attn.q_proj`` and
its weight is in a ``base_layer``. peft is not imported: where a model has adapters, it is there.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

_TUNERS = "peft.tuners.tuners_utils"


@dataclass(frozen=True)
class Wrapping:
    """What peft put around the modules of a model.

    Attributes:
        names: the path of each module -> what it is called in the model that was adapted.
        held: the path of a module of peft's -> what now stands where it does.
        layers: the paths of layers that adapters were added to; of them it depends on the style
            whether a rule is for the layer or for what it holds, of others it is for the latter.
        own: the paths of modules that are peft's, and of all in them that it added.
    """

    names: Mapping[str, str]
    held: Mapping[str, tuple[str, ...]]
    layers: frozenset[str]
    own: frozenset[str]

    def called(self, path: str) -> tuple[str, ...]:
        """What a pattern may call a module: by its path, or as the model did that was adapted."""
        name = self.names.get(path, path)
        return (path,) if path in self.inner or name == path else (path, name)

    def before(self, name: str) -> str | None:
        """What the model that was adapted calls a parameter or buffer; None of an adapter's own."""
        path, _, leaf = name.rpartition(".")
        return None if path in self.own else f"{self.names.get(path, path)}.{leaf}".lstrip(".")

    @functools.cached_property
    def inner(self) -> frozenset[str]:
        """What stands where a module of peft's does, which is matched for both."""
        return frozenset(path for paths in self.held.values() for path in paths)


_UNWRAPPED = Wrapping({}, {}, frozenset(), frozenset())


def wrapping_of(model: nn.Module) -> Wrapping:
    """What is wrapped where in a model; in one that peft did not adapt, nothing."""
    names: dict[str, str] = {}
    held: dict[str, tuple[str, ...]] = {}
    layers, own = set(), set()
    if "peft" not in sys.modules:
        return _UNWRAPPED
    inner: dict[str, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        around, _, leaf = path.rpartition(".")
        outer = names.get(around, around)
        names[path] = inner.get(path, f"{outer}.{leaf}".lstrip("."))
        paths = tuple(f"{path}.{name}".lstrip(".") for name in _holds(module))
        if paths:
            held[path] = paths
            inner.update(dict.fromkeys(paths, names[path]))
        if paths or (around in own and path not in inner):
            own.add(path)
        if _is_layer(module):
            layers.add(path)
    return Wrapping(names, held, frozenset(layers), frozenset(own)) if held else _UNWRAPPED


def adapted_model(model: nn.Module) -> nn.Module:
    """The model that peft put itself around; any other is given back as it is."""
    while not _is_layer(model) and len(held := _holds(model)) == 1:
        model = model.get_submodule(held[0])
    return model


def _is_layer(module: nn.Module) -> bool:
    tuners: Any = sys.modules.get(_TUNERS)
    return tuners is not None and isinstance(module, tuners.BaseTunerLayer)


def _holds(module: nn.Module) -> tuple[str, ...]:
    """Where a module of peft's has what was at its place."""
    peft: Any = sys.modules.get("peft")
    if peft is None:
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
