"""What is given all rows where the sequence is cut, and norms that count their heads."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tpplan
from tests.planner.helpers import Stack
from tests.suggestion.test_suggest import rules

WIDTH, HEADS = 16, 4
INPUTS = {"x": torch.randn(2, 8, WIDTH)}


class Running(nn.Module):
    """A sum over the positions before, of what its own parameter makes of them; with the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.norm = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = torch.einsum("bsd,de->bse", x, self.w).cumsum(1).tanh()
        return self.norm(x + made) - x  # type: ignore[no-any-return]


class Chosen(nn.Module):
    """Which positions concern which, for all heads alike."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.own(x).unflatten(-1, (2, 4)).unbind(-2)
        chosen = (left @ right.mT) > 0
        return (chosen | torch.eye(x.shape[1], dtype=torch.bool))[:, None]


class Attention(nn.Module):
    """All heads are told what concerns what."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.chosen = Chosen()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (m(x).unflatten(-1, (-1, 4)).transpose(1, 2) for m in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, self.chosen(x))
        made: torch.Tensor = self.out(y.transpose(1, 2).flatten(2))
        return made


class HeadNorm(nn.Module):
    """Of each head, which it counts; its weight is as wide as all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.count = nn.Parameter(torch.ones(WIDTH)), HEADS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-2] != self.count:
            raise ValueError(f"{x.shape[-2]} heads, not {self.count}")
        return F.layer_norm(x, x.shape[-1:]).flatten(-2) * self.weight


class Memory(nn.Module):
    """Sums over the positions before, by heads."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.v, self.gate, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.pace, self.norm, self.count = nn.Linear(WIDTH, HEADS), HeadNorm(), HEADS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], self.count, WIDTH // HEADS)
        k, v = self.k(x).reshape(shape), self.v(x).reshape(shape)
        held = (k * v * self.pace(x).sigmoid()[..., None]).cumsum(1)
        made: torch.Tensor = self.out(self.norm(held) * self.gate(x).sigmoid())
        return made


class Layer(nn.Module):
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.before, self.after, self.mixer = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), mixer
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mixer(self.before(x))
        made: torch.Tensor = x + self.down(F.gelu(self.up(self.after(x))))
        return made


MIXERS: dict[type[nn.Module], dict[str, object]] = {
    Running: {"": {"style": "replicate", "input": "gather"}},
    Attention: {"": {"style": "attention", "gather": ["x"]}, ".out": "rowwise"},
    Memory: {
        "": {"style": "attention", "gather": ["x"], "attributes": {"count": "count // tp"}},
        ".out": "rowwise",
    },
}


@pytest.mark.turns(12)
@pytest.mark.parametrize("mixer", MIXERS)
def test_with_and_without_the_sequence_cut(mixer: type[nn.Module]) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return Stack(lambda _: Layer(mixer()))

    plan = tpplan.suggest(model(), 2, INPUTS)
    found = rules(plan)
    assert {path: found.get(f"layers.*.mixer{path}") for path in MIXERS[mixer]} == MIXERS[mixer], (
        plan.text
    )
    for sequence_parallel in (False, True):
        tpplan.verify(model, plan, 4, sequence_parallel=sequence_parallel, inputs=INPUTS)
