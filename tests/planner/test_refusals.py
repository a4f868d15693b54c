"""What the planner refuses: with its place in the plan, and with the model as it was."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tpplan
from tests.gpt import GPT
from tests.models import hf
from tpplan.planner import compile_plan


def llama_rules(**changes: Any) -> dict[str, Any]:
    return {"tpplan": 1, "extends": "llama.yaml", "rules": changes}


def fingerprint(model: nn.Module) -> str:
    """Every parameter, buffer, class and attribute name of a model, in one hash."""
    digest = hashlib.sha256()
    for name, module in model.named_modules():
        digest.update(f"{name} {type(module)} {sorted(vars(module))}".encode())
    for name, tensor in model.state_dict(keep_vars=True).items():
        digest.update(f"{name} {type(tensor)} {id(tensor)} {tensor.requires_grad}".encode())
        digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()


def test_nothing_of_the_model_changes() -> None:
    model = hf()
    before = fingerprint(model)
    compile_plan(model, tpplan.load_plan("llama.yaml", model), 4)
    assert fingerprint(model) == before
    assert model.training


class Scales(nn.Module):
    """Of heads that are in a dimension of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(4, 1, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.unflatten(-1, (-1, 8)).unsqueeze(-2) * self.gamma).flatten(-3)


REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, int, str]] = {
    "pattern without a match": (
        hf,
        llama_rules(**{"model.layers.*.self_attn.qkv_proj": "colwise"}),
        2,
        "'model.layers.*.self_attn.qkv_proj' matches no module",
    ),
    "two patterns on one module": (
        hf,
        llama_rules(**{"model.layers.*.mlp.u*": "colwise"}),
        2,
        "two patterns claim model.layers.*.mlp.up_proj",
    ),
    "no weight": (
        hf,
        llama_rules(**{"model.layers.*.mlp": "colwise"}),
        2,
        "has no weight of its own to shard; its parts are gate_proj",
    ),
    "a parameter of another shape and name": (
        lambda: nn.Sequential(nn.Linear(16, 32), Scales(), nn.Linear(32, 16)),
        {"tpplan": 1, "rules": {"0": "colwise", "1": "colwise", "2": "rowwise"}},
        2,
        "no weight of its own to shard; its parameters take rules of their own: gamma",
    ),
    "a norm of the stream cut by columns": (
        hf,
        llama_rules(**{"model.norm": "colwise"}),
        2,
        "lm_head: vocab: its input is already sharded, by model.norm",
    ),
    "a module that does more than multiply": (
        lambda: nn.Sequential(Scaled(16, 32), nn.Linear(32, 16)),
        {"tpplan": 1, "rules": {"0": "colwise", "1": "rowwise"}},
        2,
        "colwise: it does not just multiply by its weight",
    ),
    "width": (lambda: hf(intermediate_size=90), "llama.yaml", 4, "tp may be 1, 2, 3, 5"),
    "head count": (
        lambda: hf(num_attention_heads=6, num_key_value_heads=2, hidden_size=96),
        "llama.yaml",
        4,
        "self_attn.q_proj (2 of them): colwise: tp 4 does not divide its 6 heads",
    ),
    "key-value heads that ranks can neither divide nor share": (
        lambda: hf(num_attention_heads=12, num_key_value_heads=3, hidden_size=96),
        "llama.yaml",
        4,
        "self_attn.v_proj (2 of them): colwise: tp 4 does not divide its 3 heads",
    ),
    "fewer heads than ranks": (
        lambda: hf(num_attention_heads=2, num_key_value_heads=2, head_dim=32),
        "llama.yaml",
        4,
        "colwise: tp 4 does not divide its 2 heads",
    ),
    "a matrix nobody mentions": (
        hf,
        llama_rules(**{"model.layers.*.mlp.{gate,up}_proj": "remove"}),
        2,
        "model.layers.*.mlp.up_proj.weight (2 of them): no rule mentions this parameter",
    ),
    "many small ones nobody mentions": (
        lambda: Norms(),
        {"tpplan": 1, "rules": {"fc": "colwise", "out": "rowwise"}},
        2,
        "no rule mentions these parameters, together",
    ),
    "tied but placed differently": (
        lambda: hf(tie_word_embeddings=True),
        llama_rules(lm_head="replicate"),
        2,
        "lm_head.weight: is tied to model.embed_tokens.weight, but the plan places them",
    ),
    "a whole tensor into a row-parallel layer": (
        hf,
        llama_rules(**{"model.layers.*.mlp.{gate,up}_proj": "replicate"}),
        2,
        "rowwise: its input is whole",
    ),
    "sharded activations that nobody reduces": (
        hf,
        llama_rules(**{"model.layers.*.mlp.down_proj": "replicate"}),
        2,
        "replicate: takes the columns of model.layers.*.mlp.gate_proj",
    ),
    "column after column": (
        hf,
        llama_rules(**{"model.layers.*.mlp.down_proj": "colwise"}),
        2,
        "model.layers.*.mlp.down_proj (2 of them): colwise: its input is already sharded, by "
        "model.layers.*.mlp.gate_proj, model.layers.*.mlp.up_proj",
    ),
    "a packed projection, cut by its size": (
        lambda: Packed(sizes=16),
        {"tpplan": 1, "rules": {"qkv": "colwise", "out": "rowwise"}},
        2,
        "fails with its part of qkv: ValueError",
    ),
    "a packed projection, cut in three": (
        lambda: Packed(sizes=None),
        {"tpplan": 1, "rules": {"qkv": "colwise", "out": "rowwise"}},
        2,
        "qkv: the columns of one rank are not enough for its work",
    ),
    "a head count written in the code": (
        lambda: Written(),
        {"tpplan": 1, "rules": {"{q,k,v}": "colwise", "out": "rowwise"}},
        2,
        "fails with its part of q, k, v: RuntimeError",
    ),
    "sequence_parallel over the sequence": (
        lambda: OverTheSequence(),
        {
            "tpplan": 1,
            "rules": {"0.norm": "sequence_parallel", "0.fc": "colwise", "0.out": "rowwise"},
        },
        2,
        "its result at one position depends on other positions",
    ),
    "replicate over the sequence": (
        lambda: OverTheSequence(),
        {"tpplan": 1, "rules": {"0.norm": "replicate", "0.fc": "colwise", "0.out": "rowwise"}},
        2,
        "{style: replicate, input: gather} to run it on all positions",
    ),
    "a sharded layer inside of what runs whole": (
        GPT,
        {
            "tpplan": 1,
            "extends": "gpt.yaml",
            "rules": {"blocks.*.mlp": {"style": "replicate", "input": "gather"}},
        },
        2,
        "it is inside of blocks.*.mlp, which runs whole on every rank",
    ),
    "a whole tensor added to the sharded stream": (
        GPT,
        {"tpplan": 1, "extends": "gpt.yaml", "rules": {"pos_emb": "replicate"}},
        2,
        "combines the sequence-sharded stream with a whole tensor from pos_emb",
    ),
    "an expression that does not give the attribute's value": (
        GPT,
        {
            "tpplan": 1,
            "extends": "gpt.yaml",
            "rules": {"blocks.*.attn": {"style": "attention", "attributes": {"n_head": "heads*2"}}},
        },
        2,
        "'heads*2' is 16, but n_head is 8",
    ),
}


