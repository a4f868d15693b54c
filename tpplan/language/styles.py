"""The vocabulary of the plan language: styles with their options, kernels, top-level keys."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

VERSION = 1
REMOVE = "remove"
WHOLE = "replicate"
"""The style of what is to be whole on every rank."""
ROWS = "sequence_parallel"
"""The style of what runs on a rank's rows of the sequence."""


class Kind(enum.Enum):
    """What an option's value looks like."""

    FLAG = "true or false"
    CHOICE = "one of a few names"
    COUNT = "a positive whole number or an expression"
    NAMES = "a list of names"
    PACKED = "a list of names, or a mapping with 'parts' and 'repeat', or of names to sizes"
    EXPRESSIONS = "a mapping from attribute names to expressions"
    DIMENSION = "a dimension: a whole number"
    DIMENSIONS = "a mapping from argument names to dimensions"


@dataclass(frozen=True)
class Option:
    """An option of a style."""

    kind: Kind
    summary: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Words:
    """What a style is, and its options by name."""

    summary: str
    options: Mapping[str, Option] = field(default_factory=dict)


_TRANSPOSED = Option(Kind.FLAG, "the weight is stored (in, out), as in Conv1D")
_PACKED = Option(Kind.PACKED, "the parts that share the weight, in order")
_DIM = Option(Kind.DIMENSION, "of a bare parameter: the dimension that is cut")

STYLES: dict[str, Words] = {
    "colwise": Words(
        "shard the outputs",
        {
            "packed": _PACKED,
            "transposed": _TRANSPOSED,
            "dim": _DIM,
        },
    ),
    "rowwise": Words(
        "shard the inputs, reduce the outputs",
        {
            "packed": _PACKED,
            "transposed": _TRANSPOSED,
            "dim": _DIM,
            "reduce": Option(
                Kind.CHOICE,
                "reduce with the other row-parallel layers whose outputs the model adds, or alone",
                ("together", "separate"),
            ),
            "output": Option(
                Kind.CHOICE,
                "give every rank the whole result, a share of its columns, or the whole of it "
                "for the sharded region, which goes on",
                ("whole", "shard", "inside"),
            ),
        },
    ),
    "sequence_parallel": Words("run on a part of the sequence; replicated without it"),
    "vocab": Words(
        "shard an embedding or a head by vocabulary",
        {"output": Option(Kind.CHOICE, "leave logits sharded or gather them", ("shard", "gather"))},
    ),
    "experts": Words(
        "share out stacked experts, a part of each to every rank",
        {
            "shard": Option(
                Kind.CHOICE,
                "what a rank has: inner columns of each, or some of them whole",
                ("inner", "experts"),
            ),
            "reduce": Option(
                Kind.CHOICE,
                "reduce what they give here, not what the module around gives",
                ("here",),
            ),
        },
    ),
    "replicate": Words(
        "leave the parameters whole on every rank, those of modules inside as well",
        {
            "input": Option(
                Kind.CHOICE,
                "gather the stream, run on the whole of it, go on with a rank's part of the result",
                ("gather",),
            ),
        },
    ),
    "attention": Words(
        "the module that computes attention",
        {
            "heads": Option(Kind.COUNT, "how many query heads"),
            "kv_heads": Option(Kind.COUNT, "how many key and value heads"),
            "head_dim": Option(Kind.COUNT, "the width of one head"),
            "attributes": Option(Kind.EXPRESSIONS, "attributes that hold a rank's own values"),
            "head_inputs": Option(Kind.DIMENSIONS, "arguments sliced by head, and along what"),
            "gather": Option(Kind.NAMES, "arguments gathered along the sequence here"),
            "eval": Option(Kind.FLAG, "the module's own code runs as in evaluation"),
            "reduce": Option(
                Kind.CHOICE, "reduce what this module gives, not the layers inside", ("here",)
            ),
        },
    ),
}

KERNEL_KINDS: Mapping[str, str] = {
    "layer_norm": "LayerNorm",
    "rms_norm": "RMSNorm",
    "gelu": "GeLU with its bias",
    "swiglu": "SiLU-gated product",
    "geglu": "GeLU-gated product",
    "cross_entropy": "vocab-parallel cross entropy",
    "embedding": "masked vocab-parallel lookup",
    "sequence_transition": "layout changes around sequence-parallel collectives",
}
KERNEL_CHOICES = ("auto", "triton", "torch")
SHARD, GATHERED = SAVE_CHOICES = ("shard", "gathered")
WAITING, CHUNKED, SYMMETRIC, AUTO = OVERLAP_CHOICES = (
    "none",
    "chunked",
    "symmetric_memory",
    "auto",
)
NORMS, ACTIVATIONS = RECOMPUTE_CHOICES = ("norms", "activations")

KEYS: Mapping[str, str] = {
    "tpplan": "the version of the plan language",
    "description": "what the plan is for",
    "models": "the model classes that plan 'auto' chooses this plan for",
    "sequence_parallel": "whether activations between blocks are sharded along the sequence",
    "extends": "a plan to inherit from: a file, or a shipped plan's name",
    "rules": "module pattern -> style",
    "optional": "rules that may match nothing",
    "layers": "a pattern for the stack of layers; inferred where absent",
    "sequence_dim": "the sequence's dimension in the stream",
    "kernels": "which implementation of each fused kernel to use",
    "overlap": "how products run beside the collectives that bring or take their tensors",
    "recompute": "what fused kernels make for products is made again in backward, not kept",
    "save": "what is kept of a gathered input for backward: all of it, or the shard",
}
