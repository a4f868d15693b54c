"""Low-rank factors as bare parameters beside a projection, as people write LoRA by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tpplan
from tests.planner.helpers import INNER, WIDTH, Layer, Stack, plan, refused, stream, wrong


class Adapted(nn.Module):
    """A projection, and the product of two small matrices beside it."""

    def __init__(self, size: int, out: int, rank: int = 3) -> None:
        super().__init__()
        self.base = nn.Linear(size, out)
        self.A = nn.Parameter(torch.randn(rank, size))
        self.B = nn.Parameter(torch.randn(out, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.A.T @ self.B.T * 0.5


class Transposed(Adapted):
    """The same with its factors stored the other way round."""

    def __init__(self, size: int, out: int, rank: int = 3) -> None:
        super().__init__(size, out, rank)
        self.A = nn.Parameter(torch.randn(size, rank))
        self.B = nn.Parameter(torch.randn(rank, out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.add(x @ self.A @ self.B, self.base(x), alpha=1)


class Gated(Layer):
    """An MLP, and another one of which every projection is adapted."""

    def __init__(self, kind: type[Adapted] = Adapted) -> None:
        super().__init__()
        self.up, self.gate = kind(WIDTH, INNER), kind(WIDTH, INNER)
        self.down = kind(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        x = super().forward(x)
        return x + self.down(self.up(x) * self.gate(x).sigmoid())


RULES = {
    "layers.*.{up,gate}.base": "colwise",
    "layers.*.{up,gate}.A": "replicate",
    "layers.*.{up,gate}.B": "colwise",
    "layers.*.down.base": "rowwise",
    "layers.*.down.A": "rowwise",
    "layers.*.down.B": "replicate",
}
TURNED = {
    **RULES,
    "layers.*.{up,gate}.B": {"style": "colwise", "dim": 1},
    "layers.*.down.A": {"style": "rowwise", "dim": 0},
}


@pytest.mark.parametrize("sp", [False, True], ids=["TP", "TP+SP"])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("kind", [Adapted, Transposed])
@pytest.mark.turns(12)
def test_bare_factors(kind: type[Adapted], tp: int, sp: bool) -> None:
    rules = RULES if kind is Adapted else TURNED
    assert not wrong(Stack(lambda _: Gated(kind)), rules, sp, tp)


def test_what_enters_is_gathered_once() -> None:
    compiled = tpplan.check(Stack(lambda _: Gated()), plan(RULES), 2, inputs=stream(8).float())
    entered = [p.path for p in compiled.modules.values() if p.boundaries]
    assert not any(path.endswith(".base") for path in entered)
    assert compiled.parameter("layers.0.up.A").summed
    assert compiled.modules["layers.0.down.base"].partial


def test_the_factor_that_makes_columns_is_named() -> None:
    rules = {**RULES, "layers.*.{up,gate}.B": "replicate"}
    said = refused(Stack(lambda _: Gated()), rules, False)
    first = said.partition("error:")[2].partition("error:")[0]
    assert "layers.*.up: combines sharded activations with what it makes of layers.*.up.B" in first
    assert "give layers.*.up.B the style colwise" in first
