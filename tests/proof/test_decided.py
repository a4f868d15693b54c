"""Code that asks something of numbers of which a rank has a part: sharded columns, or rows."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tpplan
from tests.rewrite import MODES
from tests.stacked import PLAN, Code, Layer, Stacked


def model_of(inner: Code = F.gelu, outer: Code = lambda x: x) -> nn.Module:
    return Stacked(2, lambda: Layer(inner, outer))


def branch(h: torch.Tensor) -> torch.Tensor:
    return F.gelu(h) if h.mean() > -9 else h.relu()


def read(h: torch.Tensor) -> torch.Tensor:
    return F.gelu(h) if h.max().item() > -9 else h.relu()


def chosen(h: torch.Tensor) -> torch.Tensor:
    return torch.where(h.mean(-1, keepdim=True) > -9, F.gelu(h), h.relu())


def signed(h: torch.Tensor) -> torch.Tensor:
    return F.gelu(h) * (h.sum(-1, keepdim=True) + 999).sign()


def counted(h: torch.Tensor) -> torch.Tensor:
    return F.gelu(h) if int((h.abs().max() / 999).floor()) == 0 else h.relu()


def listed(h: torch.Tensor) -> torch.Tensor:
    return F.gelu(h) if h.detach().mean().tolist() > -9 else h.relu()


def near(h: torch.Tensor) -> torch.Tensor:
    return F.gelu(h) if torch.allclose(h.mean(), torch.zeros(()), atol=9) else h.relu()


def shared(h: torch.Tensor) -> torch.Tensor:
    return F.gelu(h) * (1 + torch.bucketize(h.mean(), torch.tensor([-99.0, 99.0])))


def sought(h: torch.Tensor) -> torch.Tensor:
    return F.gelu(h) * (1 + torch.searchsorted(torch.tensor([-99.0, 99.0]), h.detach().mean()))


def whole(h: torch.Tensor) -> torch.Tensor:
    return F.gelu(h) * (2 + (h.mean() / 999).to(torch.int8))


def wrapped(h: torch.Tensor) -> torch.Tensor:
    return F.gelu(h) * (1 + h.detach().mean().abs() // 999)


def bounded(h: torch.Tensor) -> torch.Tensor:
    return F.gelu(h) / torch.maximum(h.mean(), torch.tensor(99.0))


def held(h: torch.Tensor) -> torch.Tensor:
    return F.gelu(h) * F.hardtanh(h.mean(), 99.0, 999.0)


def cut(h: torch.Tensor) -> torch.Tensor:
    return F.gelu(h) / h.mean().clamp(min=99.0)


def own(h: torch.Tensor) -> torch.Tensor:
    """Each number by itself."""
    return torch.where(h > 0.1, h, 0.5 * h) * (h.abs() >= 1e-9) + h.sign() * (h.round() == 0)


def guarded(h: torch.Tensor) -> torch.Tensor:
    if h.isnan().any() or not torch.isfinite(h).all():
        raise FloatingPointError
    return F.gelu(h)


def odd(h: torch.Tensor) -> torch.Tensor:
    """Comparisons with what is no number, by keyword, of booleans, in vmap."""
    if h == None or not isinstance(h != "h", bool):  # noqa: E711
        raise ValueError
    above = torch.gt(input=h, other=0.25) | h.gt(other=0.5)
    h = torch.vmap(lambda row: torch.where(row > 0, row, 0.1 * row))(h)
    return h * (above == (h > 0.25)) * (above >= 0.0) + (h < 1.0).to(h.dtype)


def each(h: torch.Tensor) -> torch.Tensor:
    """Each by itself, in other ways."""
    bins = torch.bucketize(h.detach(), torch.tensor([-1.0, 1.0])) + h.to(torch.int8)
    bins = bins + torch.searchsorted(torch.tensor([0.0]), h.detach().contiguous())
    h = torch.where(torch.isclose(h, h.round(), atol=0.1), h, 0.5 * h) + h % 1 + h.detach() // 1
    return torch.maximum(h, 0.1 * h).clamp_min(-0.3).clamp(max=9.0) * bins


STATISTICS = [branch, read, chosen, signed, counted]
STATISTICS += [listed, near, shared, sought, whole, wrapped, bounded, held, cut]


@MODES
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("code", STATISTICS)
@pytest.mark.turns(4)
def test_of_columns(code: Code, tp: int, sp: bool) -> None:
    with pytest.raises(tpplan.PlanError) as raised:
        tpplan.check(model_of(inner=code), PLAN, tp, sp)
    (found,) = raised.value.diagnostics
    assert "decides by numbers of a rank's own part" in found.message
    ((_, line),) = found.related
    assert line.text.strip() in inspect.getsource(code)


@pytest.mark.parametrize("code", STATISTICS)
def test_of_rows(code: Code) -> None:
    """In plain TP a layer has all of them."""
    tpplan.check(model_of(outer=code), PLAN, 2, False)
    along = lambda x: code(x.transpose(1, 2)).transpose(1, 2)  # noqa: E731
    with pytest.raises(tpplan.PlanError):
        tpplan.check(model_of(outer=along), PLAN, 2, True)


@MODES
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("code", [own, each, guarded, odd])
@pytest.mark.turns(4)
def test_accepted(code: Code, tp: int, sp: bool) -> None:
    tpplan.check(model_of(inner=code), PLAN, tp, sp)
    tpplan.check(model_of(outer=own), PLAN, tp, sp)
