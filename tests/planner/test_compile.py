"""What the planner infers from a model it has never seen, and what it refuses."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import tpplan
from tests.gpt import GPT
from tests.models import FAMILIES, hf
from tests.planner import layers
from tpplan.planner import CompiledPlan, compile_plan


def compiled(model: nn.Module, plan: Any, tp: int = 2, **options: Any) -> CompiledPlan:
    return compile_plan(model, tpplan.load_plan(plan, model), tp, **options)


def llama_rules(**changes: Any) -> dict[str, Any]:
    return {"tpplan": 1, "extends": "llama.yaml", "rules": changes}


def consumers(plan: CompiledPlan) -> dict[str, tuple[str, ...]]:
    """Module -> the column-parallel layers of the one tensor that enters there."""
    found = {}
    for p in plan.modules.values():
        if p.boundaries:
            (boundary,) = p.boundaries
            found[p.path] = boundary.consumers
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_boundaries_are_where_the_shared_input_enters(family: str) -> None:
    plan = compiled(hf(family, device="meta"), "llama.yaml")
    found = consumers(plan)
    for layer in range(2):
        at = f"model.layers.{layer}"
        assert found.pop(f"{at}.self_attn") == tuple(
            f"{at}.self_attn.{n}_proj" for n in ("q", "k", "v")
        )
        assert found.pop(f"{at}.mlp") == (f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj")
    assert found == {"lm_head": ("lm_head",)}
    assert [p.path for p in plan.modules.values() if p.element] == [
        "model.layers.0",
        "model.layers.1",
    ]
    assert {p.path for p in plan.modules.values() if p.container} == {"", "model"}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradients_that_are_only_a_part_are_summed(family: str, sequence_parallel: bool) -> None:
    model = hf(family, device="meta")
    plan = compiled(model, "llama.yaml", sequence_parallel=sequence_parallel)
    for name, entry in plan.parameters.items():
        in_region = name.endswith(("q_norm.weight", "k_norm.weight"))
        on_stream = name.endswith(("norm.weight", "o_proj.bias", "down_proj.bias"))
        assert entry.summed == (in_region or (sequence_parallel and on_stream)), name


def test_placements_and_local_shapes() -> None:
    plan = compiled(hf(device="meta"), "llama.yaml", tp=4)
    at = "model.layers.0"
    expected = {
        f"{at}.self_attn.k_proj.weight": (Shard(0), (8, 64)),
        f"{at}.self_attn.k_proj.bias": (Shard(0), (8,)),
        f"{at}.self_attn.o_proj.weight": (Shard(1), (64, 16)),
        f"{at}.self_attn.o_proj.bias": (Replicate(), (64,)),
        f"{at}.input_layernorm.weight": (Replicate(), (64,)),
        "model.embed_tokens.weight": (Shard(0), (33, 64)),
        "lm_head.weight": (Shard(0), (33, 64)),
    }
    for name, (placement, shape) in expected.items():
        entry = plan.parameters[name]
        assert (entry.placement, entry.local_shape) == (placement, shape), name


def test_a_tied_parameter_appears_once() -> None:
    plan = compiled(hf(device="meta", tie_word_embeddings=True), "llama.yaml")
    assert plan.parameters["model.embed_tokens.weight"].aliases == ("lm_head.weight",)
    assert plan.parameter("lm_head.weight").name == "model.embed_tokens.weight"
    assert "lm_head.weight" not in plan.parameters


def test_hard_coded_head_counts_become_per_rank_values() -> None:
    plan = compiled(GPT(), "gpt", tp=4)
    assert plan.modules["blocks.0.attn"].attributes == {"n_head": (8, 2)}


def test_one_boundary_serves_modules_that_are_given_the_same_tensor() -> None:
    plan = compiled(Parallel(), PARALLEL, inputs=torch.zeros(2, 8, 16), sequence_parallel=False)
    entries = {p.path: b for p in plan.modules.values() for b in p.boundaries}
    assert set(entries) == {"layers.0.left", "layers.0.right"}
    assert {e.shared for e in entries.values()} == {("layers.0.left", "layers.0.right")}
    assert len({e.number for e in entries.values()}) == 1


def test_a_boundary_stays_inside_a_module_that_also_uses_its_input_otherwise() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.out = nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.out(self.fc(x).relu())

    plan = compiled(
        nn.Sequential(Gate()),
        {"tpplan": 1, "rules": {"0.fc": "colwise", "0.out": "rowwise"}},
        inputs=torch.zeros(2, 8, 16),
    )
    assert consumers(plan) == {"0.fc": ("0.fc",)}


def test_nothing_of_the_model_changes() -> None:
    model = hf()
    before = fingerprint(model)
    compiled(model, "llama.yaml", tp=4)
    assert fingerprint(model) == before
    assert model.training


class Parallel(nn.Module):
    """A block whose two branches are given one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Branches()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.left, self.right = nn.Linear(16, 32), nn.Linear(16, 32)
        self.left_out, self.right_out = nn.Linear(32, 16), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.left_out(self.left(h)) + self.right_out(self.right(h))


PARALLEL = {
    "tpplan": 1,
    "rules": {
        "layers.*.norm": "sequence_parallel",
        "layers.*.{left,right}": "colwise",
        "layers.*.{left,right}_out": "rowwise",
    },
}


