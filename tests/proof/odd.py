"""Small models with one odd habit each, and whether a sharded one can do the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, INNER = 16, 32


class MLP(nn.Module):
    """A residual block; what it does in between is its habit's."""

    def __init__(self, number: int = 0, between: Any = None) -> None:
        super().__init__()
        self.number = number
        self.fc, self.out = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.between: Any = between or (lambda module, y: y.relu())

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.out(self.between(self, self.fc(x)))


class Stack(nn.Module):
    def __init__(self, make: Callable[[int], nn.Module], layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make(i) for i in range(layers))

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad / (grad.norm() + 1e-6)


class Clipped(torch.autograd.Function):
    """A gradient no larger than what any ordinary one is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad / (1 + (grad.norm() / 1e3 - 1).relu())


class Floored(Clipped):
    """One no smaller."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * (1 + (1e-2 / (grad.norm() + 1e-30) - 1).relu())


class Doubled(Clipped):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad.mul_(2)


class Each(Clipped):
    """Each number by itself."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return torch.where(grad.abs() > 1.0, grad.sign(), grad)


class Penalised(MLP):
    def forward(self, x: torch.Tensor) -> Any:
        y = self.fc(x).relu()
        return x + self.out(y), y.pow(2).mean()


class Summing(Stack):
    def forward(self, x: torch.Tensor) -> Any:
        total: Any = 0.0
        for layer in self.layers:
            x, part = layer(x)
            total = total + part
        return x, total


class Placed(MLP):
    """Adds what stands at each position; under sequence parallelism a rank has its own rows."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.register_buffer("table", torch.randn(64, WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x + self.table[: x.size(1)])  # type: ignore[index]


class Scaled(MLP):
    def forward(self, x: torch.Tensor) -> Any:
        return x + self.out(self.fc(x).relu()) * x.size(1) ** -0.5


class Running(MLP):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.register_buffer("mean", torch.ones(()))

    def forward(self, x: torch.Tensor) -> Any:
        y = self.fc(x)
        if self.training:
            self.mean.mul_(0.5).add_(0.5 * y.detach().abs().mean())  # type: ignore[operator]
        return x + self.out(y / self.mean)


