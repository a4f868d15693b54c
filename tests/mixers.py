"""State-space mixers in code of their own, by channels and by heads, in layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, INNER, STATE, STEPS = 16, 32, 4, 6
HEADS, WIDE = 8, 4


def scanned(x: torch.Tensor, keep: torch.Tensor, write: torch.Tensor, read: torch.Tensor) -> Any:
    """A state for each of the last dimensions of ``x`` (batch, sequence, ...), read out."""
    state, out = torch.zeros_like(write[:, 0]), []
    for t in range(x.size(1)):
        state = keep[:, t] * state + write[:, t]
        out.append((state * read[:, t]).sum(-1))
    return torch.stack(out, 1)


class ByChannels(nn.Module):
    """A state for each channel; step sizes, what is written and what is read come of all."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 2 * INNER)
        self.blur = nn.Conv1d(INNER, INNER, 3, groups=INNER, padding=2)
        self.dial = nn.Linear(INNER, STEPS + 2 * STATE)
        self.pace = nn.Linear(STEPS, INNER)
        self.decay = nn.Parameter(torch.randn(INNER, STATE))
        self.skip = nn.Parameter(torch.randn(INNER))
        self.back = nn.Linear(INNER, WIDTH)

    def blurred(self, x: torch.Tensor) -> torch.Tensor:
        """By the module itself."""
        out: torch.Tensor = self.blur(x.mT)[..., : x.size(1)].mT
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, z = self.wide(x).chunk(2, -1)
        y = F.silu(self.blurred(y))
        steps, write, read = self.dial(y).split([STEPS, STATE, STATE], -1)
        pace = F.softplus(self.pace(steps))[..., None]
        keep = torch.exp(-pace * self.decay.exp())
        made = scanned(y, keep, pace * write[..., None, :] * y[..., None], read[..., None, :])
        return self.ended((made + self.skip * y) * F.silu(z))

    def ended(self, y: torch.Tensor) -> torch.Tensor:
        """The last product."""
        out: torch.Tensor = self.back(y)
        return out


