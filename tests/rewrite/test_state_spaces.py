"""State spaces and linear attention of transformers on real ranks: training, and their caches."""

from __future__ import annotations

import pytest

from tests.compare import beyond
from tests.ranks import Ranks
from tests.rewrite import MODES, SIZES
from tests.rewrite.test_mixtures import generation_job, training_job

# by heads, by channels, of one group with a norm over all ranks, beside attention, with buffers
FAMILIES = ("mamba2", "jamba", "bamba", "falcon_h1", "mamba", "minimax", "recurrent_gemma")


@MODES
@SIZES
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.matrix
def test_generate(ranks: Ranks, name: str, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, generation_job, name, sp))


@MODES
@SIZES
@pytest.mark.parametrize("recompute", [False, True], ids=["", "recomputed"])
@pytest.mark.parametrize("name", FAMILIES[:4])
@pytest.mark.matrix
def test_training(ranks: Ranks, name: str, recompute: bool, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, training_job, name, sp, recompute))
