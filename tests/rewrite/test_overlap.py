"""Weight gradients beside collectives, and shards in the place of gathered inputs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.compare import beyond
from tests.ranks import Ranks
from tests.rewrite import MODES, SIZES, overlap, shipped
from tests.shipped import listed, ways

pytestmark = pytest.mark.turns(48)

WAYS = pytest.mark.parametrize(
    ("sp", "save"),
    [(False, "gathered"), (True, "gathered"), (True, "shard")],
    ids=["tp", "tp+sp", "tp+sp, rows kept"],
)


@pytest.mark.turns(256)
@pytest.mark.parametrize(("name", "tp", "sp"), ways(listed()))
def test_every_plan(ranks: Ranks, name: str, tp: int, sp: bool) -> None:
    results = ranks.run(tp, shipped.ways_job, name, shipped.compiled(name, tp, sp))
    assert not beyond(results, 1.0)
    exact = [{n: e for n, e in errors.items() if shipped.ROUNDING not in n} for errors in results]
    assert all(exact)
    assert not beyond(exact, 1e-12)


@SIZES
def test_rows_kept(ranks: Ranks, tp: int) -> None:
    assert not beyond(ranks.run(tp, overlap.shard_job, "llama"))


@WAYS
@pytest.mark.parametrize(
    "job", [overlap.events_job, overlap.autocast_job, overlap.recomputed_job, overlap.copied_job]
)
def test_life(ranks: Ranks, job: Any, sp: bool, save: str) -> None:
    assert not beyond(ranks.run(2, job, sp, save))


@WAYS
@pytest.mark.parametrize("job", [overlap.order_job, overlap.stack_job])
def test_order(ranks: Ranks, job: Any, sp: bool, save: str) -> None:
    assert not beyond(ranks.run(2, job, sp, save))


@MODES
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_remade(ranks: Ranks, name: str, sp: bool) -> None:
    assert not beyond(ranks.run(2, overlap.remade_job, name, sp))


@MODES
def test_origin(ranks: Ranks, sp: bool) -> None:
    assert not beyond(ranks.run(2, overlap.origin_job, sp), 1e-4)


@WAYS
def test_left_behind(ranks: Ranks, sp: bool, save: str) -> None:
    assert not beyond(ranks.run(2, overlap.left_job, sp, save))


def test_what_does_nothing_is_said(ranks: Ranks) -> None:
    assert not beyond(ranks.run(2, overlap.idle_job))


def test_what_does_nothing_is_said_without_ranks() -> None:
    for asked, sp, said in overlap.idle_words():
        assert said == (["recompute"] if sp else ["save", "recompute"]), asked


def test_compiled_keeps_all(ranks: Ranks) -> None:
    assert not beyond(ranks.run(2, overlap.compiled_job), 1e-4)


@SIZES
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_decoding(ranks: Ranks, name: str, tp: int) -> None:
    assert not beyond(ranks.run(tp, overlap.decoding_job, name))
