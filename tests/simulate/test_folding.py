"""Of equal layers only a few are executed: the report is that of executing all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tpplan
from benchmarks import zoo
from benchmarks.dry_run import CONFIGS
from tests.gpt import GPT
from tests.models import hf
from tests.rewrite import MODES
from tpplan import Report
from tpplan.planner.match import match
from tpplan.simulate.folding import find_folds

pytestmark = pytest.mark.turns(48)


def both(model: Any, plan: Any, **options: Any) -> tuple[Report, Report]:
    """Dry runs at tp 2 with a few layers executed, and with all of them."""
    folded = tpplan.dry_run(model, plan, 2, **options)
    return folded, tpplan.dry_run(model, plan, 2, fold=False, **options)


def assert_equal(folded: Report, whole: Report) -> None:
    """All that users see of the two."""
    assert folded.collectives == whole.collectives
    assert folded.compiled.parameters == whole.compiled.parameters
    assert folded.compiled.modules.keys() == whole.compiled.modules.keys()
    assert folded.memory == whole.memory
    assert folded.other_memory == whole.other_memory
    assert folded.time.total.seconds == pytest.approx(whole.time.total.seconds)
    assert folded.time.flops == whole.time.flops


DEEP: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 8},
    "qwen3": {"num_hidden_layers": 8, "layer_types": ["full_attention"] * 8},
    "gpt2": {"n_layer": 8},
    "gptj": {"n_layer": 8},
    "gpt_neox": {"num_hidden_layers": 8},
    "falcon": {"num_hidden_layers": 8},
    "bloom": {"n_layer": 8},
    "gemma2": {"num_hidden_layers": 16, "layer_types": ["sliding_attention", "full_attention"] * 8},
    "gpt_neo": {"num_layers": 16, "attention_types": [[["global", "local"], 8]]},
    "bert": {"num_hidden_layers": 8},
    "olmo2": {"num_hidden_layers": 8},
}


@pytest.mark.turns(24)
@MODES
@pytest.mark.parametrize("kind", DEEP)
def test_as_if_all_were_executed(kind: str, sp: bool) -> None:
    model = zoo.tiny(kind, **DEEP[kind])
    folded, whole = both(model, "auto", inputs=zoo.example(model), sequence_parallel=sp)
    assert folded.executed
    assert not whole.executed
    assert_equal(folded, whole)


@pytest.mark.turns(48)
def test_encoder_and_decoder() -> None:
    model = zoo.other("t5", num_layers=9, num_decoder_layers=8)
    folded, whole = both(model, "auto", inputs=zoo.example(model))
    assert set(folded.executed) == {"encoder.block", "decoder.block"}
    assert_equal(folded, whole)


@pytest.mark.turns(24)
@MODES
def test_weights_outside_of_the_cut_regions(sp: bool) -> None:
    """Weight gradients are left to the next collective in each layer as in the one before it.

    Of DeepSeek-V3's shape: two products of each layer's attention are whole on each rank.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(CONFIGS / "deepseek-v3.json")
    config.update({"num_hidden_layers": 13, "n_routed_experts": 16, "vocab_size": 512})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).bfloat16()
    folded, whole = both(model, "deepseek_v3.yaml", sequence_parallel=sp)
    assert folded.executed == {"model.layers": (5, 13)}
    assert_equal(folded, whole)


def folds(model: nn.Module, plan: str = "llama.yaml") -> list[tuple[str, int, int, int]]:
    found = find_folds(model, match(tpplan.load_plan(plan), model)[0])
    return [(fold.stack, fold.start, fold.period, fold.kept) for fold in found]


def test_what_repeats() -> None:
    assert folds(hf(device="meta", num_hidden_layers=9)) == [("model.layers", 1, 1, 3)]
    assert folds(hf(device="meta", num_hidden_layers=3)) == []
    odd = hf(device="meta", num_hidden_layers=9)
    odd.model.layers[8].mlp.act_fn = nn.Tanh()
    assert folds(odd) == []
    start = hf(device="meta", num_hidden_layers=12)
    start.model.layers[0].mlp.act_fn = nn.Tanh()
    start.model.layers[1].mlp.act_fn = nn.Tanh()
    assert folds(start) == [("model.layers", 2, 1, 4)]
    tied = hf(device="meta", num_hidden_layers=9)
    tied.model.layers[7].mlp.up_proj.weight = tied.model.layers[3].mlp.up_proj.weight
    assert folds(tied) == []


def test_a_rule_for_one_layer_is_no_repetition() -> None:
    plan = {
        "tpplan": 1,
        "extends": "llama.yaml",
        "rules": {
            "model.layers.5.mlp.gate_proj": "replicate",
            "model.layers.5.mlp.up_proj": "replicate",
            "model.layers.5.mlp.down_proj": "replicate",
        },
    }
    model = hf(device="meta", num_hidden_layers=9)
    report = tpplan.dry_run(model, plan, 2, 1, 16)
    assert not report.executed
    assert report.counts("forward")["reduce_scatter"] == 2 * 9


@pytest.mark.turns(24)
def test_what_cannot_be_seen_to_repeat_is_executed() -> None:
    """A model that reads all of its layers by their number runs whole."""

    class ByNumber(GPT):
        def forward(self, idx: torch.Tensor) -> torch.Tensor:
            if len(self.blocks) < 9:
                raise IndexError("a layer is missing")
            return super().forward(idx)

    model = ByNumber(layers=9)
    report = tpplan.dry_run(model, "gpt.yaml", 2, 1, 8)
    assert not report.executed
    assert_equal(report, tpplan.dry_run(GPT(layers=9), "gpt.yaml", 2, 1, 8))


@pytest.mark.turns(24)
def test_a_large_model_in_little_time_and_memory() -> None:
    """Llama-3.1-405B: its shape, not its weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126}
    heads = {"num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": 128256}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**shape, **heads, head_dim=128)).bfloat16()
    report = tpplan.dry_run(model, "llama.yaml", 8, 1, 8192)
    assert report.executed == {"model.layers": (3, 126)}
    assert report.parameter_counts["total"] == 405_853_388_800
    assert report.counts("backward")["reduce_scatter"] == 2 * 126 + 1
    states = report.memory.states_per_rank - report.memory.buffers_per_rank
    assert states == 16 * report.parameter_counts["per_rank"] + 4 * len(report.compiled.parameters)
