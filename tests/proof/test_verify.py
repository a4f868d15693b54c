"""``verify`` passes what is right, and names the module of every fault that is planted."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tpplan
from tests.gpt import GPT
from tests.models import hf, token_ids
from tests.planner.test_geometry import NUMBERS, attention
from tpplan.compiled import CompiledPlan
from tpplan.language import FrozenMap
from tpplan.layout import Rows
from tpplan.planner import compile_plan
from tpplan.proof import VerificationError, verify
from tpplan.proof.verify import Verification, describe
from tpplan.roles import linear

pytestmark = pytest.mark.turns(4)

SUBJECT = importlib.import_module("tpplan.proof.verify")  # the function has its module's name
Change = Callable[[CompiledPlan], CompiledPlan]


def llama(**changes: Any) -> Any:
    return hf(hidden_size=32, intermediate_size=48, vocab_size=61, **changes)


def gpt2(**changes: Any) -> Any:
    import transformers

    torch.manual_seed(3)
    config = transformers.GPT2Config(
        n_embd=32, n_head=4, n_layer=2, n_positions=32, vocab_size=61, **changes
    )
    return transformers.GPT2LMHeadModel(config)


def checked(model: nn.Module, plan: Any, tp: int = 2, **options: Any) -> Verification:
    return verify(model, tpplan.load_plan(plan, model), tp, **options)


def caught(model: nn.Module, plan: Any, tp: int = 2, **options: Any) -> VerificationError:
    with pytest.raises(VerificationError) as raised:
        checked(model, plan, tp, **options)
    return raised.value


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Change], None]:
    """Makes ``verify`` carry out a changed plan."""

    def plant(change: Change) -> None:
        def compiled(*args: Any, **kwargs: Any) -> CompiledPlan:
            return change(compile_plan(*args, **kwargs))

        monkeypatch.setattr(SUBJECT, "compile_plan", compiled)

    return plant


def with_parameters(compiled: CompiledPlan, **changes: Any) -> CompiledPlan:
    """``changes``: what becomes of the parameters that have a field of that name, by suffix."""
    parameters = dict(compiled.parameters)
    touched = False
    for suffix, change in changes.pop("of").items():
        for name, entry in parameters.items():
            if name.endswith(suffix):
                parameters[name], touched = dataclasses.replace(entry, **change(entry)), True
    assert touched
    return dataclasses.replace(compiled, parameters=FrozenMap(parameters))


def with_pieces(exchange: Callable[[Rows], list[Any]]) -> Callable[[Any], dict[str, Any]]:
    """Another arrangement of the rows of every rank."""

    def change(entry: Any) -> dict[str, Any]:
        rows = entry.placement
        assert isinstance(rows, Rows)
        changed = Rows(rows.dim, exchange(rows))
        assert changed != rows
        return {"placement": changed}

    return change


@pytest.mark.parametrize(("make", "plan"), [(llama, "llama.yaml"), (gpt2, "gpt2.yaml")])
def test_what_is_right_passes(make: Callable[[], Any], plan: str) -> None:
    model = make()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    result = checked(model, plan, 2)
    assert [check.sequence_parallel for check in result.checks] == [False, True]
    assert result.output_error < 1e-5
    assert result.gradient_error < 1e-5
    assert 0.5 < result.rank_share < 0.6
    for check in result.checks:
        assert check.worst_parameter in before
        forward, least = check.counts["forward"], check.floor["forward"]
        assert {k: n for k, n in forward.items() if n} == {k: n for k, n in least.items() if n}
    # the time of each mode, and of both together
    assert all(0 < check.seconds < 60 for check in result.checks)
    assert result.seconds == sum(check.seconds for check in result.checks)
    text = describe(result)
    assert f"{result.checks[0].seconds:.1f} s" in text
    assert "TP+SP  outputs" in text
    # the model is as it was
    assert model.training == make().training
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])
        assert p.grad is None


def test_hooks_that_record_nothing_cost_no_collective() -> None:
    """Once asked for states, a model of transformers keeps its hooks on attention and MLP."""
    model = hf("Cohere")
    model(token_ids(2, 7, seed=0), output_hidden_states=True)
    assert model.model.layers[0].self_attn._forward_hooks
    for check in checked(model, "cohere.yaml", 2).checks:
        assert check.counts["forward"] == {**check.counts["forward"], **check.floor["forward"]}


def test_heads_that_ranks_share_pass() -> None:
    result = checked(llama(num_key_value_heads=2), "llama.yaml", 4)
    assert max(result.output_error, result.gradient_error) < 1e-5


@pytest.mark.turns(24)
def test_processes_find_what_threads_find() -> None:
    model = GPT()
    threads = checked(model, "gpt", 2, sequence_parallel=True)
    processes = checked(model, "gpt", 2, sequence_parallel=True, processes=True)
    for ours, theirs in zip(threads.checks, processes.checks, strict=True):
        assert ours.counts == theirs.counts
        assert ours.rank_share == theirs.rank_share
        assert ours.output_error == pytest.approx(theirs.output_error, abs=1e-6)
        assert ours.gradient_error == pytest.approx(theirs.gradient_error, abs=1e-6)


def test_a_model_on_meta_is_refused() -> None:
    model = hf(device="meta")
    with pytest.raises(tpplan.PlanError, match="needs a model with real weights"):
        checked(model, "llama.yaml")


def test_row_parallel_where_column_parallel_belongs() -> None:
    plan = {
        "tpplan": 1,
        "extends": "llama.yaml",
        "rules": {
            "model.layers.*.mlp.{gate,up}_proj": "remove",
            "model.layers.*.mlp.gate_proj": "colwise",
            "model.layers.*.mlp.up_proj": "rowwise",
        },
    }
    with pytest.raises(tpplan.PlanError) as refused:
        checked(llama(), plan)
    assert "model.layers.*.mlp.up_proj (2 of them): rowwise: its input is whole" in str(
        refused.value
    )


def test_parts_of_a_packed_layer_in_another_order() -> None:
    rules = {
        "layers.*.attn.qkv": {"style": "colwise", "packed": ["k", "q", "v"]},
        "layers.*.attn.out": "rowwise",
        "layers.*.attn": {
            "style": "attention",
            "heads": "n_head",
            "kv_heads": "n_kv",
            "attributes": {"n_head": "heads", "n_kv": "kv_heads"},
        },
    }
    assert all(part in NUMBERS for part in ("n_head: heads", "n_kv: kv_heads"))
    inputs = torch.randn(2, 8, 16)
    with pytest.raises(tpplan.PlanError, match=r"layers\.\*\.attn\.qkv"):
        checked(attention("blocks"), {"tpplan": 1, "rules": rules}, inputs=inputs)
    rules["layers.*.attn.qkv"] = {"style": "colwise", "packed": ["q", "k", "v"]}
    checked(attention("blocks"), {"tpplan": 1, "rules": rules}, inputs=inputs)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_queries_taken_for_keys(planted: Callable[[Change], None], sequence_parallel: bool) -> None:
    """q and k exchanged in the rows that the ranks of GPT-2's second layer hold."""
    change = with_pieces(lambda rows: [(k, q, v) for q, k, v in rows.pieces])
    of = {f"h.1.attn.c_attn.{leaf}": change for leaf in ("weight", "bias")}
    planted(lambda compiled: with_parameters(compiled, of=of))
    error = caught(gpt2(), "gpt2.yaml", sequence_parallel=sequence_parallel)
    assert error.divergence is not None
    assert error.divergence.module == "transformer.h.1.attn"
    assert "the input of 'c_proj'" in str(error)
    assert "gpt2.yaml" in str(error)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.turns(12)
