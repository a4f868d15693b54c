"""Shipped plans on models that lack one of the kinds of layers that their family has.

A config may make every layer dense, or every one a mixture; every one attention, or none. The zoo's
models hold all kinds, so what a plan asks of each model shows only here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

import tpplan
from benchmarks import zoo
from tests.shipped import WAYS
from tpplan.language import PlanError

_DENSE = {"mlp_layer_types": "dense"}
_SPARSE = {"mlp_layer_types": "sparse"}
_LINEAR = {"layer_types": "linear_attention"}
_FULL = {"layer_types": "full_attention"}
_ATTENTION = {"attn_layer_period": 1, "attn_layer_offset": 0}
_NO_ATTENTION = {"attn_layer_period": 9, "attn_layer_offset": 8}
_NO_EXPERTS = {"num_local_experts": 0}

# type -> changes to its config; a word stands for a list with it for every layer
KINDS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "afmoe": [{"num_dense_layers": 2}, {"num_dense_layers": 0}],
    "axk1": [_DENSE, _SPARSE],
    "axk2": [_DENSE, _SPARSE],
    "bailing_hybrid": [{**_LINEAR, **_DENSE}, {**_FULL, **_SPARSE}],
    "bamba": [{"attn_layer_indices": []}, {"attn_layer_indices": [0, 1]}],
    "beam": [_DENSE, _SPARSE],
    "cohere2_moe": [_DENSE, _SPARSE],
    "deepseek_v2": [{"first_k_dense_replace": 2}, {"first_k_dense_replace": 0}],
    "deepseek_v3": [{"first_k_dense_replace": 2}, {"first_k_dense_replace": 0}],
    "deepseek_v32": [_DENSE, _SPARSE],
    "dots1": [{"first_k_dense_replace": 2}, {"first_k_dense_replace": 0}],
    "dots3_note": [_DENSE, _SPARSE],
    "ernie4_5_moe": [{"moe_layer_start_index": 2}, {"moe_layer_start_index": 0}],
    "exaone_moe": [_DENSE, _SPARSE],
    "flint": [{"mlp_only_layers": [0, 1]}, {"mlp_only_layers": []}],
    "glm4_moe": [{"first_k_dense_replace": 2}, {"first_k_dense_replace": 0}],
    "glm4_moe_lite": [_DENSE, _SPARSE],
    "glm_moe_dsa": [_DENSE, _SPARSE],
    "granitemoehybrid": [
        {**_FULL},
        {**_LINEAR},
        {**_NO_EXPERTS},
        {**_NO_EXPERTS, **_FULL},
        {**_NO_EXPERTS, **_LINEAR},
    ],
    "granitemoeshared": [{"shared_intermediate_size": 0}],
    "hy_v3": [_DENSE, _SPARSE],
    "hy_v4": [_DENSE, _SPARSE],
    "jamba": [
        {**_ATTENTION},
        {**_NO_ATTENTION},
        {"num_experts": 1, "num_experts_per_tok": 1},
        {"num_experts": 1, "num_experts_per_tok": 1, **_NO_ATTENTION},
        {"expert_layer_period": 1, "expert_layer_offset": 0},
    ],
    "kimi_linear": [{**_LINEAR, **_SPARSE}, {**_FULL, **_DENSE}],
    "laguna": [_DENSE, _SPARSE],
    "lfm2_moe": [
        {"num_dense_layers": 2, "layer_types": "conv"},
        {"num_dense_layers": 0, **_FULL},
    ],
    "lfm3": [{"layer_types": "conv"}, _FULL],
    "llama4_text": [{"moe_layers": []}, {"moe_layers": [0, 1]}],
    "mellum": [_DENSE, _SPARSE],
    "mimo_v2_flash": [_DENSE, _SPARSE],
    "minimax": [_LINEAR, _FULL],
    "minimax_m3_vl_text": [_DENSE, {"mlp_layer_types": ["dense", "sparse"]}],
    "nemotron_h": [
        {"layers_block_type": ["linear_attention", "mlp"]},
        {"layers_block_type": ["full_attention", "mlp"]},
        {"layers_block_type": ["full_attention", "moe"]},
        {"layers_block_type": ["linear_attention", "full_attention", "moe"]},
        {"moe_latent_size": 32},
    ],
    "qwen2_moe": [{"mlp_only_layers": [0, 1]}, {"decoder_sparse_step": 3}, {"mlp_only_layers": []}],
    "qwen3_5_moe_text": [_LINEAR, _FULL],
    "qwen3_5_text": [_LINEAR, _FULL],
    "qwen3_moe": [{"mlp_only_layers": [0, 1]}, {"decoder_sparse_step": 3}, {"mlp_only_layers": []}],
    "qwen3_next": [
        {"mlp_only_layers": [0, 1], **_LINEAR},
        {"mlp_only_layers": [0, 1], **_FULL},
        _LINEAR,
        _FULL,
    ],
    "qwen4_exp_text": [_LINEAR, {"layer_types": "indexed_attention"}],
    "recurrent_gemma": [{"block_types": ["recurrent"]}, {"block_types": ["attention"]}],
    "zamba": [{"layers_block_type": "linear_attention"}, {"layers_block_type": "hybrid"}],
    "zamba2": [{"layers_block_type": "linear_attention"}, {"layers_block_type": "hybrid"}],
}
# as in tests/test_zoo.py: weights that leave room for sums in other orders; gradients that cancel
SEEDS = {"bailing_hybrid": 3}
ROUNDED = {"hy_v4"}
WAYS_OF_ALL = [
    (name, i, tp, sp) for name in KINDS for i in range(len(KINDS[name])) for tp, sp in WAYS
]


def changes(name: str, index: int) -> dict[str, Any]:
    """What a config is changed by, with a list in the place of a word."""
    depth = zoo.config_of(zoo.causal_class(name).config_class, {}).num_hidden_layers
    found = KINDS[name][index].items()
    return {key: [value] * depth if isinstance(value, str) else value for key, value in found}


@pytest.mark.turns(64)
@pytest.mark.parametrize(("name", "index", "tp", "sp"), WAYS_OF_ALL)
def test_proved(name: str, index: int, tp: int, sp: bool) -> None:
    model = zoo.tiny(name, SEEDS.get(name, 1), **changes(name, index))
    plan = tpplan.load_plan("auto", model)
    sp = sp and plan.sequence_parallel
    inputs = zoo.example(model, padded=(tp == 4) != sp)
    result = tpplan.verify(model, plan, tp, sequence_parallel=sp, inputs=inputs)
    assert result.gradient_error <= 1e-5
    assert name in ROUNDED or not any(check.rounding for check in result.checks)


def test_shared_experts_of_which_there_are_none() -> None:
    model = zoo.tiny("deepseek_v3", n_shared_experts=0)
    with pytest.raises(PlanError, match="its weight holds no numbers") as caught:
        tpplan.verify(model, "auto", 2, inputs=zoo.example(model))
    assert {d.message.split(": ")[1] for d in caught.value.diagnostics} == {"colwise", "rowwise"}
