"""Models with meaningless names, with parts that cannot be sharded, and of random structure."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

ROWS, WIDTH, HEADS = 130, 32, 4


class Zig(nn.Module):
    """Grouped attention and a gated MLP side by side, in weights that hold several projections."""

    def __init__(self) -> None:
        super().__init__()
        self.a0 = nn.LayerNorm(WIDTH)
        self.a1 = nn.Linear(WIDTH, WIDTH + 2 * WIDTH // 2)
        self.a2 = nn.Linear(WIDTH, WIDTH, bias=False)
        self.a3 = nn.Linear(WIDTH, 2 * 48)
        self.a4 = nn.Linear(48, WIDTH)
        self.y, self.z = WIDTH, HEADS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a0(x)
        columns = self.a1(y)
        batch, length, _ = columns.shape
        q, k, v = columns.split([self.y, self.y // 2, self.y // 2], -1)
        q = q.view(batch, length, self.z, -1).transpose(1, 2)
        k, v = (t.view(batch, length, self.z // 2, -1).transpose(1, 2) for t in (k, v))
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        left, right = self.a3(y).chunk(2, -1)
        mixed = self.a4(left * right.sigmoid())
        return x + self.a2(heads.transpose(1, 2).reshape(batch, length, -1)) + mixed


class Short(nn.Module):
    """A short convolution between two gates, whose code reads another module's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.d0, self.d1 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.d2 = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH, bias=False)
        self.d3 = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before, after, y = self.d1(self.d0(x)).transpose(1, 2).chunk(3, 1)
        padded = F.pad(before * y, (2, 0))
        mixed = F.conv1d(padded, self.d2.weight, groups=padded.shape[1])
        return x + self.d3((after * mixed).transpose(1, 2))


class Sorted(nn.Module):
    """An MLP whose inner columns are sorted: no rank could do that with its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).sort(-1).values)


class Zag(nn.Module):
    """``Zig`` with such an MLP after it."""

    def __init__(self) -> None:
        super().__init__()
        self.b0, self.b1 = Zig(), Sorted()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.b0(x)
        return x + self.b1(x)


class Running(nn.Module):
    """A sum over the positions before, in the code of the layer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(self.up(x).relu())
        return x + x.cumsum(1).tanh()


class Model(nn.Module):
    """An embedding, a stack, a norm, a head tied to the embedding."""

    def __init__(self, kind: type[nn.Module] = Zig, skipping: bool = False) -> None:
        super().__init__()
        self.m0 = nn.Embedding(ROWS, WIDTH)
        self.m1 = nn.ModuleList(kind() for _ in range(2))
        self.m2 = nn.LayerNorm(WIDTH)
        self.m3 = nn.Linear(WIDTH, ROWS, bias=False)
        self.m3.weight = self.m0.weight
        self.skipping = skipping

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.m0(ids)
        for layer in self.m1:
            if self.skipping and self.training and torch.rand([]) < 0.5:
                continue
            x = layer(x)
        return self.m3(self.m2(x))


def made() -> nn.Module:
    """For the command line."""
    torch.manual_seed(0)
    return Model()


def random() -> nn.Module:
    """For the command line: one that skips layers in training."""
    return Model(skipping=True)
