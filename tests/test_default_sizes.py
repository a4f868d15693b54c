"""Every causal-LM type as its default config has it, on the meta device: the shipped plan fits.

The zoo's models are small, and their configs are made for it. What a user has is as large as the
defaults: weights that no proof computes with, ids in buffers without numbers, other layers.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

import tpplan
from benchmarks import zoo
from tests.shipped import class_of, plans
from tpplan.planner import compile_plan

# what transformers cannot build, or run, by its defaults alone
NOT_ALONE = {
    "bamba": "no layer has attention, and its cache looks for one",
    "blenderbot": "as many caches as the encoder has layers",
    "blt": "its cache asks for a number of layers",
    "deepseek_v2": "no number of experts to choose",
    "dots1": "no number of experts",
    "granitemoehybrid": "as bamba",
    "hunyuan_v1_moe": "no width of heads",
    "lfm2_moe": "no kinds of layers",
    "nemotron": "no number of key-value heads",
    "cohere_compass_text": "no angles of a kind of layer",
    "hunyuan_v1_dense": "no width of heads",
    "ministral": "no width of heads",
    "qwen4_exp": "no sizes of its indexer",
    "qwen4_exp_text": "no sizes of its indexer",
    "xmod": "no language",
}
# what needs inputs besides ids, or others
INPUTS = {
    "git": {"pixel_values": torch.zeros(2, 3, 224, 224)},
    "mllama": {"cross_attention_states": torch.zeros(2, 40, 4096)},
    "musicgen": {"input_ids": torch.zeros(8, 8, dtype=torch.long)},
    "musicgen_melody": {"input_ids": torch.zeros(8, 8, dtype=torch.long)},
    # the state that they make themselves is all heads'
    "rwkv": {"use_cache": False},
    "xlstm": {"use_cache": False},
}
# why not: what is said of them
REFUSED = {
    "big_bird": "puts another module in this one's place",
    "bitnet": "tp 2 does not divide its 5 heads",
    "falcon": "2 ranks do not fit 71 of 'q'",
}


def built(name: str) -> nn.Module:
    """A model as large as its default config, without numbers."""
    cls = zoo.causal_class(name)
    with torch.device("meta"):
        model: nn.Module = cls(cls.config_class())
    return model


@pytest.mark.turns(64)
@pytest.mark.parametrize(
    "name", [name for name in zoo.CAUSAL if class_of(name) in plans() and name not in NOT_ALONE]
)
def test_the_shipped_plan_fits(name: str) -> None:
    model = built(name)
    plan = tpplan.load_plan("auto", model)
    given = {"input_ids": torch.zeros(2, 8, dtype=torch.long), **INPUTS.get(name, {})}
    inputs = given if name in INPUTS else None
    if name in REFUSED:
        with pytest.raises(tpplan.PlanError, match=REFUSED[name]):
            compile_plan(model, plan, 2, plan.sequence_parallel, inputs=inputs)
        return
    compiled = compile_plan(model, plan, 2, plan.sequence_parallel, inputs=inputs)
    assert any(entry.placement.is_shard() for entry in compiled.parameters.values())


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", ["bert", "llama4_text", "minimax_m2"])
def test_what_small_models_do_not_show(name: str) -> None:
    """Kinds of tokens in a buffer; ids that follow their table; routers of thousands of columns."""
    model = built(name)
    assert compile_plan(model, tpplan.load_plan("auto", model), 2, True).parameters


@pytest.mark.turns(12)
@pytest.mark.parametrize(
    "name",
    [
        "BartForConditionalGeneration",
        "T5ForConditionalGeneration",
        "ViTForImageClassification",
        "WhisperForConditionalGeneration",
    ],
)
def test_what_it_is_called_with_is_told_by_class_and_config(name: str) -> None:
    cls = getattr(transformers, name)
    with torch.device("meta"):
        model = cls(cls.config_class())
    tpplan.check(model, "auto", tp=2)
