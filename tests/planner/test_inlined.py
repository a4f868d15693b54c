"""Attention in a block's own code: its numbers are found, or the first error says what to write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tpplan

WIDTH, HEADS = 32, 4
INPUT = {"x": torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(0))}
RULES = {
    "layers.*.before": "sequence_parallel",
    "layers.*.{one,two,three}": "colwise",
    "layers.*.last": "rowwise",
}


class Block(nn.Module):
    """Attention without a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.wide = HEADS, WIDTH
        self.before = nn.LayerNorm(WIDTH)
        self.one, self.two, self.three, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def sizes(self, x: torch.Tensor) -> tuple[int, int]:
        """The width of a head, and of all."""
        return -1, -1

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        head, wide = self.sizes(x)
        b, n = x.shape[:2]
        q, k, v = (
            f(x).view(b, n, self.parts, head).transpose(1, 2)
            for f in (self.one, self.two, self.three)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.last(y.transpose(1, 2).reshape(b, n, wide))  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attend(self.before(x))


class OfAttributes(Block):
    def sizes(self, x: torch.Tensor) -> tuple[int, int]:
        return WIDTH // HEADS, self.wide


class OfInput(Block):
    def sizes(self, x: torch.Tensor) -> tuple[int, int]:
        return x.shape[-1] // self.parts, x.shape[-1]


class Model(nn.Module):
    def __init__(self, kind: type[Block]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def plan() -> dict[str, Any]:
    return {"tpplan": 1, "rules": RULES}


def refused(kind: type[Block], sequence_parallel: bool) -> str:
    with pytest.raises(tpplan.PlanError) as caught:
        tpplan.check(Model(kind), plan(), 2, sequence_parallel, inputs=INPUT)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "own"),
    [(Block, {"parts": (4, 2)}), (OfAttributes, {"parts": (4, 2), "wide": (32, 16)})],
)
def test_its_numbers_are_found(kind: type[Block], own: dict[str, tuple[int, int]]) -> None:
    compiled = tpplan.check(Model(kind), plan(), 2, False, inputs=INPUT)
    assert dict(compiled.modules["layers.1"].attributes) == own
    result = tpplan.verify(Model(kind), plan(), tp=2, sequence_parallel=False, inputs=INPUT)
    assert result.gradient_error < 1e-5


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_width_taken_from_the_input(sequence_parallel: bool) -> None:
    text = refused(OfInput, sequence_parallel)
    assert "from the width of what layers.*.before (3 of them) gives, which is whole" in text
    assert "and parts made a rank's own" in text
    cure = "in a module of its own" if sequence_parallel else "Take it from what layers.*.one"
    assert cure in text


@pytest.mark.parametrize("kind", [Block, OfAttributes])
def test_rows_of_the_sequence(kind: type[Block]) -> None:
    text = refused(kind, True)
    assert "the code of layers.* has a rank's rows of the sequence" in text
    assert "make the stack of what runs on rows there, 'layers: layers.*.before'" in text
    with pytest.raises(tpplan.VerificationError, match="make the stack of what runs on rows"):
        tpplan.verify(Model(kind), plan(), tp=2, sequence_parallel=True, inputs=INPUT)


def test_without_norms() -> None:
    """There is nothing to make a stack of."""
    without = {"tpplan": 1, "rules": {**RULES, "layers.*.before": "replicate"}}
    with pytest.raises(tpplan.PlanError, match="in a module of its own"):
        tpplan.check(Model(Block), without, 2, True, inputs=INPUT)
