"""Dropout of whole channels: how many random numbers it draws."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

# fewer dimensions than these have no batch
_BATCHED: Mapping[Any, int] = {
    F.dropout1d: 3,
    F.dropout2d: 0,
    F.dropout3d: 5,
    F.feature_alpha_dropout: 0,
    torch.feature_dropout: 0,
    torch.feature_dropout_: 0,
    torch.feature_alpha_dropout: 0,
    torch.feature_alpha_dropout_: 0,
}
CHANNELS = frozenset(_BATCHED)
_MODULES: Mapping[type[nn.Module], Any] = {
    nn.Dropout1d: F.dropout1d,
    nn.Dropout2d: F.dropout2d,
    nn.Dropout3d: F.dropout3d,
    nn.FeatureAlphaDropout: F.feature_alpha_dropout,
}


def function_of(dropout: nn.Module) -> Any:
    """What a module of torch's calls, of those that drop whole channels out."""
    return next((f for kind, f in _MODULES.items() if isinstance(dropout, kind)), None)


def drawn_by(function: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of what a dropout of so much draws: 1 along what is dropped out as one."""
    if function not in CHANNELS:
        return shape
    leading = 2 if len(shape) >= _BATCHED[function] else 1
    return shape[:leading] + (1,) * len(shape[leading:])
