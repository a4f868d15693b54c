"""Plans that are suggested: right, readable, the same every time; and what is refused."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from tests.gpt import GPT
from tests.models import VOCAB, hf
from tests.planner import inlined
from tests.ranks import Ranks
from tests.suggestion.odd import Model, Running, Short, Sorted, Zag
from tpplan.cli import main
from tpplan.language import Pattern
from tpplan.suggestion import Suggestion, explained, find

pytestmark = pytest.mark.turns(32)


def rules(plan: tpplan.Plan) -> dict[str, object]:
    """Those of a plan's file, of which a style without options is its name."""
    found: dict[str, object] = yaml.safe_load(plan.text)["rules"]
    return found


def verified(model: nn.Module, plan: tpplan.Plan, tp: int = 2) -> float:
    """The share of a rank, of a plan that is right in both modes."""
    found = [tpplan.verify(model, plan, tp, sequence_parallel=sp) for sp in (False, True)]
    return max(one.rank_share for one in found)


def test_llama() -> None:
    model = hf("Llama")
    plan = tpplan.suggest(model, 2)
    assert rules(plan) == {
        "model.embed_tokens": "vocab",
        "model.layers.*.self_attn.{q,k,v}_proj": "colwise",
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.mlp.{gate,up}_proj": "colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
        "model.layers.*.{input,post_attention}_layernorm": "sequence_parallel",
        "model.norm": "sequence_parallel",
        "lm_head": "vocab",
    }
    assert verified(model, plan, 4) < 0.27


def test_the_head_of_the_file_says_what_was_proved() -> None:
    head = [line for line in tpplan.suggest(GPT(), 2).text.splitlines() if line.startswith("#")]
    assert head[0] == f"# Suggested by tpplan {tpplan.__version__} for GPT at tp 2; yours to edit."
    assert torch.__version__.partition("+")[0] in head[1]
    assert "TP and TP+SP" in head[1]
    assert head[2].startswith("# outputs and every gradient within 1e-0")


def test_the_same_model_has_the_same_plan_byte_for_byte() -> None:
    texts = set()
    for seed in range(2):
        torch.manual_seed(seed)  # the numbers of a model do not tell what it is
        texts.add(tpplan.suggest(GPT(), 2).text)
    assert len(texts) == 1


def test_nothing_hangs_on_names() -> None:
    model = Model()
    plan = tpplan.suggest(model, 2)
    found = rules(plan)
    assert found["m1.*.a1"] == {"style": "colwise", "packed": ["q", "k", "v"]}
    assert found["m1.*.a3"] == {"style": "colwise", "packed": ["gate", "up"]}
    assert found["m1.*.a{2,4}"] == "rowwise"
    assert found["m0"] == found["m3"] == "vocab"
    assert verified(model, plan) < 0.56
    # the embedding, and one for each layer: its attention and MLP are reduced together
    assert tpplan.verify(model, plan, 2).counts["forward"]["all_reduce"] == 3


def test_layers_whose_own_code_takes_sizes_from_the_stream() -> None:
    model = inlined.Model(inlined.OfAttributes)
    plan = tpplan.suggest(model, tp=2, inputs=inlined.INPUT)
    assert plan.text is not None
    assert "TP and TP+SP" in plan.text
    assert "layers: layers.*.before" in plan.text


def test_a_short_convolution_of_channels() -> None:
    model = Model(Short)
    plan = tpplan.suggest(model, 2)
    found = rules(plan)
    assert found["m1.*.d1"] == {"style": "colwise", "packed": ["part1", "part2", "part3"]}
    assert found["m1.*.d2.weight"] == "colwise"
    assert verified(model, plan) < 0.54


def test_what_cannot_be_sharded_is_whole_with_the_reason() -> None:
    model = Model(Zag)
    plan = tpplan.suggest(model, 2)
    assert rules(plan)["m1.*.b1"] == {"style": "replicate", "input": "gather"}
    before = plan.text[: plan.text.index("m1.*.b1: ")]
    assert "# not sharded: m1.*.b1.up: the columns of one rank" in before
    verified(model, plan)


def test_a_model_that_changes_from_call_to_call_is_refused() -> None:
    with pytest.raises(tpplan.PlanError, match="does something else from call to call in training"):
        tpplan.suggest(Model(skipping=True), 2)


def test_a_model_of_which_nothing_can_be_sharded_is_refused() -> None:
    with pytest.raises(tpplan.PlanError, match="no part of the model was found") as refused:
        tpplan.suggest(Model(Sorted), 2)
    assert "m1.*.down" in str(refused.value)


def test_heads_that_tp_does_not_divide_are_left_whole() -> None:
    model = hf("Llama", hidden_size=48, num_attention_heads=6, num_key_value_heads=6)
    plan = tpplan.suggest(model, 4)
    assert "tp 4 does not divide its 6 heads" in " ".join(plan.text.replace("#", "").split())
    assert rules(plan)["model.layers.*.mlp.down_proj"] == "rowwise"


def test_one_rank_needs_no_plan() -> None:
    with pytest.raises(tpplan.PlanError, match="at least 2 ranks"):
        tpplan.suggest(GPT(), 1)


