"""Fake tensors: what ops make of them, and refuse, as of real ones."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tpplan.compat import FakeTensorMode, quiet, uncached


def made(dtype: torch.dtype, width: int, inner: int, fake: bool) -> list[Any]:
    """The sizes of grouped products and of their gradients."""
    ends = torch.tensor([2, 5, 9], dtype=torch.int32)
    rows = torch.ones(9, width, dtype=dtype, requires_grad=True)
    weight = torch.ones(3, inner, width, dtype=dtype, requires_grad=True)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode if fake else contextlib.nullcontext(), quiet():
        out = F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)
        made = [out, *torch.autograd.grad(out, (rows, weight), torch.ones_like(out))]
    return [(t.shape, t.stride(), t.dtype, t.device) for t in made]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_grouped_products(dtype: torch.dtype) -> None:
    assert made(dtype, 16, 24, fake=True) == made(dtype, 16, 24, fake=False)


@pytest.mark.parametrize("fake", [True, False], ids=["fake", "real"])
@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 6), (torch.bfloat16, 12)], ids=str)
def test_rows_that_grouped_products_do_not_take(dtype: torch.dtype, width: int, fake: bool) -> None:
    with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
        made(dtype, width, 16, fake)


def test_no_answers_are_remembered_twice() -> None:
    with FakeTensorMode() as mode:
        x = torch.ones(5, 13)
        before = len(FakeTensorMode.cache)
        with uncached(mode):
            assert (x * 2).shape == x.shape
        assert len(FakeTensorMode.cache) == before
        assert (x * 2).shape == x.shape
        assert len(FakeTensorMode.cache) == before + 1
