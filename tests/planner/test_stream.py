"""Layers in the ways in which people pass the stream on, and what they do to it themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

import tpplan
from tests.planner.helpers import INNER, WIDTH, Layer, Stack, refused, stream, wrong

pytestmark = pytest.mark.turns(4)


class Pair(NamedTuple):
    """A result with names."""

    count: int
    x: torch.Tensor


@dataclass(frozen=True)
class Given:
    """A result that is no pytree of torch's."""

    x: torch.Tensor
    count: int = 0


class Wrapping(Layer):
    """Gives the stream inside of something else."""

    def __init__(self, wrap: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, x: torch.Tensor) -> Any:
        return self.wrap(super().forward(x))


class Unwrapping(Stack):
    """Takes the stream out again."""

    def __init__(self, wrap: Any, unwrap: Any, count: int) -> None:
        super().__init__(lambda _: Wrapping(wrap), count)
        self.unwrap = unwrap

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = self.unwrap(layer(x))
        return x


WRAPS: dict[str, tuple[Any, Any]] = {
    "a mapping": (lambda x: {"count": 3, "x": x}, lambda out: out["x"]),
    "a named tuple": (lambda x: Pair(3, x), lambda out: out.x),
    "a dataclass": (Given, lambda out: out.x),
    "a list in a tuple": (lambda x: (None, [x]), lambda out: out[1][0]),
}


@pytest.mark.parametrize("sp", [False, True], ids=["TP", "TP+SP"])
@pytest.mark.parametrize("name", WRAPS)
@pytest.mark.turns(12)
def test_a_layer_may_give_the_stream_in_something(name: str, sp: bool) -> None:
    assert not wrong(Unwrapping(*WRAPS[name], 2), {}, sp)


@pytest.mark.parametrize("sp", [False, True], ids=["TP", "TP+SP"])
def test_of_many_such_layers_some_are_skipped(sp: bool) -> None:
    assert not wrong(Unwrapping(*WRAPS["a mapping"], 5), {}, sp)


class Beside(Layer):
    """Is given something beside the stream, and adds it."""

    def forward(self, x: torch.Tensor, first: Any = None) -> Any:
        return super().forward(x + 0.1 * first)


class Masking(Layer):
    """Is given something of every position for its columns."""

    def forward(self, x: torch.Tensor, first: Any = None) -> Any:
        return x + self.out(self.fc(x).relu() * first)


class Passing(Stack):
    """Gives every layer the same thing beside the stream."""

    def __init__(self, make: Any, beside: Any) -> None:
        super().__init__(make)
        self.beside = beside

    def forward(self, x: torch.Tensor) -> Any:
        first = self.beside(x)
        for layer in self.layers:
            x = layer(x, first)
        return x


BESIDE: dict[str, tuple[Any, Any]] = {
    "the stream itself": (Beside, lambda x: x),
    "what it began as, changed": (Beside, lambda x: x.tanh()),
    "whole numbers of each position": (Beside, lambda x: (x > 0).long()),
    "one number of each position": (Beside, lambda x: x.detach().abs().amax(-1, keepdim=True)),
    "one row for all": (Beside, lambda x: torch.ones_like(x[:, :1])),
    "a mask of the columns": (Masking, lambda x: (x[..., :1] > 0).to(x.dtype)),
}


@pytest.mark.parametrize("sp", [False, True], ids=["TP", "TP+SP"])
@pytest.mark.parametrize("name", BESIDE)
@pytest.mark.turns(12)
def test_rows_beside_the_stream(name: str, sp: bool) -> None:
    make, beside = BESIDE[name]
    assert not wrong(Passing(lambda _: make(), beside), {}, sp)


class Twice(Layer):
    """Gives the stream out in two places."""

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return y, y


class Collecting(Stack):
    """Reads the second place only where it is asked to."""

    def forward(self, x: torch.Tensor, collect: bool = False) -> Any:
        kept = []
        for layer in self.layers:
            x, again = layer(x)
            if collect:
                kept.append(again)
        return torch.stack(kept) if collect else x


def test_a_stream_given_twice_is_refused_on_rows() -> None:
    assert "gives out more of the sequence-sharded stream" in refused(
        Collecting(lambda _: Twice()), {}, True
    )
    assert not wrong(Collecting(lambda _: Twice()), {}, False)


class Residual(Layer):
    """Gives the stream beside what the next layer adds to it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        residual = x if residual is None else residual + x
        return self.out(self.fc(self.norm(residual)).relu()), residual


class Listing(Residual):
    """Gives the stream beside all that it was."""

    def forward(self, x: torch.Tensor, states: Any = ()) -> Any:
        x, _ = super().forward(x)
        return x, (*states, x)


class Both(Stack):
    """Its layers give more than the stream."""

    def forward(self, x: torch.Tensor) -> Any:
        others: Any = ()
        for layer in self.layers:
            x, *others = layer(x, *others)
        return torch.stack([x, *tree_leaves(others)]).sum(0)


@pytest.mark.parametrize("make", [Residual, Listing])
def test_of_layers_that_give_more_the_norms_are_the_stack(make: Any) -> None:
    rules = {"layers.*.norm": "sequence_parallel"}
    said = refused(Both(lambda _: make()), rules, True)
    assert "inside of its layers in one 'layers:', 'layers.*.norm', or turn" in said
    assert not wrong(Both(lambda _: make()), rules, True, layers="layers.*.norm")


class Doing(Layer):
    """Does something to the stream in its own code."""

    def __init__(self, do: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.do = do

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(self.do(x))


ALONE: dict[str, Any] = {
    "a norm": lambda x: F.layer_norm(x, (WIDTH,)),
    "a mean of the columns": lambda x: x - x.mean(-1, keepdim=True),
    "weights of the columns": lambda x: x * x.softmax(-1),
    "columns turned around": lambda x: x.flip(-1),
    "tokens without their batch": lambda x: F.normalize(x.flatten(0, 1), dim=-1).view(x.shape),
}
AMONG: dict[str, Any] = {
    "a mean of the sequence": lambda x: x - x.mean(1, keepdim=True),
    "weights of the sequence": lambda x: x * x.softmax(1),
    "positions turned around": lambda x: x.flip(1),
    "positions summed up": lambda x: x.cumsum(1),
    "everything": lambda x: x / x.norm(),
}


@pytest.mark.parametrize("name", ALONE)
def test_what_acts_on_each_position_by_itself_runs_on_rows(name: str) -> None:
    assert not wrong(Stack(lambda _: Doing(ALONE[name])), {}, True)


@pytest.mark.parametrize("name", AMONG)
def test_what_acts_among_positions_is_refused(name: str) -> None:
    assert "layers.*" in refused(Stack(lambda _: Doing(AMONG[name])), {}, True)


class Idle(Layer):
    """Has a projection that its forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Conv1d(WIDTH, WIDTH, 1)


