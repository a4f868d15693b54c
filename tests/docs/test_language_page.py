"""docs/plan-language.md has all of the language, and its examples are plans."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import jsonschema
import pytest
import yaml
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import tpplan
from benchmarks import zoo
from tests.docs.pages import Block, blocks, page
from tests.models import hf
from tests.outside import library, nanogpt, uses, xtransformers
from tests.outside.models import plan_of
from tpplan.language import Pattern, schema
from tpplan.language.styles import KERNEL_CHOICES, KERNEL_KINDS, KEYS, REMOVE, STYLES
from tpplan.planner import compile_plan

PAGE = "plan-language.md"
BLOCKS = blocks(PAGE, "yaml")
EXPERTS_OF_LAYERS = {
    "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32,
}  # fmt: skip
VALIDATOR = jsonschema.Draft202012Validator(schema())


class Torch(nn.Module):
    """torch's own attention, among layers."""

    def __init__(self) -> None:
        super().__init__()
        made = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(made, 2, enable_nested_tensor=False).layers

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


SMALL = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 32}
TORCH_RULES = """
layers.*.norm{1,2}: sequence_parallel
layers.*.linear1: colwise
layers.*.linear2: rowwise
"""
# model -> what makes it, and the plan that an example changes
MODELS: Mapping[str, tuple[Callable[[], nn.Module], Mapping[str, Any]]] = {
    "Llama": (lambda: hf("Llama", device="meta"), {"extends": "llama.yaml"}),
    "Llama classifier": (
        library.llama_classifier,
        {"extends": "llama.yaml", "rules": {"lm_head": REMOVE}},
    ),
    "nanoGPT": (lambda: nanogpt.GPT(nanogpt.GPTConfig()), {"extends": "nanogpt.yaml"}),
    "GPT2": (lambda: GPT2LMHeadModel(GPT2Config(**SMALL)), {"extends": "gpt2.yaml"}),
    "GPTJ": (lambda: hf("GPTJ", rotary_dim=4), {"extends": "gptj.yaml"}),
    "Bloom": (lambda: hf("Bloom"), {"extends": "bloom.yaml"}),
    "Doge": (lambda: hf("Doge"), {"extends": "doge.yaml"}),
    "convolutions": (lambda: uses.Decoder("convolution"), plan_of(uses.WHOLE_RULES)),
    "einsum attention": (lambda: uses.Decoder("einsum"), plan_of(uses.EINSUM_RULES)),
    "x-transformers": (
        lambda: xtransformers.decoder(heads=8, kv_heads=4),
        plan_of(xtransformers.GROUPED_RULES),
    ),
    "Mamba": (lambda: zoo.tiny("mamba"), {"extends": "mamba.yaml"}),
    "Gemma 4 with experts": (
        lambda: zoo.tiny("gemma4_text", **EXPERTS_OF_LAYERS),
        {"extends": "gemma4.yaml", "sequence_parallel": False},
    ),
    "Rwkv": (lambda: zoo.tiny("rwkv"), {"extends": "rwkv.yaml"}),
    "MiniMax": (lambda: zoo.tiny("minimax"), {"extends": "minimax.yaml"}),
    "Mixtral": (lambda: zoo.tiny("mixtral"), {"extends": "mixtral.yaml"}),
    "Qwen3-Next": (lambda: zoo.tiny("qwen3_next"), {"extends": "qwen3_next.yaml"}),
    "torch's attention": (Torch, plan_of(TORCH_RULES)),
}


def read(text: str) -> dict[str, Any]:
    """A block as a plan: one that is a part of a plan has its version added."""
    return {"tpplan": 1, **yaml.safe_load(text)}


def full(block: Block) -> dict[str, Any]:
    """A block as a whole plan: with the rest of the one that it is a part of."""
    plan = read(block.text)
    base = {} if block.onto is None else MODELS[block.onto][1]
    if not base and not {"rules", "optional", "extends"} & set(plan):
        base = {"rules": {"norm": "replicate"}}
    rules = {**base.get("rules", {}), **plan.get("rules", {})}
    return {**base, **plan, **({"rules": rules} if rules else {})}


@pytest.mark.parametrize("block", BLOCKS, ids=lambda b: f"line {b.line}")
@pytest.mark.turns(12)
def test_examples(block: Block) -> None:
    """Each is a plan for people and for editors, and fits the model that it is said to."""
    plan = full(block)
    VALIDATOR.validate(plan)
    loaded = tpplan.load_plan(plan)
    if block.onto is not None:
        compile_plan(MODELS[block.onto][0](), loaded, 2)


def test_every_model_is_used() -> None:
    assert {b.onto for b in BLOCKS} - {None} == set(MODELS)


def sections() -> Mapping[str, str]:
    """The text under each heading, of any depth, with the headings inside of it."""
    found: dict[str, str] = {}
    open_: list[tuple[int, str]] = []
    for line in page(PAGE).splitlines():
        if heading := re.fullmatch(r"(#{2,4}) (.*)", line):
            open_ = [(d, t) for d, t in open_ if d < len(heading[1])]
            open_.append((len(heading[1]), heading[2].replace("`", "")))
        for _, title in open_:
            found[title] = found.get(title, "") + line + "\n"
    return found


SECTIONS = sections()


@pytest.mark.parametrize("key", [*KEYS])
def test_every_key(key: str) -> None:
    assert f"### `{key}`\n" in SECTIONS["Keys"]
    assert any(key in read(b.text) for b in BLOCKS)


@pytest.mark.parametrize("style", STYLES)
def test_every_style_and_option(style: str) -> None:
    """Each has a heading under Styles, each option is named there and has an example."""
    assert f"### `{style}`\n" in SECTIONS["Styles"]
    plans = [read(block.text) for block in BLOCKS]
    rules = [r for p in plans for part in ("rules", "optional") for r in p.get(part, {}).values()]
    used = [r if isinstance(r, dict) else {"style": r} for r in rules]
    assert any(rule["style"] == style for rule in used)
    for name, option in STYLES[style].options.items():
        assert f"`{name}`" in SECTIONS[style]
        assert any(rule["style"] == style and name in rule for rule in used), name
        for choice in option.choices:
            assert f"`{choice}`" in SECTIONS[style]


def test_the_kernels() -> None:
    words = [*KERNEL_KINDS, *KERNEL_CHOICES]
    assert [word for word in words if f"`{word}`" not in SECTIONS["kernels"]] == []
    assert f"`{REMOVE}`" in SECTIONS["extends"]


def test_the_patterns() -> None:
    """What the table says of signs."""
    for pattern, path, fits in (
        ("*_proj", "q_proj", True),
        ("a.[!x].b", "a.x.b", False),
        ("{encoder,decoder.block}.0", "decoder.block.0", True),
        ("**.up", "up", True),
        (".", "", True),
    ):
        assert Pattern(pattern).matches(path) is fits


def test_the_schema_is_named() -> None:
    (block,) = blocks(PAGE, "bash")
    assert "SCHEMA_FILE" in block.text
    first = next(b.text.splitlines()[0] for b in BLOCKS if "$schema" in b.text)
    assert first.startswith("# yaml-language-server: $schema=")
    assert first.endswith("tpplan/language/schema.json")
