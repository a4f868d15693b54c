"""The plan that a transformers model carries becomes a plan that holds, in both modes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import tpplan
from tests.gpt import GPT
from tests.models import FAMILIES, hf
from tpplan.proof import verify

PLAIN = (*FAMILIES, "Gemma2", "Cohere", "Olmo", "Olmo2", "Glm", "NanoChat", "GPTNeoX", "Phi")


def styles(plan: tpplan.Plan) -> dict[str, str]:
    return {rule.pattern.text: rule.style for rule in plan.rules}


def refusal(model: nn.Module) -> tuple[str, ...]:
    """The message and the hint of the one problem that is reported."""
    with pytest.raises(tpplan.PlanError) as caught:
        tpplan.from_hf(model)
    (problem,) = caught.value.diagnostics
    assert problem.hint is not None
    return problem.message, problem.hint


class Holder(nn.Module):
    """A user's own module around a model of transformers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Any) -> Any:
        return self.inner(input_ids=input_ids).logits


@pytest.mark.turns(24)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sp", [False, True])
def test_places_what_the_shipped_plan_places(family: str, sp: bool) -> None:
    model = hf(family, device="meta")
    ours = tpplan.check(model, tpplan.from_hf(model), 2, sp)
    shipped = tpplan.check(model, "llama.yaml", 2, sp)

    def found(compiled: Any) -> dict[str, Any]:
        parameters = compiled.parameters.items()
        return {name: (p.placement, p.local_shape, p.summed) for name, p in parameters}

    assert found(ours) == found(shipped)
    assert {p: m.style for p, m in ours.modules.items()} == {
        p: m.style for p, m in shipped.modules.items()
    }


@pytest.mark.turns(24)
@pytest.mark.parametrize("family", PLAIN)
def test_is_proved(family: str) -> None:
    model = hf(family, vocab_size=136)
    plan = tpplan.from_hf(model)
    for sp in (False, True):
        assert verify(model, plan, 2, sequence_parallel=sp).gradient_error < 1e-5


@pytest.mark.parametrize("family", PLAIN)
def test_text_is_a_plan_file(family: str, tmp_path: Path) -> None:
    plan = tpplan.from_hf(hf(family, device="meta"))
    file = tmp_path / "mine.yaml"
    file.write_text(plan.text)
    again = tpplan.load_plan(file)
    assert [(r.pattern, r.style, r.options) for r in again.rules] == [
        (r.pattern, r.style, r.options) for r in plan.rules
    ]
    assert (again.models, again.description) == (plan.models, plan.description)
    assert plan.models == (f"{family}ForCausalLM",)
    assert plan.name == f"<{family}ForCausalLM's transformers plan>"


def test_norms_where_they_are() -> None:
    layer = "model.layers.*"
    found = styles(tpplan.from_hf(hf("Qwen3", device="meta")))
    assert found[f"{layer}.self_attn.q_norm"] == "replicate"
    assert found[f"{layer}.input_layernorm"] == found["model.norm"] == "sequence_parallel"
    # over the whole width, which is sharded here
    found = styles(tpplan.from_hf(hf("Olmo2", device="meta")))
    assert found[f"{layer}.self_attn.q_norm"] == found[f"{layer}.self_attn.k_norm"] == "colwise"
    assert found[f"{layer}.post_feedforward_layernorm"] == "sequence_parallel"
    # without any parameter: known by what they do, which no activation or rotation does
    for family in ("Olmo", "NanoChat"):
        model = hf(family, device="meta")
        found = styles(tpplan.from_hf(model))
        assert found[f"{layer}.input_layernorm"] == "sequence_parallel"
        stream = {pattern for pattern, style in found.items() if style == "sequence_parallel"}
        assert stream <= {p for p in found if "norm" in p}


def test_no_name_counts() -> None:
    """Norms, positions, the embedding and the head of a model with names of its own."""
    model: Any = GPT()
    model._tp_plan = {
        "tok_emb": "embedding_rowwise",
        "blocks.*.attn.q": "colwise",
        "blocks.*.attn.k": "colwise",
        "blocks.*.attn.v": "colwise",
        "blocks.*.attn.out": "rowwise",
        "blocks.*.mlp.fc": "colwise",
        "blocks.*.mlp.proj": "rowwise",
        "head": "colwise_rep",
        "blocks.*.nothing": "colwise",
    }
    model.get_input_embeddings = lambda: model.tok_emb
    model.get_output_embeddings = lambda: model.head
    for block in model.blocks:
        block.attn.q_norm = nn.RMSNorm(8)
    found = styles(tpplan.from_hf(model))
    assert found.pop("blocks.*.attn.q_norm") == "replicate"
    assert found["pos_emb"] == found["blocks.*.ln1"] == found["ln_f"] == "sequence_parallel"
    assert found["tok_emb"] == found["head"] == "vocab"
    assert set(found.values()) == {"vocab", "colwise", "rowwise", "sequence_parallel"}
    assert not any("nothing" in pattern for pattern in found)


def test_layers_without_a_partner_stay_whole() -> None:
    model = hf("Llama", device="meta")
    model._tp_plan["model.layers.*.self_attn.o_proj"] = "colwise_gather_output"
    assert styles(tpplan.from_hf(model))["model.layers.*.self_attn.o_proj"] == "replicate"