def test_what_is_not_called_is_refused_at_its_rule() -> None:
    said = refused(Stack(lambda _: Idle()), {"layers.*.unused": "colwise"}, False)
    assert "layers.*.unused (2 of them): was not called" in said
    assert "layers.*.unused: colwise" in said


class SideBySide(Layer):
    """The stream is several (hyper-connections): a layer works on their mean, adds to each."""

    def __init__(self) -> None:
        super().__init__()
        self.shares = nn.Parameter(torch.tensor([0.5, 1.5]))

    def forward(self, x: torch.Tensor) -> Any:
        made = self.out(self.fc(x.mean(2)).relu())
        return x + self.shares[:, None] * made.unsqueeze(2)


class Several(Stack):
    """Makes two streams of one, and one of two."""

    def forward(self, x: torch.Tensor) -> Any:
        x = torch.stack([x, 2 * x], 2)
        for layer in self.layers:
            x = layer(x)
        return x.sum(2)


@pytest.mark.parametrize("sp", [False, True], ids=["TP", "TP+SP"])
def test_streams_side_by_side(sp: bool) -> None:
    assert not wrong(Several(lambda _: SideBySide()), {"layers.*.shares": "replicate"}, sp)


class TokensFirst(nn.Module):
    """Works on tokens without their batch, whose sequence comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.out(self.fc(x.reshape(-1, WIDTH)).relu())
        return made.view(-1, x.size(1), WIDTH)


class Adding(nn.Module):
    """Adds what such a module makes."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = TokensFirst()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x)


@pytest.mark.parametrize("tp", [2, 4])
def test_tokens_of_a_sequence_that_comes_first(tp: int) -> None:
    rules = {
        "layers.*.mlp": {"style": "attention", "gather": ["x"]},
        "layers.*.mlp.fc": "colwise",
        "layers.*.mlp.out": "rowwise",
    }
    plan = tpplan.load_plan({"tpplan": 1, "sequence_dim": 0, "rules": rules})
    x = torch.randn(8, 2, WIDTH)
    found = tpplan.verify(Stack(lambda _: Adding()), plan, tp, inputs=x)
    assert found.gradient_error <= 1e-5


class Turning(Stack):
    """Holds tables in a list, and computes with what it keeps of them at its first call."""

    def __init__(self) -> None:
        super().__init__(lambda _: Layer())
        self.tables = [torch.linspace(0.5, 1, WIDTH), torch.linspace(1, 0.5, WIDTH)]
        self.made: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> Any:
        length = x.size(1)
        if length not in self.made:
            self.made[length] = sum(torch.outer(torch.ones(length), t) for t in self.tables) / 2
        return super().forward(x * self.made[length].to(x.dtype))


@pytest.mark.parametrize("sp", [False, True], ids=["TP", "TP+SP"])
def test_tables_in_a_list(sp: bool) -> None:
    model = Turning()
    assert not wrong(model, {}, sp)
    assert not model.made


def test_what_is_kept_of_the_first_call_is_no_other_structure() -> None:
    plan = tpplan.suggest(Turning(), 2, stream(dtype=torch.float32))
    assert {rule.style for rule in plan.rules} >= {"colwise", "rowwise"}


class Joined(Layer):
    """Sums up two things of different widths at once."""

    def __init__(self) -> None:
        super().__init__(back=INNER + 8)
        self.few, self.more = 8, nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.out(torch.cat([self.fc(x).relu(), self.more(x).tanh()], -1))


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("sp", [False, True], ids=["TP", "TP+SP"])
def test_parts_of_sizes_of_their_own_are_summed(sp: bool, tp: int) -> None:
    summed = {"style": "rowwise", "packed": {"wide": [INNER, 1], "few": ["few", 1]}}
    rules = {"layers.*.more": "colwise", "layers.*.out": summed}
    assert not wrong(Stack(lambda _: Joined()), rules, sp, tp)


def test_parts_that_do_not_fit() -> None:
    for parts, said in (
        ({"wide": [INNER, 1], "few": [1, 8]}, "does not divide the units of each part"),
        ({"wide": [INNER, 1], "few": [4, 1]}, "packed: the parts are 36, not the 40"),
    ):
        rules = {"layers.*.more": "colwise", "layers.*.out": {"style": "rowwise", "packed": parts}}
        assert said in refused(Stack(lambda _: Joined()), rules, False)
