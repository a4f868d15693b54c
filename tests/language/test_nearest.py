"""What a pattern that matches nothing was meant to be."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpplan.language import Pattern, PatternError, nearest

BLOCK = [
    "input_layernorm",
    "self_attn",
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    "mlp",
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
]
LLAMA = [
    *("", "model", "model.embed_tokens", "model.layers", "model.norm", "lm_head"),
    *(f"model.layers.{n}" for n in range(32)),
    *(f"model.layers.{n}.{part}" for n in range(32) for part in BLOCK),
]


@pytest.mark.parametrize(
    ("pattern", "guess"),
    [
        ("model.layers.*.self_attn.qproj", "model.layers.*.self_attn.q_proj"),
        ("model.layers.*.self_attn.{q,k,v}_prj", "model.layers.*.self_attn.{q,k,v}_proj"),
        ("model.layer.*.attn.{q,k}_proj", "model.layers.*.self_attn.{q,k}_proj"),
        ("layers.*.mlp.up_proj", "model.layers.*.mlp.up_proj"),
        ("model.layers.*.q_proj", "model.layers.*.self_attn.q_proj"),
        ("model.layers.*.block.mlp.up_proj", "model.layers.*.mlp.up_proj"),
        ("model.layers.99.mlp", "model.layers.*.mlp"),
        ("model.layers.[0-9]*.mpl.up_proj", "model.layers.[0-9]*.mlp.up_proj"),
        ("{a.b,layers.*.mlp.up_prj}", "model.layers.*.mlp.up_proj"),
        ("up_proj", "**.up_proj"),
        ("**.q_prj", "**.q_proj"),
        ("Model.norm", "model.norm"),
        ("lmhead", "lm_head"),
        ("transformer.h.*.attn.c_attn", None),
        ("model.layers.*.mlp.router", None),
        (".", None),
    ],
)
def test_guesses(pattern: str, guess: str | None) -> None:
    assert nearest(Pattern(pattern), LLAMA) == guess


def test_names_with_signs_in_them() -> None:
    assert nearest(Pattern("blocks.a"), ["block[", "block[.a"]) is None
    assert nearest(Pattern("x"), []) is None


@pytest.mark.parametrize(
    "pattern",
    [
        "model.layers.*.self_attn.qproj",
        "m.{a,b}{c,d}{e,f}{g,h}{i,j}{k,l}{m,n}",
        "abcdefgg.{a,b}bbbb",
    ],
)
def test_many_paths(pattern: str) -> None:
    layers = [f"model.layers.{n}.{part}" for n in range(1000) for part in BLOCK]
    different = [f"{n * 7919:x}a.{n * 104729:x}b" for n in range(3000)]
    nearest(Pattern(pattern), layers)
    nearest(Pattern(pattern), different)


@settings(deadline=None)
@given(
    st.text(alphabet="ab1.*{},", max_size=12),
    st.lists(st.text(alphabet="ab1.", max_size=8), max_size=8),
)
def test_a_guess_always_matches(text: str, paths: list[str]) -> None:
    try:
        pattern = Pattern(text)
    except PatternError:
        return
    guess = nearest(pattern, paths)
    assert guess is None or any(map(Pattern(guess).matches, paths))
