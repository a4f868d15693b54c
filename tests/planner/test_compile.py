"""What the planner infers from a model it has never seen."""

from __future__ import annotations

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
from tpplan.compiled import CompiledPlan
from tpplan.planner import compile_plan


def compiled(model: nn.Module, plan: Any, tp: int = 2, **options: Any) -> CompiledPlan:
    return compile_plan(model, tpplan.load_plan(plan, model), tp, **options)


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
    "only read": lambda x: x.masked_fill(torch.rand(x.shape) > 0.9, 0.0),
    "of tokens": lambda x: x.masked_fill(torch.rand((*x.shape[:2], 1)) > 0.9, 0.0),
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
    # of a token all ranks have columns
    inside = {"whole" if name == "of tokens" else "region"}
    assert set(draws(compiled(made, plan, inputs=x)).values()) == inside
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
    assert (kernel.kind, kernel.implementation) == ("rms_norm", "auto")
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


class Recurrent(nn.Module):
    """Mixes positions with one of torch's own, whose result it turns around in place."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(layers.WIDTH, layers.WIDTH, batch_first=True)
        self.fc = nn.Linear(layers.WIDTH, layers.INNER)
        self.out = nn.Linear(layers.INNER, layers.WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.gru(x)[0]
        return x + self.out(self.fc(x).relu())


@pytest.mark.parametrize("tp", [2, 4])
def test_what_is_turned_around_in_place_has_rows(tp: int) -> None:
    rules = {
        "layers.*.gru": {"style": "replicate", "input": "gather"},
        "layers.*.fc": "colwise",
        "layers.*.out": "rowwise",
    }
    x = torch.randn(2, 9, layers.WIDTH)
    plan = {"tpplan": 1, "rules": rules}
    tpplan.verify(layers.Stack(Recurrent), plan, tp=tp, sequence_parallel=True, inputs=x)
