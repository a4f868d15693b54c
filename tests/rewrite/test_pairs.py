"""Mixtures, state spaces and linear attention on real ranks: training and generation."""

from __future__ import annotations

import pytest

from tests.compare import beyond
from tests.ranks import Ranks
from tests.rewrite import MODES, SIZES
from tests.rewrite.pairs import generation_job, training_job

# gated experts, biases in turns, shared experts, latent attention, dense products of all experts,
# linear attention beside
MIXTURES = ("mixtral", "gpt_oss", "qwen2_moe", "deepseek_v3", "llama4_text", "qwen3_next")
# by heads, by channels, of one group with a norm over all ranks, beside attention, with buffers
STATE_SPACES = ("mamba2", "jamba", "bamba", "falcon_h1", "mamba", "minimax", "recurrent_gemma")
TRAINED = (*MIXTURES, *STATE_SPACES[:4])


@MODES
@SIZES
@pytest.mark.parametrize("recompute", [False, True], ids=["", "recomputed"])
@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.turns(128)
def test_training(ranks: Ranks, name: str, recompute: bool, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, training_job, name, sp, recompute))


@MODES
@SIZES
@pytest.mark.parametrize("name", [*MIXTURES, *STATE_SPACES])
@pytest.mark.turns(128)
def test_generate(ranks: Ranks, name: str, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, generation_job, name, sp))
