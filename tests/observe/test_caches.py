"""What a model's code keeps in caches of its own: never anything of a run of ours."""

from __future__ import annotations

import functools
import gc

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tpplan.observe.caches import no_fakes_kept, only_new_searched


@functools.lru_cache
def angles(length: int) -> tuple[torch.Tensor, ...]:
    return (torch.arange(length),)


def run_on_fakes() -> None:
    with no_fakes_kept(), FakeTensorMode():
        angles(4)


def is_clean() -> bool:
    return not isinstance(angles(4)[0], FakeTensor)


def test_a_fake_is_let_go() -> None:
    angles.cache_clear()
    run_on_fakes()
    assert is_clean()


def test_what_the_user_has_computed_stays() -> None:
    angles.cache_clear()
    mine = angles(4)
    run_on_fakes()
    assert angles(4) is mine


def test_a_cache_that_was_cleared_in_between() -> None:
    angles.cache_clear()
    run_on_fakes()
    angles(4)
    run_on_fakes()  # nothing foreign in it
    angles.cache_clear()
    run_on_fakes()  # its counts are those it was clean with
    assert is_clean()


def test_runs_within_runs() -> None:
    angles.cache_clear()
    with no_fakes_kept(lambda t: t.dtype == torch.float64):
        run_on_fakes()
        with FakeTensorMode():
            angles(4)
    assert not is_clean()  # which the outer run did not ask for
    angles.cache_clear()


def test_caches_from_before_and_from_within() -> None:
    angles.cache_clear()

    with only_new_searched():

        @functools.lru_cache
        def inner(length: int) -> torch.Tensor:
            return torch.arange(length)

        with only_new_searched(), no_fakes_kept(), FakeTensorMode():
            angles(4), inner(4)
        assert is_clean()
        assert not isinstance(inner(4), FakeTensor)
        assert gc.get_freeze_count()
    assert not gc.get_freeze_count()


def test_what_the_user_froze_stays_so() -> None:
    angles.cache_clear()
    gc.freeze()
    try:
        with only_new_searched():
            run_on_fakes()
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()


def test_all_objects_are_searched_only_where_there_are_new_caches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_on_fakes()
    searches, search = [], gc.get_referrers

    def counted(*things: object) -> list[object]:
        searches.append(len(things))  # not the type, whose references are counted
        return search(*things)

    monkeypatch.setattr(gc, "get_referrers", counted)
    run_on_fakes()
    assert not searches

    @functools.cache
    def new(length: int) -> torch.Tensor:
        return torch.arange(length)

    with no_fakes_kept(), FakeTensorMode():
        new(4)
    assert len(searches) == 1
    assert not isinstance(new(4), FakeTensor)
    del new
    run_on_fakes()
    assert len(searches) == 1


def test_what_was_frozen_is_searched_when_it_is_not_any_more() -> None:
    @functools.cache
    def new(length: int) -> torch.Tensor:
        return torch.arange(length)

    gc.freeze()
    try:
        run_on_fakes()
    finally:
        gc.unfreeze()
    with no_fakes_kept(), FakeTensorMode():
        new(4)
    assert not isinstance(new(4), FakeTensor)