def test_key_value_heads_dealt_out_in_turns(
    planted: Callable[[Change], None], sequence_parallel: bool
) -> None:
    """Rank mod n_kv where rank·n_kv // tp belongs."""
    change = with_pieces(lambda rows: [rows.pieces[2 * (r % 2)] for r in range(4)])
    of = {
        f"layers.0.self_attn.{p}_proj.{leaf}": change for p in "kv" for leaf in ("weight", "bias")
    }
    planted(lambda compiled: with_parameters(compiled, of=of))
    model = llama(num_key_value_heads=2)
    error = caught(model, "llama.yaml", 4, sequence_parallel=sequence_parallel)
    assert error.divergence is not None
    assert error.divergence.module == "model.layers.0.self_attn"


@pytest.mark.parametrize(
    "norm", ["model.layers.1.post_attention_layernorm", "model.layers.0.input_layernorm"]
)
@pytest.mark.turns(2)
def test_a_norm_whose_gradient_is_not_summed(planted: Callable[[Change], None], norm: str) -> None:
    of = {f"{norm}.weight": lambda entry: {"summed": False}}
    planted(lambda compiled: with_parameters(compiled, of=of))
    error = caught(llama(), "llama.yaml", sequence_parallel=True)
    assert error.divergence is not None
    assert error.divergence.module == norm
    assert error.divergence.what == "the gradient of 'weight'"
    assert f"worst: {norm}.weight" in str(error)
    assert "_layernorm:" in str(error)
    assert "sequence_parallel" in str(error)


def test_a_fault_among_ranks_without_a_row(planted: Callable[[Change], None]) -> None:
    """13 rows on 8 ranks: the last one has none."""
    of = {"model.norm.weight": lambda entry: {"summed": False}}
    planted(lambda compiled: with_parameters(compiled, of=of))
    error = caught(llama(num_key_value_heads=8), "llama.yaml", 8, sequence_parallel=True)
    assert error.divergence is not None
    assert error.divergence.module == "model.norm"


def test_a_bias_added_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    right = linear.reduced

    def reduced(module: Any, partial: torch.Tensor, biases: Any, _: bool) -> torch.Tensor:
        return right(module, sum(biases, partial), ())

    monkeypatch.setattr(linear, "reduced", reduced)
    error = caught(llama(attention_bias=True), "llama.yaml", sequence_parallel=False)
    assert error.divergence is not None
    assert error.divergence.module == "model.layers.0.self_attn.o_proj"
    assert error.divergence.what == "the output"
    assert "o_proj: rowwise" in str(error)


def test_a_head_that_is_not_tied_any_more(planted: Callable[[Change], None]) -> None:
    def untie(compiled: CompiledPlan) -> CompiledPlan:
        table = compiled.parameters["transformer.wte.weight"]
        assert table.aliases == ("lm_head.weight",)
        parameters = {
            **compiled.parameters,
            table.name: dataclasses.replace(table, aliases=()),
            "lm_head.weight": dataclasses.replace(table, name="lm_head.weight", aliases=()),
        }
        return dataclasses.replace(compiled, parameters=FrozenMap(parameters))

    planted(untie)
    error = caught(gpt2(), "gpt2.yaml", sequence_parallel=False)
    assert error.divergence is not None
    assert error.divergence.module == "lm_head"
    assert "lm_head.weight" in str(error)


def test_a_rank_that_fails_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    def reduced(module: Any, partial: torch.Tensor, biases: Any, _: bool) -> torch.Tensor:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(linear, "reduced", reduced)
    error = caught(llama(), "llama.yaml", sequence_parallel=False)
    assert "TP at tp 2: the sharded model fails" in str(error)
    assert "RuntimeError: no such thing" in str(error)
