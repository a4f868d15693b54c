"""Products in pieces: what they compute, what they send when, and a model's life with them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.compare import beyond
from tests.ranks import Ranks
from tests.rewrite import MODES, SIZES, pieces

pytestmark = pytest.mark.turns(48)

# one of each kind of product: plain, Conv1D, packed, reduced together, experts with a router
MODELS = ("llama", "gpt2", "phi3", "falcon", "qwen2_moe")
WAYS = pytest.mark.parametrize(
    ("sp", "save"),
    [(False, "gathered"), (True, "gathered"), (True, "shard")],
    ids=["tp", "tp+sp", "tp+sp, rows kept"],
)
JOBS = [pieces.events_job, pieces.recomputed_job, pieces.autocast_job, pieces.replaced_job]


@MODES
@SIZES
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.turns(128)
def test_equal(ranks: Ranks, name: str, count: int, tp: int, sp: bool) -> None:
    save = "shard" if sp and count == 3 else "gathered"
    assert not beyond(ranks.run(tp, pieces.equal_job, name, sp, count, save))


@WAYS
@pytest.mark.parametrize("job", JOBS)
def test_life(ranks: Ranks, job: Any, sp: bool, save: str) -> None:
    assert not beyond(ranks.run(2, job, sp, save))


@MODES
def test_order(ranks: Ranks, sp: bool) -> None:
    assert not beyond(ranks.run(2, pieces.order_job, sp))


@WAYS
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_predicted(ranks: Ranks, name: str, sp: bool, save: str) -> None:
    assert not beyond(ranks.run(4, pieces.predicted_job, name, sp, save))


@SIZES
@pytest.mark.parametrize("save", ["gathered", "shard"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_fused(ranks: Ranks, name: str, save: str, tp: int) -> None:
    assert not beyond(ranks.run(tp, pieces.fused_job, name, save))


def test_refused(ranks: Ranks) -> None:
    assert not beyond(ranks.run(2, pieces.refused_job))


@MODES
def test_compiled(ranks: Ranks, sp: bool) -> None:
    assert not beyond(ranks.run(2, pieces.compiled_job, sp))
