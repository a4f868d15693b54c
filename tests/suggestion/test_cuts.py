"""Regions whose layout only their numbers show: state spaces, halves, heads side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tpplan
from tests.mixers import (
    HEADS,
    INNER,
    STATE,
    STEPS,
    WIDE,
    WIDTH,
    ByChannels,
    ByGroups,
    ByHeads,
    Layer,
    Reading,
)
from tests.planner.helpers import Stack, stream
from tests.suggestion.odd import Model
from tests.suggestion.test_suggest import rules
from tpplan.language import Diagnostic, PlanError
from tpplan.suggestion.bench import bench_for
from tpplan.suggestion.draft import Decision
from tpplan.suggestion.hanging import Cut, Hanging, Part, hanging
from tpplan.suggestion.search import Search
from tpplan.suggestion.share import Change, changes_for, rows_of
from tpplan.suggestion.short import shortened

BY_CHANNELS = {
    "layers.*.mixer": {"style": "attention", "gather": ["x"]},
    "layers.*.mixer.wide": {"style": "colwise", "packed": ["part1", "part2"]},
    "layers.*.mixer.dial": {"style": "rowwise", "output": "inside"},
    "layers.*.mixer.{decay,skip}": "colwise",
    "layers.*.mixer.back": "rowwise",
}
IN_LAYERS: Mapping[str, tuple[Callable[[], nn.Module], Mapping[str, object]]] = {
    "channels": (ByChannels, {**BY_CHANNELS, "layers.*.mixer.{blur,pace}": "colwise"}),
    "channels, a convolution that is read": (
        Reading,
        {**BY_CHANNELS, "layers.*.mixer.blur.{weight,bias}": "colwise"},
    ),
    "heads": (
        ByHeads,
        {
            "layers.*.mixer": {
                "style": "attention",
                "gather": ["x"],
                "attributes": {"amount": "amount // tp", "inner": "inner // tp"},
            },
            "layers.*.mixer.{decay,skip,gain}": "colwise",
            "layers.*.mixer.level": "colwise",
        },
    ),
    "groups of heads": (
        ByGroups,
        {
            "layers.*.mixer": {
                "style": "attention",
                "gather": ["x"],
                "attributes": {
                    "amount": "amount // tp",
                    "inner": "inner // tp",
                    "groups": "(groups + tp - 1) // tp",
                    "mixed": "inner // tp + (mixed - inner) // groups * ((groups + tp - 1) // tp)",
                    "shared": "(groups + tp - 1) // tp * (shared // groups)",
                },
            },
            # 'groups' is something else there
            "layers.*.mixer.blur": {
                "style": "colwise",
                "packed": {"part1": ["amount", 4], "part2": [4, 4], "part3": [4, 4]},
            },
        },
    ),
}


class Turns(nn.Module):
    """A projection with a head's parts side by side, a head of one half with one of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.many, self.pair = HEADS, nn.Linear(WIDTH, 2 * HEADS * WIDE)
        self.halves, self.back = nn.Linear(WIDTH, 2 * INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = self.pair(x).unflatten(-1, (self.many, 2 * WIDE)).chunk(2, -1)
        left, right = self.halves(x).chunk(2, -1)
        both = F.softmax(one, -1) * two.sum(-1, keepdim=True)
        out: torch.Tensor = self.back(both.flatten(-2) + left * right)
        return out


class Low(nn.Module):
    """A sum of all columns, of which each rank needs all or its own: no more than it has to."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.back = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.low, self.high = nn.Linear(WIDTH, STEPS), nn.Linear(STEPS, INNER)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.back(self.up(x) * self.high(self.low(x)))
        return out


def seen_of(module: nn.Module, *products: str, norms: tuple[str, ...] = ()) -> list[Hanging]:
    bench = bench_for(module, module, stream(13, torch.float32))
    assert bench is not None
    given = bench.given("")
    assert given is not None
    return hanging(bench.model, given, "back", norms, products)


def changed(module: nn.Module, seen: Hanging, tp: int = 2) -> tuple[Change, ...] | None:
    bench = bench_for(module, module, stream(13, torch.float32))
    assert bench is not None
    given = bench.given("")
    assert given is not None
    return changes_for(bench.model, given, "back", seen, (), tp)


def test_parts_of_unequal_width() -> None:
    (seen,) = seen_of(ByHeads(), "wide", norms=("level",))
    shared = Part(1, 2 * STATE)  # for all heads
    columns = Part(INNER, 1)
    assert seen.cuts["wide.weight"] == Cut(0, (columns, columns, shared, Part(HEADS, 1)))
    assert seen.cuts["blur.weight"] == Cut(0, (columns, shared))
    assert seen.cuts["gain"] == seen.cuts["decay"] == Cut(0, (Part(HEADS, 1),))
    assert not seen.whole


def test_a_sum_that_the_region_goes_on_with() -> None:
    seen = seen_of(ByChannels(), "wide", "dial", "pace")[-1]
    assert seen.inside == {"dial": None}
    assert seen.cuts["wide.weight"] == Cut(0, (Part(INNER, 1), Part(INNER, 1)))
    assert not seen.whole


def test_heads_side_by_side_and_halves() -> None:
    (seen,) = seen_of(Turns(), "pair", "halves")
    assert seen.cuts["pair.weight"] == Cut(0, (Part(HEADS, 2 * WIDE),))
    assert seen.cuts["halves.weight"] == Cut(0, (Part(INNER, 1), Part(INNER, 1)))
    assert changed(Turns(), seen) == (Change("", "many", "many // tp", HEADS // 2),)


@pytest.mark.parametrize("tp", [2, 4])
def test_fewer_groups_than_ranks_and_a_number_that_counts_two_things(tp: int) -> None:
    """As many heads as columns of the groups: numbers tell which of them it is."""
    (seen,) = seen_of(ByGroups(2), "wide")
    values = {"amount": HEADS // tp, "inner": INNER // tp, "groups": 1, "shared": STATE}
    changes = changed(ByGroups(2), seen, tp)
    assert changes is not None
    found = {change.name: change.value for change in changes}
    assert found == {**values, "mixed": INNER // tp + 2 * STATE}


def test_what_is_small_is_whole_before_a_sum_is_sent() -> None:
    first, *others = seen_of(Low(), "up", "low", "high")
    assert not first.inside
    assert set(first.whole) == {"low.weight", "low.bias"}
    assert [list(seen.inside) for seen in others] == [["high"]]


def test_numbers_that_no_change_makes_right() -> None:
    class Fixed(Turns):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            one, two = self.pair(x).unflatten(-1, (HEADS, 2 * WIDE)).chunk(2, -1)
            out: torch.Tensor = self.back((one * two.sum(-1, keepdim=True)).flatten(-2))
            return out

    (seen,) = seen_of(Fixed(), "pair", "halves")
    assert changed(Fixed(), seen) is None


def test_the_rows_of_a_rank() -> None:
    cut = Cut(0, (Part(4, 2), Part(2, 1), Part(1, 3)))
    found = [rows_of(cut, rank, 4) for rank in range(4)]
    assert [rows.tolist() for rows in found if rows is not None] == [
        [0, 1, 8, 10, 11, 12],
        [2, 3, 8, 10, 11, 12],
        [4, 5, 9, 10, 11, 12],
        [6, 7, 9, 10, 11, 12],
    ]
    assert rows_of(cut, 0, 3) is None


@pytest.mark.parametrize("name", IN_LAYERS)
@pytest.mark.turns(24)
def test_a_plan_is_found(name: str) -> None:
    mixer, wanted = IN_LAYERS[name]
    inputs = stream(13, torch.float32)

    def model() -> nn.Module:
        return Stack(lambda _: Layer(mixer()))

    plan = tpplan.suggest(model(), 2, inputs)
    found = rules(plan)
    assert {key: found.get(key) for key in wanted} == wanted
    result = tpplan.verify(model(), plan, 4, sequence_parallel=True, inputs=inputs)
    assert result.rank_share < 0.4


def test_a_region_is_tried_again_beside_what_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    _, short, anatomy = shortened(model, None, 2)
    first, second = (slot for slot in anatomy.slots if slot.region)
    refusal = PlanError([Diagnostic("numbers that overflow")])

    def refused(_: Search, decisions: Mapping[str, Decision], sp: bool) -> PlanError | None:
        wanted = {**first.decisions(), **second.decisions()}.items()
        fine = decisions.items() >= wanted or second.left_whole
        return None if fine or not decisions.items() >= second.decisions().items() else refusal

    monkeypatch.setattr(Search, "_refused", refused)
    Search(short, anatomy, 2, None, lambda _: None).run()
    assert not first.left_whole
    assert second.at == 0
