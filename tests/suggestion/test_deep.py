"""Deep and large models: plans are found on few of their layers, or on the same code made small."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import yaml
from torch import nn

import tpplan
from tests.models import hf

pytestmark = pytest.mark.turns(32)

ATTENTION = {
    "model.layers.*.self_attn.{q,k,v}_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
}
LLAMA = ATTENTION | {
    "model.layers.*.mlp.{gate,up}_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
}
MIXTRAL = ATTENTION | {
    "model.layers.*.mlp.gate": "replicate",
    "model.layers.*.mlp.experts": {"style": "experts", "shard": "experts"},
}
AROUND = {
    "model.embed_tokens": "vocab",
    "model.layers.*.{input,post_attention}_layernorm": "sequence_parallel",
    "model.norm": "sequence_parallel",
    "lm_head": "vocab",
}


def large() -> nn.Module:
    made: nn.Module = hf(
        device="meta",
        vocab_size=32000,
        num_hidden_layers=9,
        hidden_size=2048,
        intermediate_size=8192,
        num_attention_heads=16,
    )
    return made


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        pytest.param(lambda: hf("Llama", num_hidden_layers=9), LLAMA, id="deep"),
        pytest.param(large, LLAMA, id="large"),
        pytest.param(lambda: hf("Mixtral", num_hidden_layers=2), MIXTRAL, id="experts"),
    ],
)
def test_a_rule_is_of_every_layer(make: Callable[[], nn.Module], wanted: dict[str, object]) -> None:
    plan = tpplan.suggest(make(), 2)
    assert yaml.safe_load(plan.text)["rules"] == wanted | AROUND
