"""How the parameters of stacked experts belong together, found by running them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from tests.mixtures import EXPERTS, INNER, LAYOUTS, WIDTH, Experts, Packed, Scaled
from tpplan.layout import Rows
from tpplan.observe.experts import inner_columns
from tpplan.observe.thin_experts import NotStackedError, Stacked, WidthError
from tpplan.observe.trace import Call, Numbered, Trace
from tpplan.planner.attributes import assign, named_in_code

TOKENS, CHOSEN = 10, 2


def found(module: nn.Module, tp: int, width: int = WIDTH) -> Stacked:
    """What is found of a module that is called as the blocks here do."""
    trace = Trace()
    trace.shapes = {0: (TOKENS, width), 1: (TOKENS, CHOSEN), 2: (TOKENS, CHOSEN)}
    trace.floating = {0, 2}
    call = Call(0, "", None, {}, given=((Numbered(0), Numbered(1), Numbered(2)), {}))
    return inner_columns(module, call, trace, named_in_code(module), tp, assign)


def packed(inner: int, tp: int) -> Rows:
    """Of gate and up one after the other, a rank's part of both."""
    each = inner // tp
    starts = [(r * each, inner + r * each) for r in range(tp)]
    return Rows(1, [[(start, start + each) for start in own] for own in starts])


@pytest.mark.parametrize("tp", [2, 4])
def test_layouts(tp: int) -> None:
    expected = {
        "packed": ({"wide": packed(INNER, tp), "narrow": Shard(2)}, ()),
        "in turns": (
            {"wide": Shard(2), "wide_bias": Shard(1), "narrow": Shard(1)},
            ("narrow_bias",),
        ),
        "apart": ({"gate": Shard(1), "up": Shard(1), "down": Shard(1)}, ()),
        "plain": ({"up": Shard(1), "down": Shard(2)}, ()),
    }
    for layout, make in LAYOUTS.items():
        stacked = found(make(), tp)
        assert (stacked.cut, stacked.added) == expected[layout], layout
        assert stacked.width == INNER
        assert stacked.thin is None
    assert found(LAYOUTS["apart"](), tp).attributes == {"columns": (INNER, INNER // tp)}


@pytest.mark.parametrize("layout", [*LAYOUTS])
@pytest.mark.parametrize("inner", [WIDTH, 2 * WIDTH, 3 * WIDTH, 64])
def test_thin_experts_show_what_large_ones_do(
    layout: str, inner: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a size could be the width of the stream as well as inner columns."""
    small = found(LAYOUTS[layout](inner=inner), 4)
    monkeypatch.setattr("tpplan.observe.experts._SMALL", 0)
    large = found(LAYOUTS[layout](inner=inner).to("meta"), 4)
    assert large.thin is not None
    assert (large.width, large.cut, large.added) == (small.width, small.cut, small.added)
    assert large.attributes == small.attributes


def test_thin_experts_are_thin() -> None:
    with torch.device("meta"):
        module = Packed(2048, 8192)
    stacked = found(module, 8, 2048)
    assert stacked.cut == {"wide": packed(8192, 8), "narrow": Shard(2)}
    assert stacked.thin is not None
    assert stacked.thin.shapes == {"wide": (EXPERTS, 32, 8), "narrow": (EXPERTS, 8, 16)}
    assert stacked.thin.cut == {"wide": packed(16, 8), "narrow": Shard(2)}


@pytest.mark.parametrize("large", [False, True])
def test_a_width_that_the_ranks_do_not_divide(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if large:
        monkeypatch.setattr("tpplan.observe.experts._SMALL", 0)
    with pytest.raises(WidthError, match=f"tp 3 does not divide the {INNER} inner columns"):
        found(Packed(), 3)


class Two(Packed):
    """Gives a tensor and something else."""

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, factors: torch.Tensor) -> object:
        return super().forward(x, chosen, factors), chosen


class Narrower(Packed):
    """What it gives is not as wide as what it is given."""

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        return super().forward(x, chosen, factors)[:, 1:]


class Broken(Packed):
    """Its code cannot be run."""

    def expert(self, x: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        raise ValueError("never")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Scaled, "no inner columns were found"),
        (Two, "something else than one tensor"),
        (Narrower, "another shape"),
        (Broken, "cannot be run on random numbers: ValueError: never"),
        (lambda: nn.Linear(WIDTH, WIDTH), r"no parameter \(experts, rows, columns\)"),
    ],
)
def test_refused(make: type[Experts], message: str) -> None:
    with pytest.raises(NotStackedError, match=message):
        found(make(), 2)


def test_the_module_is_left_as_it_is() -> None:
    module = LAYOUTS["apart"]()
    before = {name: p.clone() for name, p in module.named_parameters()}
    found(module, 2)
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
    assert named_in_code(module)["columns"] == INNER
