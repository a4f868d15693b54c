"""A small mixture whose experts are modules in a list, as code of one's own has it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, INNER, EXPERTS = 16, 32, 8
RULES = {
    "a": "replicate",
    "b.*.n": "sequence_parallel",
    "b.*.m": {"style": "attention", "reduce": "here"},
    "b.*.m.r": "replicate",
    "b.*.m.e.*.[xy]": "colwise",
    "b.*.m.e.*.z": "rowwise",
    "c": "replicate",
}


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x, self.y = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
        self.z = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.z(F.silu(self.x(t)) * self.y(t))
        return out


class Mixture(nn.Module):
    """Each token goes to two experts; those without tokens are not called."""

    def __init__(self) -> None:
        super().__init__()
        self.r = nn.Linear(WIDTH, EXPERTS)
        self.e = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.loss: torch.Tensor | None = None

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        tokens = t.reshape(-1, WIDTH)
        shares = self.r(tokens).softmax(-1)
        weights, chosen = shares.topk(2, -1)
        self.loss = (shares.mean(0) * F.one_hot(chosen, EXPERTS).float().mean((0, 1))).sum()
        out = torch.zeros_like(tokens)
        for number in chosen.unique().tolist():
            rows, which = torch.where(chosen == number)
            given = self.e[number](tokens[rows]) * weights[rows, which, None]
            out = out.index_add(0, rows, given)
        return out.view_as(t)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n, self.m = nn.LayerNorm(WIDTH), Mixture()

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = t + self.m(self.n(t))
        return out


class Model(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.ModuleList(Block() for _ in range(layers))
        self.c = nn.Linear(WIDTH, 4)

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        t = self.a(t)
        for block in self.b:
            t = block(t)
        out: torch.Tensor = self.c(t)
        return out


def plan(sp: bool) -> dict[str, Any]:
    return {"tpplan": 1, "sequence_parallel": sp, "layers": "b.*", "rules": RULES}
