"""A piece of a model's code, and what a right plan says of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.random_models.recipe import Recipe

Rules = dict[str, Any]
"""Module pattern -> style, or a mapping of the style and its options."""

_ROLES = (
    *("body", "embed", "where", "h", "n0", "last", "head", "x", "n1", "n2", "m1", "m2", "attn"),
    *("mlp", "q", "k", "v", "qkv", "kv", "o", "qn", "kn", "gate", "up", "down", "both"),
)
_SCHEMES = {
    "llama": "model embed_tokens embed_positions layers embed_norm norm lm_head hidden_states "
    "input_layernorm post_attention_layernorm attention_out_norm mlp_out_norm self_attn "
    "mlp q_proj k_proj v_proj qkv_proj kv_proj o_proj q_norm k_norm gate_proj up_proj down_proj "
    "gate_up_proj",
    "gpt": "transformer wte wpe h ln_e ln_f lm_head x ln_1 ln_2 ln_3 ln_4 attn "
    "mlp c_q c_k c_v c_attn c_kv c_proj q_ln k_ln w1 c_fc w2 w13",
    "odd": "tower tok place stages calm final out stream a_pre b_pre a_post b_post look "
    "think ask key value three pair back ask_scale key_scale valve wide narrow valve_wide",
}
NAMES: Mapping[str, Mapping[str, str]] = {
    scheme: dict(zip(_ROLES, names.split(), strict=True)) for scheme, names in _SCHEMES.items()
}
"""The names of modules by scheme and role."""


@dataclass
class Part:
    """Lines of ``__init__`` and of a method, and what a plan says.

    Attributes:
        rules: of its modules and parameters, by their path in the module that holds them.
        attention: options of the ``attention`` rule of that module, if it needs one.
        given: arguments beside the stream, by name: expressions that the model computes.
    """

    init: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    rules: Rules = field(default_factory=dict)
    attention: dict[str, Any] = field(default_factory=dict)
    given: dict[str, str] = field(default_factory=dict)

    def linear(self, r: Recipe, name: str, sizes: tuple[str, str], bias: bool, rule: Any) -> None:
        """Add a projection."""
        self.init.append(f"self.{name} = {linear(r, *sizes, bias)}")
        self.rules[name] = rule

    def attributes(self, **expressions: str) -> None:
        """Say what attributes of the code become on a rank."""
        self.attention.setdefault("attributes", {}).update(expressions)


def linear(r: Recipe, inner: str, outer: str, bias: bool) -> str:
    """The expression that makes a projection."""
    stated = "bool(i % 2)" if r.vary == "bias" else str(bias)
    if r.linear == "Conv1D":
        return f"Conv1D({outer}, {inner})"
    name = {"Linear": "nn.Linear", "own": "Dense", "subclass": "Projection"}[r.linear]
    return f"{name}({inner}, {outer}, bias={stated})"


def indented(lines: Iterable[str], depth: int = 1) -> list[str]:
    """Lines, further to the right."""
    return [f"{'    ' * depth}{line}" if line else line for line in lines]


def method(name: str, arguments: Sequence[str], body: Sequence[str]) -> list[str]:
    """A method of a class."""
    return ["", f"def {name}({', '.join(('self', *arguments))}):", *indented(body)]


def module(name: str, arguments: str, init: Sequence[str], *methods: Sequence[str]) -> str:
    """The text of a module's class."""
    taken = f"self, {arguments}" if arguments else "self"
    lines = [f"class {name}(nn.Module):", *indented([f"def __init__({taken}):"])]
    lines += indented(["super().__init__()", *init], 2)
    for text in methods:
        lines += indented(text)
    return "\n".join(lines) + "\n\n\n"
