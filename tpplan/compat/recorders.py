"""The hooks with which transformers records what modules give out, where a call asks for it."""

from __future__ import annotations

import sys
from typing import Any

import torch

_MODULE = "transformers.utils.output_capturing"


def records_nothing(hook: Any) -> bool:
    """Whether a forward hook is such a one, and the call that runs asks for nothing of its kind.

    They stay on a model once one call asked for anything, and look at nothing in the others.
    """
    if getattr(hook, "__module__", None) != _MODULE or torch.compiler.is_compiling():
        return False
    active = getattr(sys.modules.get(_MODULE), "_active_collector", None)
    closure = getattr(hook, "__closure__", None)
    if active is None or closure is None:
        return False
    asked = active.get()
    names = dict(zip(hook.__code__.co_freevars, closure, strict=True))
    return asked is None or ("key" in names and names["key"].cell_contents not in asked)
