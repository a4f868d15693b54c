"""What ``tpplan explain`` says of every module and parameter of models that differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import tpplan
from benchmarks import zoo
from tests.gpt import GPT
from tests.models import hf
from tests.outside import nanogpt
from tpplan.planner import compile_plan
from tpplan.render import explain

# a model, its plan, tp, and sentences that are due somewhere in it
MODELS: dict[str, tuple[Callable[[], Any], str, int, tuple[str, ...]]] = {
    "dropout": (
        lambda: GPT(dropout=0.1),
        "gpt.yaml",
        2,
        (
            "dropout in training, of this rank's part of a sharded region: each rank draws its own",
            "dropout in training, of the residual stream: each rank draws its own mask",
            "the stream passes through it in its global form",
        ),
    ),
    "sizes that are found": (
        lambda: nanogpt.GPT(nanogpt.GPTConfig()),
        "auto",
        2,
        (
            "inferred: its code is shown a rank's share of the width of what enters",
            "inferred: n_head: 4, on each rank 2",
        ),
    ),
    "packed": (zoo.makers()["gpt2"], "gpt2.yaml", 2, ("the first rank holds 0:",)),
    "shared heads": (
        lambda: hf(num_key_value_heads=1),
        "llama.yaml",
        2,
        ("an element of the layer stack", "carries the stream"),
    ),
    "parallel": (zoo.makers()["gptj"], "auto", 2, ("inferred: one reduction serves",)),
    "biases per head": (
        zoo.makers()["bloom"],
        "auto",
        2,
        ("each rank takes its heads of 'alibi'",),
    ),
    "norms over the width": (
        zoo.makers()["olmo2"],
        "auto",
        2,
        ("an RMSNorm over the sharded width; its squares are summed",),
    ),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.turns(12)
def test_everything_has_words(name: str) -> None:
    make, plan, tp, due = MODELS[name]
    model = make()
    compiled = compile_plan(model, tpplan.load_plan(plan, model), tp, True)
    said = [explain(model, compiled, path) for path in compiled.modules]
    said += [explain(model, compiled, path) for path, _ in model.named_parameters()]
    assert all(said)
    whole = " ".join("\n".join(said).split())
    for sentence in due:
        assert sentence in whole