def test_the_model_is_not_changed() -> None:
    model = GPT()
    before = {name: p.clone() for name, p in model.named_parameters()}
    tpplan.suggest(model, 2)
    assert model.training
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_auto_for_a_class_that_no_plan_lists() -> None:
    with pytest.warns(UserWarning, match=r"no shipped plan is for Model.*tpplan\.suggest"):
        report = tpplan.dry_run(Model(), "auto", tp=2, seq=8)
    assert report.counts("forward")["all_reduce"] == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tpplan.dry_run(hf("Llama"), "auto", tp=2, seq=8)


def test_auto_with_the_sequence_cut_of_what_holds_without() -> None:
    """It is said of the model, not of lines of a file that the user never saw."""
    said = "no plan was found that shards the sequence of Model, one without was"
    with pytest.raises(tpplan.PlanError, match=f"{said}; .*'cumsum'") as caught:
        tpplan.dry_run(Model(Running), "auto", tp=2, seq=8, sequence_parallel=True)
    assert "suggested.yaml" not in str(caught.value)
    with pytest.warns(UserWarning, match="no shipped plan is for Model"):
        tpplan.dry_run(Model(Running), "auto", tp=2, seq=8)


def test_a_stack_inside_of_the_layers() -> None:
    """ALBERT's attention calls its projections and its norm itself, and is no layer."""
    config = transformers.AlbertConfig(
        vocab_size=VOCAB,
        embedding_size=16,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_hidden_layers=2,
        max_position_embeddings=64,
    )
    plan = tpplan.suggest(transformers.AlbertModel(config), 2)
    assert yaml.safe_load(plan.text)["layers"].endswith(".attention.LayerNorm")
    assert plan.sequence_parallel


def test_costs_say_why_a_plan_was_taken() -> None:
    found = find(hf("Llama"), 2, seq=16)
    assert isinstance(found, Suggestion)
    assert {c.name for c in found.candidates} == {"TP", "TP+SP"}
    assert found.candidates[0].sequence_parallel == found.plan.sequence_parallel
    text = explained(found)
    assert "a training step at tp 2, batch 1, sequence 16, h100-nvlink" in text
    assert "* TP" in text
    assert "h100-nvlink" in text


def test_costs_of_images_are_of_no_number_of_tokens() -> None:
    config = transformers.ViTConfig(
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=2,
        num_hidden_layers=2,
        image_size=16,
        patch_size=8,
    )
    found = find(transformers.ViTModel(config), 2)
    assert "a training step at tp 2, batch 1, h100-nvlink, as modelled" in explained(found)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "my.yaml"
    model = "tests.suggestion.odd:made"
    assert main(["suggest", "--model", model, "--tp", "2", "-o", str(file), "--explain"]) == 0
    out, err = capsys.readouterr()
    assert f"{file}: {len(tpplan.load_plan(file).rules)} rules, proved at tp 2" in out
    assert "plans were compiled" in err
    assert main(["check", str(file), "--model", model, "--tp", "2"]) == 0
    capsys.readouterr()
    assert main(["suggest", "--model", model, "--tp", "2"]) == 0
    assert capsys.readouterr().out == file.read_text()
    assert main(["suggest", "--model", "tests.suggestion.odd:random", "--tp", "2"]) == 1
    assert "does something else from call to call" in capsys.readouterr().err


def auto_job(mesh: DeviceMesh) -> float:
    """How far the outputs of a model sharded by a suggestion are from its own."""
    torch.manual_seed(0)
    model = Model().eval()
    ids = torch.arange(10).view(2, 5)
    with torch.no_grad():
        wanted = model(ids)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sharded = tpplan.parallelize(model, "auto", mesh)
        return float((sharded(ids) - wanted).abs().max())


def test_all_ranks_come_to_the_same_plan(ranks: Ranks) -> None:
    assert max(ranks.run(2, auto_job)) < 1e-5


@pytest.mark.turns(48)
@pytest.mark.parametrize("name", ["gpt2", "bert", "falcon-40b", "t5", "mixtral", "deepseek_v3"])
def test_as_good_as_the_shipped_plan(name: str) -> None:
    from benchmarks import zoo

    make = list(zoo.makers([name]).values())[-1]
    model, shipped = make(), tpplan.load_plan("auto", make())
    inputs = zoo.example(model)
    plan = tpplan.suggest(model, 2, inputs)
    for mode in (False, True):
        own, theirs = (
            tpplan.verify(model, p, 2, sequence_parallel=mode, inputs=inputs)
            for p in (plan, shipped)
        )
        assert own.rank_share <= theirs.rank_share + 0.005
        for phase in ("forward", "backward"):
            assert sum(own.counts[phase].values()) <= sum(theirs.counts[phase].values())


def test_patterns_match_what_they_are_for() -> None:
    from tpplan.suggestion.draft import Decision
    from tpplan.suggestion.patterns import Names, patterns_of

    model = hf("Qwen3")
    norms = ("input_layernorm", "self_attn.q_norm", "self_attn.k_norm")
    decisions = {
        f"model.layers.{i}.{norm}": Decision("replicate") for i in (0, 1) for norm in norms
    }
    decisions["model.layers.1.mlp.up_proj"] = Decision("colwise")
    found = {text: paths for text, _, paths in patterns_of(decisions, Names(model))}
    assert set(found) == {
        "model.layers.*.input_layernorm",
        "model.layers.*.self_attn.{q,k}_norm",
        "model.layers.1.mlp.up_proj",
    }
    for text, paths in found.items():
        assert all(Pattern(text).matches(path) for path in paths)