class Filtered(MLP):
    """Multiplies spectra."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=WIDTH))


class Labelled(Stack):
    def forward(self, x: torch.Tensor, goal: torch.Tensor | None = None) -> Any:
        penalty: Any = 0.0
        for layer in self.layers:
            y = layer.fc(x).relu()  # type: ignore[operator, union-attr]
            penalty = penalty + y.pow(2).mean()
            x = x + layer.out(y)  # type: ignore[operator]
        return x if goal is None else (x - goal).pow(2).mean() + penalty


class Hooked(MLP):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.out.register_forward_pre_hook(lambda _, args: (F.normalize(args[0], dim=-1),))


def stack(between: Any) -> Callable[[], nn.Module]:
    """Two layers that do ``between`` on their columns."""
    return lambda: Stack(lambda i: MLP(i, between))


def clipped(module: MLP, y: torch.Tensor) -> torch.Tensor:
    """Only activations that are larger than any of N(0, 1)."""
    return y / (1 + (y.norm(dim=-1, keepdim=True) / 30 - 1).relu())


def dropped(module: MLP, y: torch.Tensor) -> torch.Tensor:
    """A dropout of its own."""
    return y * (torch.rand_like(y) > 0.1) if module.training else y


def centred(y: torch.Tensor) -> torch.Tensor:
    """A gradient that the forward does not show."""
    mean = y.relu().mean(-1, keepdim=True)
    return y.relu() + mean - mean.detach()


class Told(MLP):
    """Does what the model around it says, or what it counts."""

    calls = 0

    def forward(self, x: torch.Tensor, kind: str = "", seen: Any = None) -> Any:
        before = Told.calls if seen is None else len(seen)
        Told.calls += 1
        if seen is not None:
            seen.append(x)
        y = self.fc(x)
        odd = kind == "odd" or (not kind and before == 3)
        return x + self.out(y.softmax(-1) if odd else y.relu())


class Telling(Stack):
    """Says it by a word, by a list that is handed round, or starts the count."""

    def __init__(self, by: str) -> None:
        super().__init__(Told, 6)
        self.by = by

    def forward(self, x: torch.Tensor) -> Any:
        seen: list[Any] | None = [] if self.by == "list" else None
        Told.calls = 0
        for i, layer in enumerate(self.layers):
            kind = ("odd" if i == 3 else "even") if self.by == "word" else ""
            x = layer(x, kind, seen)
        return x


class Normed(MLP):
    """Behind a norm, which takes the size of what it is given away."""

    def forward(self, x: torch.Tensor) -> Any:
        return x + super().forward(F.layer_norm(x, (WIDTH,)))


def amplifying(module: MLP, y: torch.Tensor) -> torch.Tensor:
    """Of large numbers, rounding alone."""
    return (10 * y.pow(6)).sin()


def overflowing(module: MLP, y: torch.Tensor) -> torch.Tensor:
    """Of large numbers, none."""
    return y.cosh().pow(16)


class Before(MLP):
    """Computes with what it had in the step before, in training alone: of all columns, or rows."""

    def __init__(self, number: int, rows: bool = False) -> None:
        super().__init__(number)
        self.rows = rows
        self.kept: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        y = self.fc(x).relu()
        if self.training:
            seen, kept = x if self.rows else y, self.kept
            self.kept = seen.detach().pow(2).mean().sqrt() + 0.1
            y = y if kept is None else y / kept
        return x + self.out(y)


class Held(MLP):
    """Adds what it gave to a call as long as this one."""

    held: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        before, self.held = self.held, y.detach()
        return y if before is None or before.shape != y.shape else y + before


class Branching(MLP):
    """Asks how large the gradient of its rows is; of none it is as large."""

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda g: g if g.norm() < 1e9 else g / g.norm())
        return y


class Warmed(MLP):
    """Trains otherwise from the second step on."""

    steps = 0

    def forward(self, x: torch.Tensor) -> Any:
        y = self.fc(x).relu()
        self.steps += self.training
        return x + self.out(y.softmax(-1) if self.steps >= 2 else y)


class Ctx:
    """What layers hand round: it counts them, or is told which one asks."""

    count = 0

    def odd(self) -> bool:
        self.count += 1
        return self.count == 4

    def share(self, number: int, y: torch.Tensor) -> torch.Tensor:
        return y.mean(-1, keepdim=True) * (number == 3)


# what is added to a layer's columns, nothing but in the fourth layer: by what its ops are given
EXTRAS: dict[str, Callable[[Any, torch.Tensor, Any], torch.Tensor]] = {
    "number": lambda m, y, c: c.share(m.number, y),
    "factor": lambda m, y, c: y.mean(-1, keepdim=True) * float(c.odd()),
    "tensor": lambda m, y, c: y.mean(-1, keepdim=True) * torch.tensor(float(c.odd())),
    "new tensor": lambda m, y, c: y.mean(-1, keepdim=True) * y.new_tensor(float(c.odd())),
    "bound": lambda m, y, c: y.mean(-1, keepdim=True).clamp(max=5.0 if c.odd() else 0.0).relu(),
    "mask": lambda m, y, c: y.mean(-1, keepdim=True).masked_fill(torch.tensor(not c.odd()), 0.0),
    "weight": lambda m, y, c: torch.lerp(0 * y, y.mean(-1, keepdim=True), float(c.odd())),
}


def _weighed(module: Any, y: torch.Tensor, weight: Any) -> torch.Tensor:
    added: torch.Tensor = y.mean(-1, keepdim=True) * weight
    return added


class Sharing(MLP):
    """Adds the mean of its columns, by what it is handed."""

    def forward(self, x: torch.Tensor, ctx: Any = None) -> Any:
        y = self.fc(x).relu()
        return x + self.out(y + self.between(self, y, ctx))


class Handing(Stack):
    """Hands an object round, or a tensor of its own that is 0 to all layers but one."""

    def __init__(self, by: str) -> None:
        super().__init__(lambda i: Sharing(i, EXTRAS.get(by, _weighed)), 6)
        self.by = by
        self.register_buffer("one", torch.eye(6)[3])

    def forward(self, x: torch.Tensor) -> Any:
        ctx, made = Ctx(), torch.zeros(6)
        made[3] = 1.0
        for i, layer in enumerate(self.layers):
            handed = {
                "a buffer's": self.one[i],  # type: ignore[index]
                "a constant": torch.tensor(float(i == 3)),
                "written": made[i],
            }
            x = layer(x, handed.get(self.by, ctx))
        return x


class Checked(Stack):
    """Looks at the numbers that it is given."""

    def forward(self, x: torch.Tensor) -> Any:
        if not torch.isfinite(x).all():
            raise ValueError("not finite")
        return super().forward(x)


class Experts(nn.Module):
    """Experts in a loop, of which some get no token."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 12, bias=False)
        self.ex = nn.ModuleList(MLP() for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1)
        weight, chosen = self.gate(rows).softmax(-1).topk(2, -1)
        out = torch.zeros_like(rows)
        for i, expert in enumerate(self.ex):
            row, place = torch.where(chosen == i)
            out = out.index_add(0, row, expert(rows[row]) * weight[row, place, None])
        return x + out.view_as(x)


