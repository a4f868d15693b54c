"""The models, their plans, and calls of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.outside import nanogpt

VOCAB = 131
Call = Mapping[str, Any]


@dataclass(frozen=True)
class Outside:
    """A model as a user brings it.

    Attributes:
        make: the model with its own initial weights.
        plan: the plan that the user writes, or a shipped one.
        call: keyword arguments of a batch, a length and a seed.
    """

    make: Callable[[], nn.Module]
    plan: str | Mapping[str, Any]
    call: Callable[[int, int, int], Call]


def ids_of(batch: int, length: int, seed: int) -> torch.Tensor:
    """Random tokens."""
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def _nanogpt(batch: int, length: int, seed: int) -> Call:
    ids = ids_of(batch, length, seed)
    return {"idx": ids, "targets": ids.roll(-1, 1)} if seed % 2 else {"idx": ids}


MODELS: Mapping[str, Outside] = {
    "nanoGPT": Outside(lambda: nanogpt.GPT(nanogpt.GPTConfig()), "auto", _nanogpt),
    "nanoGPT without flash, biases": Outside(
        lambda: nanogpt.GPT(nanogpt.GPTConfig(bias=False), flash=False), "nanogpt.yaml", _nanogpt
    ),
}
