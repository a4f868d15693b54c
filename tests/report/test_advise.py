"""What is advised: what fits, what is fastest, and the reasons."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import tpplan
from tests.models import hf
from tpplan.report.hardware import load_hardware

H100 = load_hardware("h100-nvlink")


def llama(layers: int, **shape: Any) -> nn.Module:
    """A Llama in bfloat16 on the meta device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        config = LlamaConfig(num_hidden_layers=layers, head_dim=128, **shape)
        return LlamaForCausalLM(config).bfloat16()


def small() -> nn.Module:
    """1.2 billion parameters."""
    shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16}
    return llama(16, **shape, num_key_value_heads=4, vocab_size=32000)


def large() -> nn.Module:
    """70 billion parameters."""
    shape = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
    return llama(80, **shape, num_key_value_heads=8, vocab_size=128256)


def test_the_textbooks_table() -> None:
    """A model that fits a GPU needs no tensor parallelism; a large one has it within a node.

    Narayanan et al. 2021, section 3 (takeaways 1 to 3): tensor parallelism up to the size of a
    node, pipelines beyond it, the rest data parallel.
    """
    advice = tpplan.advise(small(), "llama.yaml", 8, 64, 2048)
    assert advice.best is not None
    assert (advice.best.tp, advice.best.pp, advice.best.dp) == (1, 1, 8)

    advice = tpplan.advise(large(), "llama.yaml", 64, 64, 4096)
    assert advice.best is not None
    assert 1 < advice.best.tp <= H100.node
    assert advice.best.sequence_parallel
    assert advice.best.tp * advice.best.pp * advice.best.dp == 64
    across = next(size for size in advice.sizes if size.tp == 16)
    assert across.best is not None
    assert across.best.seconds > advice.best.seconds
    assert any("crosses the node of 8" in note for note in across.notes)
    assert any("more ranks than KV heads" in note for note in across.notes)
    assert "crosses the node" in str(advice)


def test_what_fits_nowhere_is_said() -> None:
    tight = replace(H100, name="small", memory=20e9)
    advice = tpplan.advise(large(), "llama.yaml", 8, 8, 2048, hardware=tight)
    assert advice.best is None
    text = str(advice)
    assert "Nothing fits" in text
    assert "does not fit: at least" in text


def test_sizes_that_heads_do_not_allow() -> None:
    model = hf(device="meta", num_attention_heads=6, num_key_value_heads=3, head_dim=16)
    advice = tpplan.advise(model, "llama.yaml", 4, 8, 16)
    four = next(size for size in advice.sizes if size.tp == 4)
    assert four.best is None
    assert any("tp 4 does not divide" in note for note in four.notes)


def test_more_pipeline_stages_more_idle_time() -> None:
    advice = tpplan.advise(large(), "llama.yaml", 64, 64, 2048)
    idle = {
        c.pp: c.idle / c.seconds
        for c in advice.choices
        if (c.tp, c.sequence_parallel, c.checkpointing) == (8, True, False)
    }
    assert idle[1] == 0
    assert idle[2] < idle[4] < idle[8]
    # (p-1)/m of the work, or (p-1)/(m+p-1) of the time; of 8 stages no data parallelism is left
    assert idle[8] == pytest.approx(7 / (64 + 7), rel=0.02)
    held = {
        c.pp: c.bytes
        for c in advice.choices
        if (c.tp, c.sequence_parallel, c.checkpointing) == (8, True, True)
    }
    assert held[8] < held[4]


def test_batches_that_cannot_be_shared_out() -> None:
    advice = tpplan.advise(small(), "llama.yaml", 8, 3, 2048)
    assert {c.dp for c in advice.choices} <= {1}