WRONG: dict[str, tuple[Callable[[], nn.Module], tuple[bool, ...]]] = {
    "only in training": (stack(lambda m, y: F.normalize(y, dim=-1) if m.training else y), (False,)),
    "only in evaluation": (stack(lambda m, y: y if m.training else y.softmax(-1)), (True,)),
    "only at other lengths": (
        stack(lambda m, y: y.softmax(-1) if y.size(1) > 8 else y.relu()),
        (False,),
    ),
    "only large numbers": (stack(clipped), (True,)),
    "only large numbers behind a norm": (
        lambda: Stack(lambda i: Normed(i, clipped)),
        (False, True),
    ),
    "columns of the last step in training": (lambda: Stack(Before), (False,)),
    "rows of the last step in training": (lambda: Stack(lambda i: Before(i, True)), (True,)),
    "rows of a call of another length": (lambda: Stack(Held), (True,)),
    "only from the second step in training on": (lambda: Stack(Warmed), (False, True)),
    "only a layer in the middle": (
        lambda: Stack(lambda i: MLP(i, lambda m, y: y.softmax(-1) if m.number == 3 else y), 6),
        (False,),
    ),
    "a gradient normalised": (stack(lambda m, y: Reversed.apply(y.relu())), (True,)),
    "a large gradient clipped": (stack(lambda m, y: Clipped.apply(y).relu()), (False, True)),
    "a small gradient made larger": (stack(lambda m, y: Floored.apply(y).relu()), (False,)),
    "a gradient's size asked for": (lambda: Stack(Branching), (True,)),
    "a gradient the forward hides": (stack(lambda m, y: centred(y)), (False,)),
    "an auxiliary output": (lambda: Summing(Penalised), (False, True)),
    "positions in a layer": (lambda: Stack(Placed), (True,)),
    "the length as a number": (lambda: Stack(Scaled), (True,)),
    "a running mean of columns": (lambda: Stack(Running), (False,)),
    "another argument's code": (lambda: Labelled(MLP), (False,)),
    "a hook": (lambda: Stack(Hooked), (False, True)),
    "a layer that is told so": (lambda: Telling("word"), (False, True)),
    "a layer by what came before": (lambda: Telling("list"), (False, True)),
    "a layer by a count": (lambda: Telling("count"), (False,)),
    **{
        f"a layer by its ops' {by}": (functools.partial(Handing, by), (False,))
        for by in (*EXTRAS, "a buffer's", "a constant", "written")
    },
}


class Warming(Stack):
    """Counts its calls, which scale what it gives, also those that come to nothing."""

    def __init__(self, make: Callable[[int], nn.Module]) -> None:
        super().__init__(make)
        self.register_buffer("calls", torch.zeros(()))
        self.times = 0

    def forward(self, x: torch.Tensor, positions: Any = None, mask: Any = None) -> Any:
        self.calls += 1
        self.times += 1
        if positions is not None:
            raise ValueError("not yet")
        x = super().forward(x) * self.calls.clamp(max=20) / (1 + self.times)
        return x if mask is None else x * mask


class Writing(Stack):
    """What it gives takes its gradient twice, where that arrives."""

    def forward(self, x: torch.Tensor) -> Any:
        return Doubled.apply(super().forward(x))


RIGHT: dict[str, tuple[Callable[[], nn.Module], tuple[bool, ...]]] = {
    "columns": (stack(None), (False, True)),
    "a dropout of its own": (stack(dropped), (False, True)),
    "positions without sequence parallelism": (lambda: Stack(Placed), (False,)),
    "the length without sequence parallelism": (lambda: Stack(Scaled), (False,)),
    "calls that are counted": (lambda: Warming(MLP), (False, True)),
    "rounding that large numbers amplify": (stack(amplifying), (False, True)),
    "large numbers that overflow": (lambda: Stack(lambda i: Normed(i, overflowing)), (False,)),
    "rows of the last step in training": (lambda: Stack(lambda i: Before(i, True)), (False,)),
    "rows of a call as long": (lambda: Stack(Held), (False,)),
    "a gradient's size asked for": (lambda: Stack(Branching), (False,)),
    "gradients clipped one by one": (stack(lambda m, y: Each.apply(y).relu()), (False, True)),
    "a gradient that is written to": (lambda: Writing(MLP), (False,)),
    "seven alike": (lambda: Stack(MLP, 7), (False, True)),
}