class Fusing(ByChannels):
    """In training it calls a function with its last layer's weight instead of the layer."""

    def ended(self, y: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().ended(y)
        return F.linear(y, self.back.weight, self.back.bias)


class Reading(ByChannels):
    """Reads what its convolution holds, instead of calling it."""

    def blurred(self, x: torch.Tensor) -> torch.Tensor:
        x, weight = x.mT, self.blur.weight
        return F.conv1d(x, weight, self.blur.bias, padding=2, groups=x.size(1))[..., :-2].mT


class Gated(nn.Module):
    """An RMSNorm of what is gated, of all columns or of groups."""

    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(HEADS * WIDE))
        self.parts = groups

    def forward(self, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        x = (x * F.silu(by)).unflatten(-1, (self.parts, -1))
        return (x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).flatten(-2) * self.factor


class ByHeads(nn.Module):
    """A state for each head; what is written and what is read is for all heads."""

    def __init__(self, norm: Callable[[], nn.Module] = Gated) -> None:
        super().__init__()
        self.amount, self.inner = HEADS, HEADS * WIDE
        self.wide = nn.Linear(WIDTH, 2 * self.inner + 2 * STATE + HEADS)
        mixed = self.inner + 2 * STATE
        self.blur = nn.Conv1d(mixed, mixed, 3, groups=mixed, padding=2)
        self.decay = nn.Parameter(torch.randn(HEADS))
        self.skip = nn.Parameter(torch.randn(HEADS))
        self.register_buffer("gain", torch.rand(HEADS) + 0.5)
        self.level = norm()
        self.back = nn.Linear(self.inner, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sizes = [self.inner, self.inner + 2 * STATE, self.amount]
        z, mixed, steps = self.wide(x).split(sizes, -1)
        mixed = F.silu(self.blur(mixed.mT)[..., : x.size(1)].mT)
        y, write, read = mixed.split([self.inner, STATE, STATE], -1)
        y, pace = y.unflatten(-1, (self.amount, -1)), F.softplus(steps * self.gain)
        keep = torch.exp(-pace * self.decay.exp())[..., None, None]
        written = (pace[..., None] * y)[..., None] * write[..., None, None, :]
        made = scanned(y, keep, written, read[..., None, None, :])
        made = made + self.skip[:, None] * y
        out: torch.Tensor = self.back(self.level(made.flatten(-2), z))
        return out


class ByGroups(nn.Module):
    """A state for each head; what is written and what is read is for a group of heads."""

    def __init__(self, groups: int = 4) -> None:
        super().__init__()
        self.amount, self.inner, self.groups = HEADS, HEADS * WIDE, groups  # as a Conv1d has groups
        self.shared = groups * STATE
        self.mixed = self.inner + 2 * self.shared
        self.wide = nn.Linear(WIDTH, self.inner + self.mixed + HEADS)
        self.blur = nn.Conv1d(self.mixed, self.mixed, 3, groups=self.mixed, padding=2)
        self.decay = nn.Parameter(torch.randn(HEADS))
        self.back = nn.Linear(self.inner, WIDTH)

    def of_heads(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(-1, (self.groups, -1))
        return x.repeat_interleave(self.amount // self.groups, 2)[..., None, :]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z, mixed, steps = self.wide(x).split([self.inner, self.mixed, self.amount], -1)
        mixed = F.silu(self.blur(mixed.mT)[..., : x.size(1)].mT)
        y, write, read = mixed.split([self.inner, self.shared, self.shared], -1)
        y, pace = y.unflatten(-1, (self.amount, -1)), F.softplus(steps)
        keep = torch.exp(-pace * self.decay.exp())[..., None, None]
        written = (pace[..., None] * y)[..., None] * self.of_heads(write)
        made = scanned(y, keep, written, self.of_heads(read))
        out: torch.Tensor = self.back(made.flatten(-2) * z)
        return out


class Opened(nn.Module):
    """A sum that is let through by what came of the input of this token and of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.back = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.gate, self.mix = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.lerp(F.pad(x, (0, 0, 1, -1)), x, self.mix)
        return self.ended(self.back(self.key(x).relu().square()), self.gate(x).sigmoid())

    def ended(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """What is done with the sum."""
        return gate * y


class Layer(nn.Module):
    """A norm and a mixer, added to the stream."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(WIDTH), mixer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.mixer(self.norm(x))
        return out


_AROUND = {"layers.*.norm": "sequence_parallel", "layers.*.mixer.back": "rowwise"}
CHANNELS: Mapping[str, Any] = {
    **_AROUND,
    "layers.*.mixer": {"style": "attention", "gather": ["x"]},
    "layers.*.mixer.wide": {"style": "colwise", "packed": ["y", "z"]},
    "layers.*.mixer.blur": "colwise",
    "layers.*.mixer.dial": {"style": "rowwise", "output": "inside"},
    "layers.*.mixer.pace": "colwise",
    "layers.*.mixer.{decay,skip}": "colwise",
}
OPENED: Mapping[str, Any] = {
    **_AROUND,
    "layers.*.mixer": {"style": "attention", "reduce": "here"},
    "layers.*.mixer.key": "colwise",
    "layers.*.mixer.gate": "replicate",
    "layers.*.mixer.mix": "replicate",
}
READING = {k: v for k, v in CHANNELS.items() if k != "layers.*.mixer.blur"}
READING |= {"layers.*.mixer.blur.{weight,bias}": "colwise"}
_MIXED = {"x": ["amount", WIDE], "write": [1, STATE], "read": [1, STATE]}
BY_HEADS: Mapping[str, Any] = {
    **_AROUND,
    "layers.*.mixer": {
        "style": "attention",
        "heads": "amount",
        "gather": ["x"],
        "attributes": {"amount": "heads", "inner": "inner // tp"},
    },
    "layers.*.mixer.wide": {
        "style": "colwise",
        "packed": {"z": ["amount", WIDE], **_MIXED, "steps": ["amount", 1]},
    },
    "layers.*.mixer.blur": {"style": "colwise", "packed": _MIXED},
    "layers.*.mixer.{decay,skip,gain}": "colwise",
    "layers.*.mixer.level": "colwise",
}