class Norms(nn.Module):
    """Mostly vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(16, 32), nn.Linear(32, 16)
        self.norms = nn.Sequential(*(nn.LayerNorm(16) for _ in range(8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norms(self.out(self.fc(x)))


class Packed(nn.Module):
    """q, k and v in one projection, cut into blocks of a written size, or into thirds."""

    def __init__(self, sizes: int | None) -> None:
        super().__init__()
        self.sizes = sizes
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.qkv(x)
        q, k, v = y.chunk(3, -1) if self.sizes is None else y.split(self.sizes, dim=-1)
        return self.out(q * k + v)


class Written(nn.Module):
    """Attention whose sizes are numbers in its code."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).view(*x.shape[:2], 4, 4).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Scaled(nn.Linear):
    """A Linear with something between the product and the bias."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input, self.weight).softmax(-1) + self.bias


class _Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = _Centred()
        self.fc, self.out = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(self.fc(self.norm(x)))


class _Centred(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(1, keepdim=True)


class OverTheSequence(nn.Sequential):
    """A norm whose statistics run over the sequence."""

    def __init__(self) -> None:
        super().__init__(_Mixing())


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.turns(12)
def test_refused_with_position_and_untouched(case: str) -> None:
    make, plan, tp, message = REFUSED[case]
    model = make()
    before = fingerprint(model)
    with pytest.raises(tpplan.PlanError) as caught:
        tpplan.check(model, plan, tp)
    assert message in str(caught.value)
    assert any(d.position is not None for d in caught.value.diagnostics)
    assert all(d.hint for d in caught.value.diagnostics), "what to do"
    assert fingerprint(model) == before


def test_all_problems_are_reported_at_once() -> None:
    plan = llama_rules(
        **{
            "model.layers.*.self_attn.qkv_proj": "colwise",
            "model.layers.*.mlp.u*": "colwise",
            "model.layers.*.mlp": "rowwise",
        }
    )
    with pytest.raises(tpplan.PlanError) as caught:
        tpplan.check(hf(intermediate_size=98), plan, 3)
    text = str(caught.value)
    for part in (
        "qkv_proj' matches no module",
        "two patterns claim",
        "model.layers.*.mlp (2 of them): rowwise: LlamaMLP has no weight",
        "tp 3 does not divide its 8 heads",
        "tp 3 does not divide its 4 heads",
        "tp 3 does not divide its 98 inputs",
        "tp 3 does not divide its 98 outputs",
    ):
        assert text.count(part) == 1, part


def test_sizes_that_do_not_fit_are_reported_together_with_what_fits() -> None:
    with pytest.raises(tpplan.PlanError) as caught:
        tpplan.check(hf(intermediate_size=90), "llama.yaml", 4)
    hints = {d.message.partition(" (")[0]: d.hint for d in caught.value.diagnostics}
    assert set(hints) == {"model.layers.*.mlp.down_proj", "model.layers.*.mlp.gate_proj"}
    assert all((hint or "").startswith("tp may be 1, 2, 3, 5") for hint in hints.values())


def test_a_model_that_token_ids_do_not_fit_asks_for_inputs() -> None:
    with pytest.raises(tpplan.PlanError, match="give inputs="):
        tpplan.check(nn.Bilinear(3, 4, 5), {"tpplan": 1, "rules": {".": "replicate"}}, 2)
