"""Attention as some write it: heads that take keys in turns, complex positions, norms in two."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

import tpplan
from tests.mixers import HEADS, INNER, WIDE, WIDTH
from tests.planner.helpers import Stack, stream
from tests.suggestion.test_cuts import changed, seen_of
from tests.suggestion.test_suggest import rules
from tpplan.observe.calls import Call
from tpplan.planner import compile_plan
from tpplan.planner.events import Failure
from tpplan.planner.known import Known
from tpplan.planner.regions import Regions
from tpplan.suggestion.draft import Slot
from tpplan.suggestion.hanging import Cut, Part
from tpplan.suggestion.short import shortened

INPUTS = stream(13, torch.float32)


class Attention(nn.Module):
    """With half as many keys as queries: a query looks at the key of its number modulo theirs."""

    def __init__(self, complex_positions: bool = False) -> None:
        super().__init__()
        self.complex_positions = complex_positions
        self.query = nn.Linear(WIDTH, INNER, bias=False)
        self.key, self.value = (nn.Linear(WIDTH, INNER // 2, bias=False) for _ in range(2))
        self.back = nn.Linear(INNER, WIDTH)

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        """Heads, turned by the angles of their positions."""
        x = x.unflatten(-1, (-1, WIDE))
        if not self.complex_positions:
            return x
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        angles = torch.arange(x.size(1), dtype=x.dtype)[:, None, None]
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = (self.turned(projected(x)).transpose(1, 2) for projected in (self.query, self.key))
        v = self.value(x).unflatten(-1, (-1, WIDE)).transpose(1, 2)
        k, v = (t.repeat(1, q.size(1) // t.size(1), 1, 1) for t in (k, v))
        heads = (q @ k.mT).softmax(-1) @ v
        out: torch.Tensor = self.back(heads.transpose(1, 2).flatten(2))
        return out


class Counting(nn.Module):
    """Its code counts heads and columns by its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.many, self.all = HEADS, INNER
        self.query, self.key = (nn.Linear(WIDTH, INNER) for _ in range(2))
        self.back = nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], self.many, -1)
        q, k = (projected(x).view(shape).transpose(1, 2) for projected in (self.query, self.key))
        heads = (q @ k.mT).softmax(-1) @ k
        out: torch.Tensor = self.back(heads.transpose(1, 2).reshape(*x.shape[:2], self.all))
        return out


class Norm(nn.Module):
    """Numbers for columns; a child without any does the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x) * self.scale
        return out


class Layer(nn.Module):
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.norm, self.mixer = Norm(), mixer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mixer(self.norm(x))


def slots_of(complex_positions: bool) -> list[Slot]:
    model = Stack(lambda _: Layer(Attention(complex_positions)))
    return list(shortened(model, INPUTS, 2)[2].slots)


def test_the_rows_of_queries_that_take_turns() -> None:
    (seen,) = seen_of(Attention(), "query", "key", "value")
    halves = Part(HEADS // 2, WIDE)
    assert seen.rounds == 2
    assert seen.cuts["query.weight"] == Cut(0, (halves, halves))
    assert seen.cuts["key.weight"] == Cut(0, (halves,))
    assert seen.cuts["value.weight"] == Cut(0, (Part(INNER // 2, 1),))
    assert changed(Attention(), seen) == ()


@pytest.mark.parametrize("complex_positions", [False, True])
def test_what_becomes_complex_numbers_is_of_the_region(complex_positions: bool) -> None:
    (region,) = (slot for slot in slots_of(complex_positions) if slot.region)
    projections = {f"layers.0.mixer.{name}" for name in ("query", "key", "value", "back")}
    assert projections < region.paths


def test_a_norm_that_lets_a_child_do_the_rest_is_one_module() -> None:
    others = [slot for slot in slots_of(False) if not slot.region]
    assert [sorted(slot.paths) for slot in others] == [["layers.0.norm", "layers.1.norm"]]


def test_what_made_a_region_right_is_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack(lambda _: Layer(Counting()))
    rules = {
        "layers.*.norm": "replicate",
        "layers.*.mixer.{query,key}": "colwise",
        "layers.*.mixer.back": "rowwise",
    }
    tried, failure, memory = [0], Regions._failure, Known()

    def counted(self: Regions, calls: Sequence[Call]) -> Failure | None:
        tried[-1] += 1
        return failure(self, calls)

    monkeypatch.setattr(Regions, "_failure", counted)
    changed = []
    for _ in range(2):
        plan = tpplan.load_plan({"tpplan": 1, "rules": rules}, model)
        known = memory.of_another_plan()
        compiled = compile_plan(model, plan, 2, False, inputs=INPUTS, known=known)
        changed.append(compiled.modules["layers.0.mixer"].attributes)
        tried.append(0)
    assert changed[0] == changed[1]
    assert changed[0] == {"many": (HEADS, HEADS // 2), "all": (INNER, INNER // 2)}
    assert tried[0] > tried[1] == 2  # as it is, and with these


@pytest.mark.turns(24)
def test_a_plan_of_queries_that_take_turns() -> None:
    def model() -> nn.Module:
        return Stack(lambda _: Layer(Attention()))

    plan = tpplan.suggest(model(), 2, INPUTS)
    parts = ["part1", "part2"]
    assert rules(plan) == {
        "layers.*.norm": "sequence_parallel",
        "layers.*.mixer.query": {"style": "colwise", "packed": parts},
        "layers.*.mixer.{key,value}": "colwise",
        "layers.*.mixer.back": {"style": "rowwise", "packed": parts},
    }
    result = tpplan.verify(model(), plan, 4, sequence_parallel=True, inputs=INPUTS)
    assert result.rank_share < 0.3
