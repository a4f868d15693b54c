"""Layers that shapes alone would let through: right, or refused; never silently wrong."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from tests.compare import Errors, beyond, step
from tests.planner import layers
from tests.ranks import Ranks

INPUT = torch.zeros(2, 8, layers.WIDTH)


def refused(make: Callable[[], nn.Module], sequence_parallel: bool, **rules: Any) -> str:
    plan = {"tpplan": 1, "rules": {**layers.RULES, **rules}}
    with pytest.raises(tpplan.PlanError) as caught:
        tpplan.check(layers.Stack(make), plan, 2, sequence_parallel, inputs=INPUT)
    return str(caught.value)


COLUMNS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "glu": (lambda y: F.glu(y), 16),
    "cut after an activation": (lambda y: y.relu().chunk(2, -1)[0], 16),
    "unbound heads": (lambda y: y.unflatten(-1, (2, -1)).unbind(-2)[0], 16),
    "k and v in one": (lambda y: y.view(2, 8, 2, -1, 4)[:, :, 0].flatten(2), 16),
    "norm over the columns": (lambda y: y * y.pow(2).mean(-1, keepdim=True).rsqrt(), 32),
    "softmax over the columns": (lambda y: y.softmax(-1), 32),
}


@pytest.mark.parametrize("habit", COLUMNS)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_columns_that_do_not_keep_to_themselves(habit: str, sequence_parallel: bool) -> None:
    between, inner = COLUMNS[habit]
    text = refused(lambda: layers.Layer(between, inner), sequence_parallel)
    assert "<mapping>:3:3: error: layers.*.fc: the columns of one rank are not enough" in text
    assert "packed" in text


STREAM: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "token shift": lambda x: x + F.pad(x, (0, 0, 1, -1)),
    "first position": lambda x: x - x[:, :1],
    "mean over the sequence": lambda x: x - x.mean(1, keepdim=True),
    "running sum": lambda x: x.cumsum(1),
}


@pytest.mark.parametrize("habit", STREAM)
def test_positions_that_do_not_keep_to_themselves(habit: str) -> None:
    text = refused(lambda: layers.Stream(STREAM[habit]), True)
    assert "not known to keep positions apart" in text


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_whole_gate_on_sharded_activations(sequence_parallel: bool) -> None:
    text = refused(layers.Gated, sequence_parallel, **{"layers.*.gate": "replicate"})
    assert "whose gradient would be a part" in text


def test_a_list_whose_modules_do_not_go_round() -> None:
    plan = {"tpplan": 1, "rules": {**layers.RULES, "layers.*.norms": "colwise"}}
    with pytest.raises(tpplan.PlanError, match="does not divide its 4 modules"):
        tpplan.check(layers.Stack(layers.ForEachHead), plan, 8, inputs=INPUT)


def test_more_than_the_stream_leaves_a_layer() -> None:
    assert "gives out more of the" in refused(layers.Auxiliary, True)


TOKENS: dict[str, Callable[[], nn.Module]] = {
    "without their batch after the gather": lambda: layers.Flattened(1, lambda y: y),
    "with their batch after a gather without it": (
        lambda: layers.Flattened(0, lambda y: y.view(2, 8, -1))
    ),
    "that look at each other without their batch": (
        lambda: layers.Flattened(0, lambda y: y + y.roll(1, 0))
    ),
}


@pytest.mark.parametrize("tokens", TOKENS)
def test_tokens_in_another_order_than_the_streams(tokens: str) -> None:
    assert "does not have the stream's shape" in refused(TOKENS[tokens], True)


PACKED: dict[str, Any] = {
    "glu": ["a", "b"],
    "cut after an activation": ["a", "b"],
    "unbound heads": ["a", "b"],
    "k and v in one": ["a", "b"],
}
ALLOWED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], bool]] = {
    "one tensor as query, key and value": (
        layers.Threefold,
        {
            "layers.*.norm": "sequence_parallel",
            "layers.*.attn.{q,k,v}": "colwise",
            "layers.*.attn.o": "rowwise",
        },
        True,
    ),
    "a latent that is whole": (
        layers.Latent,
        {
            "layers.*.norm": "sequence_parallel",
            "layers.*.attn": {"style": "attention", "gather": ["states"]},
            "layers.*.attn.a": "replicate",
            "layers.*.attn.{q,b}": "colwise",
            "layers.*.attn.o": "rowwise",
        },
        True,
    ),
    "a norm for each head": (
        layers.ForEachHead,
        {**layers.RULES, "layers.*.norms": "colwise"},
        True,
    ),
    "a number for each head, of all heads": (
        layers.AcrossHeads,
        {**layers.RULES, "layers.*.mix": {"style": "rowwise", "output": "shard"}},
        True,
    ),
    "the stream and something of it": (
        layers.BesideStack,
        {**layers.RULES, "table": "vocab", "shift": "replicate"},
        True,
    ),
    "an auxiliary output, TP": (layers.Auxiliary, layers.RULES, False),
    "tokens without their batch": (
        lambda: layers.Flattened(0, lambda y: y),
        layers.RULES,
        True,
    ),
    **{f"tokens {name}, TP": (make, layers.RULES, False) for name, make in TOKENS.items()},
    "a token shift, TP": (lambda: layers.Stream(STREAM["token shift"]), layers.RULES, False),
}


ALLOWED |= {
    f"{habit}, packed": (
        # what is refused above, with its layout stated
        functools.partial(layers.Layer, *COLUMNS[habit]),
        {**layers.RULES, "layers.*.fc": {"style": "colwise", "packed": packed}},
        True,
    )
    for habit, packed in PACKED.items()
}


@pytest.mark.parametrize("habit", sorted(set(COLUMNS) - set(PACKED)))
def test_no_layout_makes_a_habit_right(habit: str) -> None:
    between, inner = COLUMNS[habit]
    for packed in (["a"], ["a", "b"], {"parts": ["a"], "repeat": 4}):
        rule = {"style": "colwise", "packed": packed}
        text = refused(lambda: layers.Layer(between, inner), False, **{"layers.*.fc": rule})
        assert "layers.*.fc: the columns of one rank are not enough" in text


def parity(mesh: DeviceMesh, name: str, sequence_parallel: bool) -> Errors:
    make, rules, _ = ALLOWED[name]
    torch.manual_seed(5)
    made = make()
    reference = made if hasattr(made, "layers") else layers.Stack(make)
    model = copy.deepcopy(reference)
    tpplan.parallelize(model, {"tpplan": 1, "rules": rules}, mesh, sequence_parallel, inputs=INPUT)
    given = torch.randn(2, 8, layers.WIDTH)
    weight = torch.randn(2, 8, layers.WIDTH)

    def run(m: nn.Module) -> dict[str, torch.Tensor]:
        y = m(given)
        return {"objective": (y * weight).sum(), "y": y}

    return step(reference, model, run)


@pytest.mark.turns(24)
@pytest.mark.parametrize("name", ALLOWED)
def test_right(ranks: Ranks, name: str) -> None:
    for sequence_parallel in {False, ALLOWED[name][2]}:
        assert beyond(ranks.run(2, parity, name, sequence_parallel)) == {}
