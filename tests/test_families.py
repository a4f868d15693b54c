"""``plan="auto"`` for models with other heads than the shipped plans list: by their family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import tpplan
from tests.rewrite import MODES
from tpplan.planner import speaks_of_all
from tpplan.shipped import shipped_plans

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
GPT2 = {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 64, "n_positions": 32}
SIDES = ("encoder", "decoder")
COUNTS = {"layers": 2, "attention_heads": 4}
OF_BOTH = {f"{side}_{of}": n for side in SIDES for of, n in {**COUNTS, "ffn_dim": 64}.items()}
# class -> its config, and what is left whole
MODELS: Mapping[str, tuple[str, Mapping[str, Any], tuple[str, ...]]] = {
    "LlamaForSequenceClassification": ("Llama", {"num_key_value_heads": 2}, ("score",)),
    "LlamaForQuestionAnswering": ("Llama", {}, ("qa_outputs",)),
    "LlamaModel": ("Llama", {"num_key_value_heads": 1}, ()),
    "Qwen3ForTokenClassification": ("Qwen3", {"head_dim": 8, "num_key_value_heads": 2}, ("score",)),
    "MixtralForSequenceClassification": (
        "Mixtral",
        {"num_key_value_heads": 2, "num_local_experts": 4},
        ("score",),
    ),
    "BertForSequenceClassification": ("Bert", {}, ("classifier",)),
    "BertForQuestionAnswering": ("Bert", {}, ("qa_outputs",)),
    "RobertaForSequenceClassification": ("Roberta", {}, ("classifier",)),
    "GPT2Model": ("GPT2", GPT2, ()),
    "GPT2ForSequenceClassification": ("GPT2", GPT2, ("score",)),
}


def built(name: str) -> nn.Module:
    family, own, _ = MODELS[name]
    sizes = {"pad_token_id": 0} if family == "GPT2" else SIZES
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, name)(
        getattr(transformers, f"{family}Config")(**{**sizes, **own})
    )
    return model


@pytest.mark.turns(24)
@MODES
@pytest.mark.parametrize("name", MODELS)
def test_proved(name: str, sp: bool) -> None:
    model = built(name)
    compiled = tpplan.check(model, "auto", 2, sp)
    assert compiled.plan.name.endswith(f".yaml for {name}")
    whole = {path for path, plan in compiled.modules.items() if plan.style == "replicate"}
    assert whole.issuperset(MODELS[name][2])
    sharded = [p for p in compiled.parameters.values() if p.placement.is_shard() or p.rule is None]
    assert sharded


@pytest.mark.turns(24)
def test_a_table_that_another_stack_has_too() -> None:
    """The encoder, of which no rule speaks, looks up in the decoder's table: cut as that is."""
    counts = {f"num_{side}_{of}": n for side in SIDES for of, n in COUNTS.items()}
    widths = {f"{side}_ffn_dim": 64 for side in SIDES}
    config = transformers.ProphetNetConfig(hidden_size=32, vocab_size=64, **counts, **widths)
    compiled = tpplan.check(transformers.ProphetNetModel(config), "auto", 2)
    assert compiled.modules["encoder.word_embeddings"].style == "vocab"
    assert compiled.modules["encoder.layers"].style == "replicate"


@pytest.mark.turns(24)
def test_layers_that_the_plan_of_the_family_does_not_speak_of() -> None:
    """A search finds one that does: the encoder's attention is of other modules."""
    config = transformers.BigBirdPegasusConfig(
        d_model=32, vocab_size=64, attention_type="original_full", **OF_BOTH
    )
    model = transformers.BigBirdPegasusModel(config)
    assert not speaks_of_all(model, tpplan.load_plan("auto", model))
    with pytest.warns(UserWarning, match="no shipped plan is for BigBirdPegasusModel"):
        assert tpplan.check(model, "auto", 2).sequence_parallel


def test_another_stack_of_the_same_file() -> None:
    class LlamaModel(nn.Module):
        """Of no family, whatever it is called."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

    with pytest.raises(tpplan.PlanError, match="no shipped plan"):
        tpplan.load_plan("auto", LlamaModel())


def test_plans_that_list_a_class() -> None:
    """Those that are read for it are all that list it."""
    everything = shipped_plans()
    for name in sorted({name for plan in everything for name in plan.models})[::8]:
        listing = [plan.name for plan in everything if name in plan.models]
        assert [plan.name for plan in shipped_plans({name})] == listing
    assert shipped_plans({"NoSuchClass"}) == []
