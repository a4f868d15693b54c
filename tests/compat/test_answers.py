"""What ops answer to fake tensors is remembered of the like only."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

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


class Answering(TorchDispatchMode):
    """Answers what can be."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return ask(func, *args)


def test_what_is_written_to_is_given_back() -> None:
    with MODE:
        x, other = torch.ones(4, 6), torch.ones(6)
    for like in (x, MODE.from_tensor(torch.ones(4, 6))):
        with MODE, Answering():
            assert like.add_(other) is like
        assert like._version == 1
        assert ask(torch.ops.aten._foreach_mul_.Scalar, [like, other], 2.0) is None


def test_what_changes_the_sizes_of_what_it_is_given() -> None:
    resize = torch.ops.aten.resize_.default
    with MODE:
        wide = [torch.ones(4, 6) for _ in range(2)]
    for x in wide:
        ask(resize, x, [2, 3])
        assert x.shape == (2, 3)
    for x in wide:  # what it gives back is as large as it was, what holds it is not
        assert x.untyped_storage().nbytes() == 96
        ask(resize, x, [2, 3])
        with MODE:
            y = torch.ones(2, 3)
        ask(resize, y, [4, 6])
        assert y.untyped_storage().nbytes() == 96


def test_made_of_nothing() -> None:
    zeros = torch.ops.aten.zeros.default
    with MODE:
        first, second = ask(zeros, [2, 3]), ask(zeros, [2, 3])
        assert first.untyped_storage()._cdata != second.untyped_storage()._cdata
    with FakeTensorMode() as mode:
        question = answers.asked(zeros, ([2, 3],), {})
        assert question is not None
        answer = answers.remembered(question)
        assert answer is not None
        made = answers.again(answer, question)
        assert made.fake_mode is mode
        assert vars(made).keys() == vars(torch.zeros(2, 3)).keys()
    assert answers.asked(zeros, ([2, 3],), {}) is None  # of real ones nothing is known


def test_of_real_tensors() -> None:
    with MODE:
        fake = torch.ones(2)
    for given in ((torch.ones(2), fake), (fake, torch.ones(2))):
        assert answers.asked(torch.ops.aten.add.Tensor, given, {}) is None


class Seen(TorchDispatchMode):
    """Which ops come to it."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


def test_answers_about_which_nobody_has_found_out() -> None:
    clone = torch.ops.aten.clone.default
    with MODE, Seen() as seen:
        x = torch.ones(7, 11)
        seen.ops.clear()
        with answers.Answering():
            made = [x.clone() for _ in range(3)]
    assert seen.ops == [clone]
    assert len({t.untyped_storage()._cdata for t in (x, *made)}) == 4
    question = answers.asked(clone, (x,), {})
    assert question is not None
    assert answers.remembered(question) is None
    answers.remember(question, made[0], 7)
    answer = answers.remembered(question)
    assert answer is not None
    assert answer.told == 7
    with MODE, seen, answers.Answering():
        assert x.clone().shape == x.shape
    assert seen.ops == [clone]
