"""What the proof at compile time must see, and what it must let pass."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import tpplan
from tests.proof import odd
from tpplan.planner import compile_plan
from tpplan.proof import prove
from tpplan.proof.exact import exact
from tpplan.proof.miniature import Thin, miniature, unsharded

PLAN = {"tpplan": 1, "rules": {"layers.*.fc": "colwise", "layers.*.out": "rowwise"}}


def ways(table: dict[str, Any]) -> list[Any]:
    return [
        pytest.param(make, sp, id=f"{name}, {'TP+SP' if sp else 'TP'}")
        for name, (make, modes) in table.items()
        for sp in modes
    ]


def example() -> torch.Tensor:
    return torch.randn(2, 8, odd.WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("make", "sp"), ways(odd.WRONG))
@pytest.mark.turns(12)
def test_what_ranks_cannot_do_is_refused(make: Any, sp: bool) -> None:
    model = make()
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(tpplan.PlanError) as caught:
        tpplan.check(model, PLAN, 2, sp, inputs=example())
    assert all(d.position is not None for d in caught.value.diagnostics)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize(("make", "sp"), ways(odd.RIGHT))
@pytest.mark.turns(12)
def test_what_ranks_can_do_is_accepted(make: Any, sp: bool) -> None:
    tpplan.check(make(), PLAN, 2, sp, inputs=example())


def test_complex_parameters() -> None:
    plan = {"tpplan": 1, "rules": {**PLAN["rules"], "layers.*.filter": "replicate"}}  # type: ignore[dict-item]
    tpplan.check(odd.Stack(odd.Filtered), plan, 2, False, inputs=example())


@pytest.mark.turns(4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_code_that_looks_at_numbers_of_any_precision(dtype: torch.dtype) -> None:
    model = odd.Checked(odd.MLP).to(dtype)
    tpplan.check(model, PLAN, 2, False, inputs=example().to(dtype))
    assert tpplan.suggest(model, tp=2, inputs=example().to(dtype)).rules


def test_experts_without_tokens() -> None:
    plan = {
        "tpplan": 1,
        "rules": {
            "layers.*.gate": "replicate",
            "layers.*.ex.*.fc": "colwise",
            "layers.*.ex.*.out": "rowwise",
        },
    }
    tpplan.verify(odd.Stack(odd.Experts), plan, tp=2, sequence_parallel=False, inputs=example())


# a rank has at least 8 / tp positions: more than any less, whatever the length
@pytest.mark.turns(24)
@pytest.mark.parametrize(
    ("tp", "most"), [(tp, most) for tp in (2, 4) for most in range(8 // tp, 15)]
)
def test_code_that_asks_how_long_its_input_is(tp: int, most: int) -> None:
    class Long(odd.MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (0.5 if x.size(1) > most else 1.0)

    with pytest.raises(tpplan.PlanError, match="something else than whole"):
        tpplan.check(odd.Stack(Long), PLAN, tp, True, inputs=example())


@pytest.mark.parametrize("length", [5, 8])
def test_rows_of_a_call_of_another_length(length: int) -> None:
    inputs = torch.randn(2, length, odd.WIDTH)
    with pytest.raises(tpplan.PlanError, match="something else than whole"):
        tpplan.check(odd.Stack(odd.Held), PLAN, 4, True, inputs=inputs)


def test_says_where_it_starts_and_when() -> None:
    make, _ = odd.WRONG["only in training"]
    with pytest.raises(tpplan.PlanError) as caught:
        tpplan.check(make(), PLAN, 2, False, inputs=example())
    (found,) = caught.value.diagnostics
    assert "the input of 'out' inside of layers.0" in found.message
    assert "in training, at length 15" in found.message


def test_draws_no_random_numbers_of_the_callers() -> None:
    model, inputs = odd.Stack(odd.MLP), example()
    states = torch.get_rng_state(), random.getstate()
    tpplan.check(model, PLAN, 2, inputs=inputs)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()


def llama(**sizes: int) -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            **{
                "vocab_size": 128,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "num_hidden_layers": 2,
                **sizes,
            }
        )
    )


@pytest.mark.turns(24)
def test_a_large_model_is_proved_by_a_small_one() -> None:
    with torch.device("meta"):
        model = llama(
            vocab_size=32000,
            hidden_size=4096,
            intermediate_size=14336,
            num_attention_heads=32,
            num_key_value_heads=8,
            num_hidden_layers=32,
        )
    compiled = compile_plan(model, tpplan.load_plan("llama.yaml"), 2, True)
    small, plan = miniature(model, compiled)
    held = sum(p.numel() for p in small.parameters())
    assert held < 4e6  # of 6.7e9
    assert len([path for path, m in plan.modules.items() if m.element is not None]) == 3
    prove(model, compiled)


def test_the_miniature_is_one_model_whole_or_not() -> None:
    """A thin product is linear in its parameter, and the same in the module and in a role."""
    model = llama(hidden_size=512, intermediate_size=1024)
    compiled = compile_plan(model, tpplan.load_plan("llama.yaml"), 2, False)
    small, _ = miniature(model, compiled)
    thin = [m for m in small.modules() if isinstance(vars(m).get("_tpplan_project"), Thin)]
    assert thin
    ids = torch.randint(0, 128, (2, 8), generator=torch.Generator().manual_seed(0))
    with exact():
        twin = unsharded(small)
        once = twin(ids).logits
        with torch.no_grad():
            twin.lm_head.weight.mul_(2.0)  # type: ignore[union-attr, operator]
        assert torch.allclose(twin(ids).logits, 2 * once)


def test_numbers_are_float64_whatever_is_asked_for() -> None:
    with exact():
        x = torch.ones(3)
        assert x.float().dtype == x.to(torch.bfloat16).dtype == torch.float64
        assert torch.zeros(2, dtype=torch.float16).dtype == torch.float64
        assert torch.equal(nn.functional.dropout(x, 0.9), x)
        assert torch.equal(torch.rand(4), torch.rand(4))


def test_ranks_that_wait_for_each_other_are_an_error() -> None:
    from tpplan.compat import simulate

    def job(mesh: Any) -> None:
        if mesh.get_local_rank() == 0:
            torch.distributed.all_reduce(torch.ones(1), group=mesh.get_group())

    with pytest.raises(RuntimeError, match="wait for each other"):
        simulate(2, job)
