"""What ops answer to fake tensors is remembered of the like only."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses import FakeTensorMode

from tpplan.compat import answers

MODE = FakeTensorMode()


def ask(func: Any, *args: Any) -> Any:
    """What ``func`` answers, remembered or not."""
    question = answers.asked(func, args, {})
    assert question is not None
    answer = answers.remembered(question)
    if answer is not None:
        return answers.again(answer, question)
    with MODE:
        out = func(*args)
    answers.remember(question, out, None)
    return out


def test_default_dtype() -> None:
    with MODE:
        counts = torch.ones(5, 3, dtype=torch.long)
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            assert ask(torch.ops.aten.div.Tensor, counts, counts).dtype == dtype
    finally:
        torch.set_default_dtype(before)


def test_views_and_strides() -> None:
    with MODE:
        x = torch.ones(4, 6)
    for _ in range(2):
        view = ask(torch.ops.aten.t.default, x)
        assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
        assert view.stride() == (1, 6)
        copy = ask(torch.ops.aten.clone.default, view)
        assert copy.untyped_storage()._cdata != x.untyped_storage()._cdata
        assert copy.stride() == (1, 6)


def test_kinds_of_numbers() -> None:
    with MODE:
        x = torch.ones(3, dtype=torch.long)
    made = [ask(torch.ops.aten.add.Scalar, x, one).dtype for one in (1, 1.0, True)]
    assert made == [torch.int64, torch.float32, torch.int64]
