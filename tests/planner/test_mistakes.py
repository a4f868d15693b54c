"""Plans with a single mistake: the first thing that is said is said of its line."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping

import pytest
import transformers
from torch import nn

import tpplan
from tests.gpt import GPT
from tests.models import hf
from tests.outside import nanogpt
from tpplan.language import parse
from tpplan.planner import compile_plan
from tpplan.styles import STYLES

Rules = Mapping[str, str]
EACH = 18  # of the mistakes of a model


def bert() -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=64,
        max_position_embeddings=32,
    )
    return transformers.BertForMaskedLM(config)


def shipped(name: str, model: nn.Module) -> Rules:
    """The rules of a shipped plan that match, without the options that can be left out."""
    names = [p for p, _ in model.named_modules()]
    names += [p for p, _ in model.named_parameters(remove_duplicate=False)]
    rules = {}
    for rule in tpplan.load_plan(name).rules:
        if rule.style != "attention" and any(map(rule.pattern.matches, names)):
            packed = rule.options.get("packed")
            text = rule.style
            if isinstance(packed, Mapping):
                text = f"{{style: {rule.style}, packed: [{', '.join(packed['parts'])}]}}"
            rules[rule.pattern.text] = text
    return rules


MODELS: Mapping[str, tuple[Callable[[], nn.Module], str]] = {
    "Llama": (lambda: hf("Llama"), "llama.yaml"),
    "a plain GPT": (GPT, "gpt.yaml"),
    "nanoGPT": (lambda: nanogpt.GPT(nanogpt.GPTConfig()), "nanogpt.yaml"),
    "BERT": (bert, "bert.yaml"),
}
# options that are wrong, or left out
OPTIONS = (
    ("nanoGPT", "transformer.h.*.attn.c_attn", "colwise"),
    ("nanoGPT", "transformer.h.*.attn.c_attn", "{style: colwise, packed: [q, k]}"),
    (
        "nanoGPT",
        "transformer.h.*.attn.c_attn",
        "{style: colwise, packed: {parts: [q, k, v], repeat: heads}}",
    ),
    ("nanoGPT", "transformer.h.*.mlp.c_fc", "{style: colwise, packed: [gate, up]}"),
    ("nanoGPT", "transformer.h.*.mlp.c_proj", "{style: rowwise, output: shard}"),
    ("Llama", "model.layers.*.self_attn.o_proj", "{style: rowwise, transposed: true}"),
    ("Llama", "model.layers.*.mlp.down_proj", "{style: rowwise, output: shard}"),
    ("a plain GPT", "blocks.*.mlp.proj", "{style: rowwise, reduce: togehter}"),
)


def mistakes(rules: Rules, seed: str) -> Iterator[tuple[str, str]]:
    """A pattern and another style for it."""
    every = [
        (pattern, style)
        for pattern, text in rules.items()
        for style in STYLES
        if style not in ("attention", text) and f"style: {style}," not in text
    ]
    yield from random.Random(seed).sample(every, min(EACH, len(every)))


def refused(model: nn.Module, rules: Rules, pattern: str, style: str) -> tpplan.PlanError | None:
    """What is said of the plan; None where it is right as well."""
    changed = {**rules, pattern: style}
    text = "".join(f'  "{name}": {value}\n' for name, value in changed.items())
    try:
        compile_plan(model, parse(f"tpplan: 1\nrules:\n{text}", "mistake"), 2, True)
    except tpplan.PlanError as error:
        return error
    return None


@pytest.mark.turns(24)
@pytest.mark.parametrize("name", MODELS)
def test_the_first_error_is_at_the_line_of_the_mistake(name: str) -> None:
    make, plan = MODELS[name]
    model = make()
    rules = shipped(plan, model)
    made = [*mistakes(rules, name), *((p, s) for of, p, s in OPTIONS if of == name)]
    errors = {m: error for m in made if (error := refused(model, rules, *m)) is not None}
    elsewhere = {}
    for (pattern, style), error in errors.items():
        position = error.diagnostics[0].position
        line = 3 + list(rules).index(pattern)
        if position is None or position.line != line:
            elsewhere[pattern, style] = str(error.diagnostics[0].message)
    assert not elsewhere
    assert len(errors) >= 12


def test_what_follows_is_under_the_cause() -> None:
    model = hf("Llama")
    rules = shipped("llama.yaml", model)
    error = refused(model, rules, "model.layers.*.self_attn.o_proj", "replicate")
    assert error is not None
    (cause,) = error.diagnostics
    assert "and nothing sums it" in cause.message
    assert len(cause.related) == 2
    assert "more complaints follow from it" in str(cause.hint)
