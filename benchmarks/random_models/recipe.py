"""What may vary in a random model: one field for each, its plainest value first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from random import Random
from typing import Any, TypeVar

T = TypeVar("T")
PLAIN = 0.55
"""How often a field keeps its plainest value."""


def of(plain: T, *others: T) -> T:
    """A field of a recipe, by the values it may have."""
    return field(default=plain, metadata={"others": others})  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Recipe:
    """One model. A field that means nothing in this model has its plainest value (`settled`)."""

    # the whole
    entry: str = of("ids", "bare", "sequence first")
    layers: int = of(2, 1, 3, 4, 5)
    width: int = of(16, 24, 32)
    vocabulary: int = of(32, 40, 37)
    names: str = of("llama", "gpt", "odd")
    nested: bool = of(False, True)
    stack: str = of("list", "sequential", "attributes", "dict")
    positions: str = of("none", "learned", "parameter", "sinusoid", "buffer")
    scaled_embedding: bool = of(False, True)
    first_norm: bool = of(False, True)
    final_norm: bool = of(True, False)
    head: str = of("linear", "bias", "tied", "functional", "none")
    logits: str = of("plain", "scaled", "capped")
    output: str = of("tensor", "tuple", "dict", "dataclass", "loss", "shifted loss", "loss, dict")
    auxiliary: str = of("none", "hidden", "logits", "embeddings")
    shared: str = of("none", "layer", "loop", "weight")
    checkpoint: str = of("none", "reentrant", "non-reentrant")
    late_double: bool = of(True, False)
    # a layer
    order: str = of("pre", "post", "sandwich", "parallel", "parallel, two norms", "no norm")
    norm: str = of(
        *("LayerNorm", "RMSNorm", "own RMS", "own layer", "plus one", "unit", "no bias"),
        "functional",
    )
    eps: float = of(1e-5, 1e-3)
    residual: str = of("plain", "constant", "vector", "scalar", "embeddings")
    mixer: str = of("both", "attention", "mlp")
    inline: bool = of(False, True)
    returns: str = of("tensor", "tuple", "dict")
    keywords: bool = of(False, True)
    dropout: bool = of(False, True)
    vary: str = of("none", "eps", "activation", "window", "inner", "bias", "skip")
    linear: str = of("Linear", "Conv1D", "own", "subclass")
    # attention
    packing: str = of("separate", "qkv", "per head", "groups", "kv")
    split: str = of("sizes", "chunk", "threefold", "slices")
    heads: int = of(4, 8)
    head_dim: int = of(4, 8)
    kv: str = of("all", "half", "one")
    groups: str = of("interleave", "expand", "ratio", "gqa")
    view: str = of("minus one", "unflatten", "heads", "heads, minus one", "config")
    merge: str = of("flatten", "reshape", "heads", "width")
    core: str = of("sdpa", "masked sdpa", "triu", "buffer", "where", "einsum", "given", "full")
    rotary: str = of("none", "inside", "buffer", "given", "complex", "partial")
    bias: str = of("none", "alibi", "table")
    qk_norm: str = of("none", "head", "width", "width, centred")
    qkv_bias: bool = of(False, True)
    out_bias: bool = of(False, True)
    extra: str = of("none", "scale", "gate", "sinks")
    # the MLP
    mlp: str = of("plain", "gated", "packed", "up first", "interleaved", "sequential")
    activation: str = of("relu", "gelu", "tanh", "silu", "square", "quick", "module")
    inner: int = of(32, 48, 64)
    mlp_bias: bool = of(True, False)
    mlp_extra: str = of("none", "norm", "scale", "centred norm")
    # one odd habit in its code, by its name in `habits.HABITS`
    habit: str = ""

    @property
    def kv_heads(self) -> int:
        """How many heads keys and values have."""
        return {"all": self.heads, "half": self.heads // 2, "one": 1}[self.kv]

    @property
    def sequence_dim(self) -> int:
        """The dimension of the sequence in the stream."""
        return 0 if self.entry == "sequence first" else 1

    @property
    def attends(self) -> bool:
        """Whether layers have attention."""
        return self.mixer != "mlp"

    @property
    def has_mlp(self) -> bool:
        """Whether layers have an MLP."""
        return self.mixer != "attention"


def others(name: str) -> Sequence[Any]:
    """The values a field may have beside its plainest one."""
    return next(f.metadata.get("others", ()) for f in fields(Recipe) if f.name == name)


def drawn(random: Random) -> Recipe:
    """A random recipe."""
    chosen: dict[str, Any] = {}
    for f in fields(Recipe):
        choices = f.metadata.get("others", ())
        # the smallest number is the plainest model, for hypothesis to shrink to
        if choices and random.random() >= PLAIN:
            chosen[f.name] = random.choice(choices)
    return settled(replace(Recipe(), **chosen))


def odd(recipe: Recipe) -> list[str]:
    """The fields that are not plain."""
    there = [f for f in fields(Recipe) if f.metadata.get("others")]
    return [f.name for f in there if getattr(recipe, f.name) != f.default]


_ATTENTION = (
    *("packing", "split", "heads", "head_dim", "kv", "groups", "view", "merge", "core", "rotary"),
    *("bias", "qk_norm", "qkv_bias", "out_bias", "extra"),
)
_MLP = ("mlp", "activation", "inner", "mlp_bias", "mlp_extra")
_MODEL = ("vocabulary", "positions", "scaled_embedding", "head", "logits", "auxiliary")


def settled(recipe: Recipe) -> Recipe:
    """The recipe without what contradicts something else, or means nothing."""
    r = recipe
    for needed, names in ((r.attends, _ATTENTION), (r.has_mlp, _MLP)):
        r = r if needed else plain(r, *names)
    if r.entry != "ids":
        r = plain(r, "vocabulary", "positions", "scaled_embedding", "head", "logits", "nested")
    if r.head == "none":
        r = plain(r, "logits")
    if "loss" in r.output and r.head == "none":
        r = plain(r, "output")
    if r.entry != "ids" and "loss" in r.output:
        r = plain(r, "output")
    if r.auxiliary == "logits" and (r.entry != "ids" or r.head == "none"):
        r = plain(r, "auxiliary")
    if r.order == "no norm":
        r = plain(r, *(() if r.first_norm or r.final_norm else ("norm", "eps")))
    if r.norm in ("functional", "unit") and r.vary == "eps":
        r = plain(r, "vary")
    if r.mixer != "both":
        r = plain(r, *(n for n in ("order",) if r.order.startswith("parallel")))
        r = plain(r, *(n for n in ("vary",) if r.vary == "skip"))
    r = _settled_layers(r)
    return _settled_attention(r) if r.attends else r


def plain(r: Recipe, *names: str) -> Recipe:
    """The recipe with the plainest value of some fields."""
    defaults: dict[str, Any] = {f.name: f.default for f in fields(Recipe)}
    return replace(r, **{name: defaults[name] for name in names})


def _settled_layers(r: Recipe) -> Recipe:
    given = r.attends and (r.core == "given" or r.rotary == "given" or r.bias == "alibi")
    if r.stack == "sequential" and (given or r.residual == "embeddings"):
        r = plain(r, "stack")
    if r.stack == "sequential":
        r = plain(r, "returns", "keywords", "checkpoint")
    if r.checkpoint != "none":
        r = plain(r, "keywords")
    if r.shared == "loop" or r.layers == 1:
        r = plain(r, "stack", *(("shared",) if r.layers == 1 else ()))
    if r.shared in ("layer", "loop"):
        r = plain(r, "vary", "stack")
    if r.shared == "weight" and (not r.has_mlp or r.vary in ("inner", "skip")):
        r = plain(r, "shared")
    if r.layers == 1:
        r = plain(r, "vary")
    wanted = {"activation": r.has_mlp, "inner": r.has_mlp, "window": r.attends}
    if not wanted.get(r.vary, True):
        r = plain(r, "vary")
    if r.vary == "activation" and r.activation in ("module", "quick", "square", "tanh"):
        r = plain(r, "activation")
    if r.mlp == "sequential":
        r = plain(r, "mlp_extra", *(("inline",) if r.inline else ()))
        r = replace(r, activation="module")
        r = plain(r, *(("vary",) if r.vary == "activation" else ()))
    if r.vary == "window" and r.core == "sdpa":
        r = replace(r, core="masked sdpa")
    return r


def _settled_attention(r: Recipe) -> Recipe:
    if r.kv == "all":
        r = plain(r, "groups")
    if r.packing == "per head" and r.kv != "all":
        r = replace(r, packing="groups")
    if r.packing == "groups" and r.kv == "all":
        r = replace(r, packing="per head")
    if r.packing in ("separate", "per head", "groups"):
        r = plain(r, "split")
    if r.packing == "kv" and r.split == "threefold":
        r = plain(r, "split")
    if r.packing == "qkv" and r.kv != "all" and r.split in ("chunk", "threefold"):
        r = plain(r, "split")
    headed = r.packing in ("per head", "groups") or r.split == "threefold"
    if headed:
        r = plain(r, "view", *(("qk_norm",) if r.qk_norm.startswith("width") else ()))
    if r.core not in ("sdpa", "masked sdpa") and r.groups == "gqa":
        r = plain(r, "groups")
    if r.core in ("sdpa", "masked sdpa") and r.extra == "sinks":
        r = plain(r, "extra")
    if r.qk_norm.startswith("width") and r.kv_heads < 4:
        r = plain(r, "kv", "groups")  # several ranks would hold a part of the norm
    if r.core == "sdpa" and r.bias != "none":
        r = replace(r, core="masked sdpa")
    return r
