"""What textbooks and papers say of tensor parallelism, found again in dry runs.

Models are Hugging Face's, on the meta device: Llama 3 70B's shape at tp 8 (batch 1, 8192 tokens,
bf16), and small ones where something is compared between models.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from typing import Any

import pytest
import torch

import tpplan
from tests.models import SHARDED_LOGITS, hf
from tpplan import Report
from tpplan.cost import load_hardware
from tpplan.cost.timing import Layer, summarize

TP, SEQUENCE = 8, 8192
LAYERS, WIDTH, INNER, HEADS, KV_HEADS, VOCAB = 80, 8192, 28672, 64, 8, 128256
STACK = "model.layers"
# so that one worker has all of them: they share their dry runs
pytestmark = [pytest.mark.xdist_group("textbooks"), pytest.mark.turns(4)]
MODES = pytest.mark.parametrize("sp", [False, True], ids=["TP", "TP+SP"])


def llama(**shape: Any) -> Any:
    """A Llama without biases, of bf16, on the meta device."""
    model = hf("Llama", device="meta", attention_bias=False, mlp_bias=False, **shape)
    return model.to(torch.bfloat16)


@functools.lru_cache
def llama_70b(*, sp: bool) -> Report:
    model = llama(
        num_hidden_layers=LAYERS,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        vocab_size=VOCAB,
        max_position_embeddings=SEQUENCE,
    )
    return tpplan.dry_run(
        model, SHARDED_LOGITS, TP, 1, SEQUENCE, sequence_parallel=sp, optimizer=None
    )


def test_two_all_reduces_a_layer_each_way() -> None:
    """Shoeybi et al. 2019, "Megatron-LM", figure 4: f and g, around attention and the MLP."""
    found: Counter[tuple[str, str]] = Counter()
    for c in llama_70b(sp=False).collectives:
        if c.module.startswith(f"{STACK}."):
            assert c.kind == "all_reduce"
            found[c.phase, ".".join(c.module.split(".")[:3])] += 1
    assert len(found) == 2 * LAYERS
    assert set(found.values()) == {2}
    assert {phase for phase, _ in found} == {"forward", "backward"}


def test_sequence_parallelism_sends_the_same_bytes() -> None:
    """Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models",
    section 4.2.2: an all-reduce is a reduce-scatter and an all-gather."""
    plain, split = llama_70b(sp=False), llama_70b(sp=True)
    for phase in ("forward", "backward"):
        assert plain.bytes_sent(phase) == split.bytes_sent(phase)
    assert split.counts("forward") == {
        "all_reduce": 0, "all_gather": 2 * LAYERS + 1, "reduce_scatter": 2 * LAYERS + 1,
    }  # fmt: skip


@MODES
def test_a_layer_sends_four_activations(sp: bool) -> None:
    """4·b·s·h·(N-1)/N elements forward, and as many backward: two ring all-reduces (Shoeybi et al.
    2019 with Patarasuk and Yuan 2009)."""
    report = llama_70b(sp=sp)
    for phase in ("forward", "backward"):
        sent = sum(
            c.bytes
            for c in report.collectives
            if c.phase == phase and c.module.startswith(f"{STACK}.17.")
        )
        assert sent == 2 * 4 * SEQUENCE * WIDTH * (TP - 1) // TP


@MODES
def test_a_collective_is_of_128_mib(sp: bool) -> None:
    """b·s·h in bf16: 8192 · 8192 · 2 bytes, about 130 MB."""
    for c in llama_70b(sp=sp).collectives:
        if c.phase in ("forward", "backward"):
            whole = torch.Size(c.shape).numel() * torch.bfloat16.itemsize
            assert (c.dtype, whole) == ("bfloat16", 128 * 2**20)


@MODES
def test_a_layer_keeps_its_share_of_the_stream(sp: bool) -> None:
    """Korthikanti et al. 2022, section 4.2 and table 2: with every layer recomputed, each keeps its
    input only, b·s·h elements under TP and b·s·h/N under TP+SP."""
    batch, length, width, tp = 2, 32, 64, 4

    def kept(layers: int) -> int:
        model = llama(num_hidden_layers=layers, hidden_size=width)
        report = tpplan.dry_run(
            model, SHARDED_LOGITS, tp, batch, length,
            sequence_parallel=sp, optimizer=None, checkpointing=True,
        )  # fmt: skip
        return sum(step.net for step in report.steps if step.phase == "forward")

    elements = (kept(2) - kept(1)) // torch.bfloat16.itemsize
    assert elements == batch * length * width // (tp if sp else 1)


def test_sixteen_bytes_a_parameter() -> None:
    """Rajbhandari et al. 2020, "ZeRO", section 3.1: 2 of the parameter, 2 of its gradient, 4 of its
    float32 copy, 8 of Adam's moments; PyTorch's Adam counts its steps in 4 bytes a tensor."""
    report = tpplan.dry_run(llama(vocab_size=128), "llama", 4, 1, 16)
    parameters, memory = report.parameter_counts["per_rank"], report.memory
    norms = (2 * 2 + 1) * 64  # on every rank
    assert parameters == (report.parameter_counts["total"] - norms) // 4 + norms
    steps = 4 * len(report.compiled.parameters)
    assert memory.states_per_rank - memory.buffers_per_rank == 16 * parameters + steps


@MODES
def test_flops_are_two_per_weight_and_token(sp: bool) -> None:
    """Kaplan et al. 2020, "Scaling laws for neural language models", section 2.1: 2 FLOPs per
    weight and token, twice that backward; and 4·s²·h of attention a layer, of which tp ranks do a
    share each (backward it recomputes its scores: 2.5 times)."""
    report = llama_70b(sp=sp)
    forward, backward = (
        sum(s.flops for s in report.steps if s.phase == phase) for phase in ("forward", "backward")
    )
    norms, embedding = (2 * LAYERS + 1) * WIDTH, VOCAB * WIDTH
    weights = report.parameter_counts["total"] - norms - embedding
    attention = LAYERS * 4 * SEQUENCE**2 * WIDTH
    assert forward * TP == 2 * weights * SEQUENCE + attention
    assert backward * TP == 4 * weights * SEQUENCE + attention * 5 // 2


def layer_on_a100(bandwidth: float, sp: bool) -> Layer:
    """``bandwidth``: of its links, in one direction."""
    a100 = load_hardware("a100-nvlink")
    link = dataclasses.replace(a100.link, bandwidth=bandwidth)
    return summarize(llama_70b(sp=sp).steps, dataclasses.replace(a100, link=link)).layers[STACK]


@MODES
def test_tensor_parallelism_needs_nvlink(sp: bool) -> None:
    """Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters",
    section 3.2 (takeaway 1): within a node's NVLink communication is a fraction of the work, over
    a link like the network's more than the work. 600 and 50 GB/s count both directions."""
    fast, slow = layer_on_a100(600e9 / 2, sp), layer_on_a100(50e9 / 2, sp)
    assert fast.total.ratio < 0.2
    assert slow.total.ratio > 1
    assert slow.total.compute == fast.total.compute
    # no more of it can hide than there is of it, or of matmuls beside it
    assert fast.total.overlappable <= fast.total.communication
    assert slow.total.overlappable < 0.5 * slow.total.communication


def test_forward_alone_needs_more_than_an_adapter() -> None:
    """The same with 50 GB/s each way, what a 400 Gb/s adapter sends: backward has twice the work
    for the same bytes, forward has not."""
    phases = layer_on_a100(50e9, sp=True).phases
    assert phases["forward"].ratio > 1 > phases["backward"].ratio
