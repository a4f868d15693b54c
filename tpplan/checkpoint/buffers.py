"""Buffers that are in no checkpoint, of a model on the meta device."""

from __future__ import annotations

import copy
from collections.abc import Container, Mapping

import torch
from torch import nn


def recomputed(
    model: nn.Module, left: Container[str] = ()
) -> tuple[Mapping[str, torch.Tensor], list[str]]:
    """Values of the buffers that ``state_dict`` leaves out, and the names of those without.

    Models of transformers know how to make theirs (rotary frequencies, causal masks): each of the
    modules that hold such is initialized as they do it, twice, from different numbers; what is
    the same both times was computed. ``left``: those that ``state_dict`` has and no file does.
    """
    kept = model.state_dict(keep_vars=True)
    values: dict[str, torch.Tensor] = {}
    lost: list[str] = []
    for path, module in model.named_modules():
        names = {
            name: f"{path}.{name}".lstrip(".")
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.is_meta
        }
        names = {name: full for name, full in names.items() if full not in kept or full in left}
        found = _initialized(model, module) if names else {}
        for name, full in names.items():
            if name in found:
                values[full] = found[name]
            else:
                lost.append(full)
    return values, lost


def _initialized(model: nn.Module, module: nn.Module) -> Mapping[str, torch.Tensor]:
    """What the model's own initialization makes of a module's buffers; it stays as it is."""
    initialize = getattr(model, "_init_weights", None)
    if initialize is None:
        return {}
    made = []
    for number in (0, 1):
        twin = copy.copy(module)
        blank = {
            name: None if b is None else torch.full_like(b, number, device="cpu")
            for name, b in module._buffers.items()
        }
        # it draws for parameters as well, which are not to change
        spare = {
            name: None if p is None else nn.Parameter(torch.empty(p.shape, device="meta"))
            for name, p in module._parameters.items()
        }
        object.__setattr__(twin, "_buffers", blank)
        object.__setattr__(twin, "_parameters", spare)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            initialize(twin)
        made.append(blank)
    first, second = made
    return {
        name: b
        for name, b in first.items()
        if b is not None and torch.equal(b, second[name])  # type: ignore[arg-type]
    }
