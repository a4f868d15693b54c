"""Stacked experts of many layouts, each in code of its own, and blocks around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, INNER, EXPERTS = 12, 8, 4


class Experts(nn.Module):
    """Sums over the chosen experts what ``expert`` makes of the rows that chose it."""

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in chosen.unique():
            rows, places = torch.where(chosen == expert)
            made = self.expert(x[rows], expert) * factors[rows, places, None]
            out = out.index_add(0, rows, made.to(out.dtype))
        return out

    def expert(self, x: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def stacked(*size: int) -> nn.Parameter:
    """A parameter for all experts."""
    return nn.Parameter(torch.randn(EXPERTS, *size) / size[-1] ** 0.5)


class Packed(Experts):
    """Gate, then up, in one weight (E, 2I, H); down is (E, H, I)."""

    def __init__(self, width: int = WIDTH, inner: int = INNER) -> None:
        super().__init__()
        self.wide, self.narrow = stacked(2 * inner, width), stacked(width, inner)

    def expert(self, x: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(x, self.wide[expert]).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.narrow[expert])


class HandingThrough(Packed):
    """Two experts more, which give what they are given: only one weight has a place for them."""

    def __init__(self, width: int = WIDTH, inner: int = INNER) -> None:
        super().__init__(width, inner)
        more = torch.zeros(2, 2 * inner, width)
        self.wide = nn.Parameter(torch.cat([self.wide.detach(), more]))

    def expert(self, x: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        return super().expert(x, expert) if expert < EXPERTS else x


class InTurns(Experts):
    """Gate and up in turns, transposed, with biases on both sides."""

    def __init__(self, width: int = WIDTH, inner: int = INNER) -> None:
        super().__init__()
        self.wide, self.narrow = stacked(width, 2 * inner), stacked(inner, width)
        self.wide_bias, self.narrow_bias = stacked(2 * inner), stacked(width)

    def expert(self, x: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        y = x @ self.wide[expert] + self.wide_bias[expert]
        y = y[:, ::2].clamp(max=7.0) * y[:, 1::2].sigmoid()
        return y @ self.narrow[expert] + self.narrow_bias[expert]


class Apart(Experts):
    """Gate and up in weights of their own, the number of inner columns in the code."""

    def __init__(self, width: int = WIDTH, inner: int = INNER) -> None:
        super().__init__()
        self.gate, self.up = stacked(inner, width), stacked(inner, width)
        self.down = stacked(inner, width)
        self.columns = inner

    def expert(self, x: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        gate, up = (F.linear(x, w[expert]).view(-1, self.columns) for w in (self.gate, self.up))
        return (gate.sigmoid() * up) @ self.down[expert]


class Plain(Experts):
    """No gate."""

    def __init__(self, width: int = WIDTH, inner: int = INNER) -> None:
        super().__init__()
        self.up, self.down = stacked(inner, width), stacked(width, inner)

    def expert(self, x: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(x, self.up[expert]).relu().square(), self.down[expert])


class Scaled(Plain):
    """Normalises over the inner columns, of which no rank has all."""

    def expert(self, x: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.up[expert]).relu()
        return F.linear(y / (1 + y.sum(-1, keepdim=True)), self.down[expert])


class Grouped(nn.Module):
    """Sorts the rows by their expert and multiplies all groups at once."""

    def __init__(self, width: int = WIDTH, inner: int = INNER) -> None:
        super().__init__()
        self.up, self.down = stacked(inner, width), stacked(width, inner)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        experts, order = chosen.flatten().sort(stable=True)
        ends = torch.histc(experts.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0).int()
        rows = order // chosen.size(1)
        wide = F.grouped_mm(x[rows], self.up.transpose(1, 2), offs=ends).relu()
        made = F.grouped_mm(wide, self.down.transpose(1, 2), offs=ends)
        weighed = made * factors.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, rows, weighed.to(x.dtype))


LAYOUTS: Mapping[str, Callable[..., Experts]] = {
    "packed": Packed,
    "in turns": InTurns,
    "apart": Apart,
    "plain": Plain,
}


class Block(nn.Module):
    """Routes each token to two experts; an MLP beside them for all tokens.

    Attributes:
        last: what is done with the sum in the end.
        hidden: what the router gave is told to nobody, but kept.
    """

    last: Callable[[torch.Tensor], torch.Tensor] = staticmethod(lambda x: x)

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        count = max(p.shape[0] for p in experts.parameters())
        self.router, self.experts = nn.Linear(WIDTH, count, bias=False), experts
        self.up = nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = x.reshape(-1, x.size(-1))
        scores = self.router(rows)
        factors, chosen = scores.softmax(-1).topk(2)
        y = self.experts(rows, chosen, factors).view_as(x) + self.down(self.up(x).relu())
        return self.last(y), scores


class Layer(nn.Module):
    """A norm and a block, added to the stream."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.norm, self.block = nn.LayerNorm(WIDTH), block

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, scores = self.block(self.norm(x))
        return x + y, scores


class Model(nn.Module):
    """Layers, and a loss that wants all experts to be chosen."""

    def __init__(self, make: Callable[[], Block], layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(make()) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        balance = x.new_zeros(())
        for layer in self.layers:
            x, scores = layer(x)
            balance = balance + scores.softmax(-1).mean(0).square().sum()
        return x, balance


RULES = {
    "layers.*.norm": "sequence_parallel",
    "layers.*.block.router": "replicate",
    "layers.*.block.experts": "experts",
    "layers.*.block.up": "colwise",
    "layers.*.block.down": "rowwise",
}
PLAN = {"tpplan": 1, "sequence_parallel": True, "rules": RULES}


def model_of(layout: str) -> Model:
    """A model with experts of a layout."""
    torch.manual_seed(0)
    return Model(lambda: Block(LAYOUTS[layout]()))