def fingerprint(model: nn.Module) -> str:
    """Every parameter, buffer, class and attribute name of a model, in one hash."""
    digest = hashlib.sha256()
    for name, module in model.named_modules():
        digest.update(f"{name} {type(module)} {sorted(vars(module))}".encode())
    for name, tensor in model.state_dict(keep_vars=True).items():
        digest.update(f"{name} {type(tensor)} {id(tensor)} {tensor.requires_grad}".encode())
        digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()


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
        "is tied to lm_head.weight, but the plan places them differently",
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
        "no row-parallel layer reduces them",
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
        GPT,
        {"tpplan": 1, "extends": "gpt.yaml", "rules": {"blocks.*.attn": "remove"}},
        2,
        "fails with its part of blocks.*.attn.q, blocks.*.attn.k, blocks.*.attn.v: RuntimeError",
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
    "kernels that do not exist yet": (
        hf,
        {"tpplan": 1, "extends": "llama.yaml", "kernels": {"rms_norm": "triton"}, "rules": {}},
        2,
        "'triton' is not available in this version",
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
def test_refused_with_position_and_untouched(case: str) -> None:
    make, plan, tp, message = REFUSED[case]
    model = make()
    before = fingerprint(model)
    with pytest.raises(tpplan.PlanError) as caught:
        tpplan.check(model, plan, tp)
    assert message in str(caught.value)
    assert any(d.position is not None for d in caught.value.diagnostics)
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


def draws(plan: CompiledPlan) -> dict[str, str]:
    return {p.path: p.draws for p in plan.modules.values() if p.draws is not None}


def test_what_dropout_is_for_is_found_in_training_mode() -> None:
    plan = compiled(hf(attention_dropout=0.1).eval(), "llama.yaml")
    assert draws(plan) == {f"model.layers.{i}.self_attn": "region" for i in range(2)}
    for dropout in (0.0, 0.1):  # a module's p may be changed later
        plan = compiled(GPT(dropout=dropout), "gpt")
        places = {"blocks.0.attn.drop": "region", "blocks.0.drop": "stream", "drop": "stream"}
        found = draws(plan)
        assert len(found) == 5
        assert {path: found[path] for path in places} == places


HABITS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.1),
    "rand_like": lambda x: x * (torch.rand_like(x) > 0.1),
    "noise drawn by itself": lambda x: x * (torch.rand(x.shape) > 0.1).float() / 0.9,
    "bernoulli in place": lambda x: x * torch.empty(x.shape).bernoulli_(0.9),
    "only read": lambda x: x.masked_fill(torch.rand((*x.shape[:2], 1)) > 0.9, 0.0),
}


class InTraining(nn.Module):
    """A habit in training, nothing in eval."""

    def __init__(self, habit: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.habit = habit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.habit(x) if self.training else x


@pytest.mark.parametrize("name", list(HABITS))
def test_noise_is_for_what_it_meets(name: str) -> None:
    x = torch.zeros(2, 8, layers.WIDTH)
    habit = HABITS[name]
    made = layers.Stack(lambda: layers.Layer(InTraining(habit), layers.INNER))
    plan = {"tpplan": 1, "rules": layers.RULES, "sequence_parallel": False}
    assert set(draws(compiled(made, plan, inputs=x)).values()) == {"region"}
    made = layers.Stack(lambda: layers.Stream(InTraining(habit)))
    assert set(draws(compiled(made, plan, inputs=x)).values()) == {"stream"}


def test_noise_that_meets_nothing_sharded_is_whole() -> None:
    class Noisy(layers.Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = torch.rand(3)
            return super().forward(F.dropout(x, 0.1))

    model = Noisy(lambda: layers.Layer(lambda x: x, layers.INNER))
    plan = {"tpplan": 1, "rules": layers.RULES}
    assert draws(compiled(model, plan, inputs=torch.zeros(2, 8, layers.WIDTH))) == {"": "whole"}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_masks_that_must_agree_and_masks_that_must_not(sequence_parallel: bool) -> None:
    class Both(layers.Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = F.dropout(self.fc(x), 0.1, self.training)
            return F.dropout(x + self.out(y), 0.1, self.training)

    model = layers.Stack(lambda: Both(lambda x: x, layers.INNER))
    plan = {"tpplan": 1, "rules": layers.RULES, "sequence_parallel": sequence_parallel}
    found = draws(compiled(model, plan, inputs=torch.zeros(2, 8, layers.WIDTH)))
    assert set(found.values()) == {"region" if sequence_parallel else "mixed"}


@pytest.mark.parametrize("family", FAMILIES)
def test_norms_of_other_libraries_are_recognised_by_what_they_compute(family: str) -> None:
    plan = compiled(hf(family, device="meta"), "llama.yaml")
    kernel = plan.modules["model.norm"].kernel
    assert kernel is not None
    assert (kernel.kind, kernel.implementation) == ("rms_norm", "torch")
    plan = compiled(GPT(), "gpt")
    found = {p.path: p.kernel.kind for p in plan.modules.values() if p.kernel}
    assert found["ln_f"] == "layer_norm"
    assert "drop" not in found


def test_a_module_that_stands_in_two_places_has_one_plan() -> None:
    block = layers.Stream(lambda x: x)
    model = nn.Sequential(block, block)
    plan = compiled(
        model,
        {"tpplan": 1, "rules": {"[0-9].fc": "colwise", "[0-9].out": "rowwise"}},
        inputs=torch.zeros(2, 8, layers.WIDTH),
    )
    assert {p.path for p in plan.modules.values() if p.rule} == {"0.fc", "0.out"}