def test_gate_and_up_in_one() -> None:
    plan = tpplan.from_hf(hf("Glm", device="meta"))
    (rule,) = [r for r in plan.rules if r.pattern.text.endswith("gate_up_proj")]
    assert rule.style == "colwise"
    assert dict(rule.options) == {"packed": {"parts": ("gate", "up")}}


def test_a_layer_of_its_own_kind_is_named_exactly() -> None:
    model = hf("Llama", device="meta")
    model._tp_plan["model.layers.1.mlp.gate_proj"] = "replicate"
    found = styles(tpplan.from_hf(model))
    assert found["model.layers.0.mlp.gate_proj"] == "colwise"
    assert found["model.layers.1.mlp.gate_proj"] == "replicate"
    assert "model.layers.*.mlp.gate_proj" not in found


def test_a_model_within_a_module() -> None:
    model = Holder(hf("Llama"))
    plan = tpplan.from_hf(model)
    found = styles(plan)
    assert found["inner.lm_head"] == found["inner.model.embed_tokens"] == "vocab"
    for sp in (False, True):
        assert verify(model, plan, 2, sequence_parallel=sp).gradient_error < 1e-5


def test_the_model_is_only_looked_at() -> None:
    model = hf("Olmo2")
    before = {name: (p, p._version) for name, p in model.named_parameters()}
    carried = dict(model._tp_plan)
    tpplan.from_hf(model)
    assert {name: (p, p._version) for name, p in model.named_parameters()} == before
    assert model._tp_plan == carried
    assert model.training


def test_models_without_a_plan() -> None:
    import transformers

    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2)
    message, hint = refusal(transformers.GPT2LMHeadModel(config))
    assert message == "GPT2LMHeadModel carries no tensor-parallel plan of transformers"
    assert "gpt2.yaml" in hint
    message, hint = refusal(nn.Linear(2, 2))
    assert message.startswith("Linear carries no")
    assert "write a plan" in hint


def test_a_plan_for_the_head_alone() -> None:
    message, _ = refusal(hf("Bamba", device="meta", mamba_d_head=16, mamba_n_heads=8))
    assert message == "the transformers plan of BambaForCausalLM shards no layer, only lm_head"


# family -> what of its config makes a small mixture with everything that the family may have
MIXTURES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "mlp_only_layers": [0],
    },
    "Glm4Moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "head_dim": 8,
    },
    "GraniteMoeSWA": {"num_local_experts": 4, "shared_intermediate_size": 48},
}


def mixture(family: str, device: str = "cpu") -> Any:
    return hf(family, device=device, vocab_size=136, **MIXTURES[family])


@pytest.mark.turns(24)
@pytest.mark.parametrize("family", MIXTURES)
def test_mixtures_are_proved(family: str) -> None:
    model = mixture(family)
    plan = tpplan.from_hf(model)
    for sp in (False, True):
        found = verify(model, plan, 2, sequence_parallel=sp)
        assert found.gradient_error < 1e-5
        assert found.rank_share < 0.55


def test_experts() -> None:
    found = styles(tpplan.from_hf(mixture("Mixtral", "meta")))
    layer = "model.layers.*.mlp"
    assert {p: s for p, s in found.items() if p.startswith(layer)} == {
        f"{layer}.gate": "replicate",
        f"{layer}.experts": "experts",
    }


def test_an_mlp_that_transformers_leaves_whole() -> None:
    model = mixture("Qwen2Moe", "meta")
    assert not any("shared" in pattern for pattern in model._tp_plan)
    found = styles(tpplan.from_hf(model))
    block = "model.layers.*.mlp"
    assert {p: s for p, s in found.items() if p.startswith(f"{block}.shared")} == {
        f"{block}.shared_expert.gate_proj": "colwise",
        f"{block}.shared_expert.up_proj": "colwise",
        f"{block}.shared_expert.down_proj": "rowwise",
        f"{block}.shared_expert_gate": "replicate",
    }
    assert found[f"{block}.gate_proj"] == "colwise"  # of the layer without experts
    # one beside the block, with both of its halves in one layer
    plan = tpplan.from_hf(mixture("GraniteMoeSWA", "meta"))
    found = styles(plan)
    assert found["model.layers.*.shared_mlp.output_linear"] == "rowwise"
    (rule,) = [r for r in plan.rules if r.pattern.text.endswith("input_linear")]
    assert rule.style == "colwise"
    assert dict(rule.options) == {"packed": {"parts": ("gate", "up")}}


def test_experts_that_are_not_stacked() -> None:
    model = hf("Llama", device="meta")
    model._tp_plan["model.layers.*.mlp"] = "moe_tp_experts"
    message, _ = refusal(model)
    assert message.startswith("model.layers.*.mlp (2 of them): no experts in parameters")


def test_unknown_styles() -> None:
    model = hf("Llama", device="meta")
    model._tp_plan["model.layers.*.mlp"] = "all_reduce"
    message, _ = refusal(model)
    assert message.startswith("model.layers.*.mlp (2 of them): ")
    assert "'all_reduce'" in message
