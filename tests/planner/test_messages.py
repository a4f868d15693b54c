"""What is said of a plan that is refused: what, where in the plan and in the model, what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import tpplan
from tests.outside import library, sentence, uses, vit, xtransformers
from tests.outside.models import ids_of, images_of
from tests.planner.helpers import WIDTH, Layer, Stack, stream
from tests.planner.test_refusals import Packed, Written
from tpplan.language import Diagnostic, parse
from tpplan.planner.stops import Stop, kind_of, place_of

MLP = {"layers.*.fc": "colwise", "layers.*.out": "rowwise"}


def written(rules: Any) -> str:
    """A plan as text: each rule on a line of its own."""
    top = rules if isinstance(rules, dict) and "rules" in rules else {"rules": rules}
    inner = top["rules"]
    lines = (
        inner.strip().splitlines()
        if isinstance(inner, str)
        else [f'"{pattern}": {json.dumps(style)}' for pattern, style in inner.items()]
    )
    layers = [f"layers: {top['layers']}"] if "layers" in top else []
    return "\n".join(["tpplan: 1", *layers, "rules:", *(f"  {line}" for line in lines)])


INPUT = stream(dtype=torch.float32)
IDS = {"ids": ids_of(2, 8, 1)}


def said(model: nn.Module, rules: Any, inputs: Any = INPUT, sp: bool = False) -> list[Diagnostic]:
    """The diagnostics of a plan for two ranks, of its rules or of more of it."""
    with pytest.raises(tpplan.PlanError) as caught:
        tpplan.check(model, parse(written(rules), "p"), 2, sp, inputs=inputs)
    return list(caught.value.diagnostics)


class Between(Layer):
    """An MLP with a habit between its projections."""

    def __init__(self, habit: str, inner: int = 32, back: int | None = None) -> None:
        super().__init__(inner, back)
        self.habit, self.heads, self.width = getattr(self, habit), 16, 2
        self.scales = {32: 1.0}
        self.table = nn.Parameter(torch.ones(4, 8))
        self.norm = nn.LayerNorm(32)

    def between(self, y: torch.Tensor) -> torch.Tensor:
        return self.habit(y)  # type: ignore[no-any-return]

    def sizes(self, y: torch.Tensor) -> torch.Tensor:
        return y.view(2, 8, self.heads // 4, 4 * self.width).flatten(2)

    def written(self, y: torch.Tensor) -> torch.Tensor:
        return y.view(2, 8, 4, 8).flatten(2)

    def kind(self, y: torch.Tensor) -> torch.Tensor:
        return y if y.size(-1) == 32 else y + None  # type: ignore[operator]

    def key(self, y: torch.Tensor) -> torch.Tensor:
        return y * self.scales[y.size(-1)]

    def name(self, y: torch.Tensor) -> torch.Tensor:
        return y if y.size(-1) == 32 else y.nothing  # type: ignore[attr-defined,no-any-return]

    def entries(self, y: torch.Tensor) -> torch.Tensor:
        return y + self.table[torch.arange(4)].sum()

    def numbers(self, y: torch.Tensor) -> torch.Tensor:
        return y if y.sum().item() > 0 else 2 * y

    def asserts(self, y: torch.Tensor) -> torch.Tensor:
        assert y.size(-1) == 32
        return y

    def unruled(self, y: torch.Tensor) -> torch.Tensor:
        return self.norm(y)  # type: ignore[no-any-return]

    def gated(self, y: torch.Tensor) -> torch.Tensor:
        return F.glu(y)

    def mixed(self, y: torch.Tensor) -> torch.Tensor:
        return y.softmax(-1)


def between(habit: str, back: int | None = None) -> Stack:
    """Layers whose parameters beside the projections have rules that leave them whole."""
    return Stack(lambda _: Between(habit, 32, back))


WHOLE = {"layers.*.norm": "replicate", "layers.*.table": "replicate"}
CUT = {"layers.*.table": "colwise", "layers.*.norm": "replicate"}
# a habit: the rules beside the projections', what is said, what is not, the line it stops at
STOPS: dict[str, tuple[dict[str, str], str, str, str]] = {
    "written": (
        WHOLE,
        "read it from an attribute (the module has heads, width), which 'attributes'",
        "packed",
        "4, 8",
    ),
    "kind": (WHOLE, "TypeError: unsupported operand", "attributes", "else y + None"),
    "key": (WHOLE, "KeyError: 16", "attributes", "self.scales"),
    "name": (WHOLE, "has no attribute 'nothing'", "'attributes'", "else y.nothing"),
    "entries": (CUT, "cut along its first dimension: that must be", "attributes", "self.table["),
    "asserts": (WHOLE, "'attributes' of the attention style", "packed", "assert y.size(-1)"),
    "mixed": (WHOLE, "where this code mixes columns", "attributes", "self.out("),
}


@pytest.mark.parametrize("habit", STOPS)
def test_each_failure_has_its_own_cause_and_line(habit: str) -> None:
    rules, due, never, line = STOPS[habit]
    first = said(between(habit), {**MLP, **rules}, stream(dtype=torch.float32))[0]
    assert due in f"{first.message}; {first.hint}"
    assert never not in f"{first.message}; {first.hint}"
    ((note, place),) = first.related
    assert note == "in the model's code"
    assert Path(place.file).stem in ("test_messages", "helpers")
    assert line in place.text


def test_a_table_is_said_at_its_own_rule() -> None:
    (found,) = said(between("entries"), {**MLP, **CUT})
    assert found.position is not None
    assert "layers.*.table" in found.position.text


def test_the_numbers_of_the_line_are_named() -> None:
    (found,) = said(between("sizes"), {**MLP, **WHOLE})
    due = "make the number that counts all columns here a rank's own, in 'attributes' of the "
    assert found.hint == f"{due}attention style: heads, width"


def test_a_norm_that_columns_reach() -> None:
    (found,) = said(between("unruled"), {**MLP, **WHOLE})
    due = "its rule says replicate, and it is given columns: make layers.*.norm colwise"
    assert found.hint == due


PROJECTIONS = {"qkv": "colwise", "out": "rowwise"}
PACKED: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "cut by sizes": (lambda: Packed(16), PROJECTIONS, "packed: [q, k, v]"),
    "cut in three": (lambda: Packed(None), PROJECTIONS, "packed: [q, k, v]"),
    "twice as wide": (
        lambda: between("gated", 16),
        {**MLP, **WHOLE},
        "layers.*.fc looks like several projections side by side: name its parts in their order, "
        "packed: [gate, up]",
    ),
    "parts in another order": (
        lambda: Packed(None),
        {**PROJECTIONS, "qkv": {"style": "colwise", "packed": ["a", "b", "c", "d"]}},
        "name the parts under 'packed' as they lie in the weight",
    ),
    "not packed": (
        Written,
        {"{q,k,v}": "colwise", "out": "rowwise"},
        "a number here counts all columns: read it from an attribute, which 'attributes' of",
    ),
}


@pytest.mark.parametrize("case", PACKED)
def test_parts_side_by_side_are_seen(case: str) -> None:
    make, rules, due = PACKED[case]
    (found,) = said(make(), rules)
    assert due in str(found.hint)


class Scaled(nn.Module):
    """The mean of tokens, each by a number of its own that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, features: dict[str, torch.Tensor]) -> torch.Tensor:
        weights = features["attention_mask"].unsqueeze(-1) * self.scale
        return (features["token_embeddings"] * weights).sum(1)


def pooled() -> nn.Module:
    encoder = sentence.encoder(library.BERT)
    encoder[1] = Scaled()
    return encoder[:2]


SENTENCES = ({"input_ids": ids_of(2, 8, 1), "attention_mask": torch.ones(2, 8, dtype=torch.long)},)


class Normed(Layer):
    """Its weights are made of a length and a direction."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = weight_norm(self.fc), weight_norm(self.out)


class MeanOfNorm(Stack):
    """A mean by learned weights, in the model's own code."""

    def __init__(self) -> None:
        super().__init__(lambda _: Layer())
        self.norm, self.scale = nn.LayerNorm(WIDTH), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = self.norm(super().forward(x))
        return (y * (mask.unsqueeze(-1) * self.scale)).sum(1)


class Named(Stack):
    """A layer and a parameter of one name."""

    def __init__(self) -> None:
        super().__init__(lambda _: Layer())
        self.gate, self.a = nn.Linear(WIDTH, WIDTH), nn.Module()
        self.a.gate = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(super().forward(x)) @ self.a.gate  # type: ignore[no-any-return]


# a model, its rules (and more), a call, under sequence parallelism; where, what, what to do
Case = tuple[Callable[[], nn.Module], Any, Any, bool, str, str, str]
SITUATIONS: dict[str, Case] = {
    "parts in front of heads": (
        vit.VisionTransformer,
        vit.TOKEN_RULES.replace("{style: colwise, packed: [q, k, v]}", "colwise"),
        {"x": images_of(2, 1)},
        False,
        "attn.qkv",
        "blocks.*.attn.qkv (2 of them): colwise: tp 2 does not divide its 3 heads, but viewed as "
        "(3, 4, 8) it looks like 3 parts side by side",
        "tp may be 1, 3; if they are parts, say so with packed: [q, k, v]",
    ),
    "a pattern of modules and parameters": (
        Named,
        {**MLP, "**.gate": "replicate"},
        INPUT,
        False,
        "**.gate",
        "a.gate: no rule mentions this parameter of shape (16, 16)",
        "'**.gate' matches modules, and so leaves parameters out: give 'a.gate' a rule of its own",
    ),
    "a rule on a container": (
        xtransformers.decoder,
        xtransformers.RULES.replace("pos_emb.emb", "pos_emb"),
        {"x": ids_of(2, 8, 1)},
        True,
        "pos_emb",
        "pos_emb.emb.weight: no rule mentions this parameter",
        "the rule 'pos_emb' does not cover what is inside of its modules: give 'pos_emb.emb' a "
        "rule of its own",
    ),
    "a norm behind a mean": (
        lambda: vit.VisionTransformer(global_pool="avg", class_token=False),
        vit.RULES + "fc_norm: sequence_parallel\n",
        {"x": images_of(2, 1)},
        True,
        "fc_norm",
        "fc_norm: sequence_parallel: it is given (2, 32), which has no rows of the sequence",
        "make it replicate, which runs whole on every rank",
    ),
    "a head behind a mean": (
        lambda: uses.Valued("attention"),
        uses.KEYWORD_RULES + "value: sequence_parallel\n",
        {"ids": ids_of(2, 8, 1)},
        True,
        "value",
        "value: sequence_parallel: it is given (2, 32), which has no rows of the sequence",
        "make it replicate, which runs whole on every rank",
    ),
    "a mean by learned weights in a module": (
        pooled,
        {"layers": sentence.LAYERS, "rules": sentence.RULES + '"1.scale": replicate'},
        SENTENCES,
        True,
        "rules:",
        "1: combines the sequence-sharded stream with a whole tensor",
        "give '1' the style replicate: it is given all positions then",
    ),
    "a mean by learned weights in the model's code": (
        MeanOfNorm,
        {**MLP, "norm": "sequence_parallel", "scale": "replicate"},
        (INPUT, torch.ones(2, 8)),
        True,
        "norm",
        "the model itself: combines the sequence-sharded stream with a whole tensor",
        "give 'norm' the style replicate: it gives all positions then",
    ),
    "bare parameters, once for a rule": (
        lambda: uses.Decoder("einsum"),
        uses.WHOLE_RULES.replace(
            "layers.*.attn: {style: replicate, input: gather}", "layers.*.attn.{qkv,out}: colwise"
        ),
        IDS,
        False,
        "attn.{qkv,out}",
        "layers.*.attn.qkv (2 of them): colwise: tp 2 does not divide the 3 of its dimension 0",
        "tp may be 1, 3",
    ),
    "a bare parameter that nothing is multiplied by first": (
        lambda: uses.Decoder("einsum"),
        uses.EINSUM_RULES.replace("{style: colwise, dim: 1}", "replicate"),
        IDS,
        False,
        "attn.out",
        "layers.*.attn.out (2 of them): rowwise: is used outside a sharded region",
        "make it replicate",
    ),
    "a sum over a dimension that nobody knows": (
        lambda: uses.Decoder("einsum"),
        uses.EINSUM_RULES.replace("{style: rowwise, dim: 0}", "rowwise"),
        IDS,
        False,
        "attn.out",
        "layers.*.attn.out (2 of them): rowwise: which dimension of (4, 8, 32) is summed over?",
        "state it with 'dim:'",
    ),
    "a dimension that is not there": (
        lambda: uses.Decoder("einsum"),
        uses.EINSUM_RULES.replace("dim: 0", "dim: 3"),
        IDS,
        False,
        "attn.out",
        "layers.*.attn.out (2 of them): rowwise: its shape (4, 8, 32) has no dimension 3",
        "state one of these with 'dim:'",
    ),
    "bare columns that nothing sums": (
        lambda: uses.Decoder("einsum"),
        uses.EINSUM_RULES.replace("{style: rowwise, dim: 0}", "replicate"),
        IDS,
        False,
        "attn.qkv",
        "layers.*.attn (2 of them): colwise: its columns reach layers.*.up, head, and nothing",
        "end its region with a rowwise layer; 3 more complaints follow from it",
    ),
    "a bare parameter cut along something else": (
        lambda: uses.Decoder("einsum"),
        uses.EINSUM_RULES.replace("dim: 1", "dim: 2"),
        IDS,
        False,
        "attn.qkv",
        "layers.*.attn: on rank 0 of 2 it fails: RuntimeError: einsum(): subscript h",
        "state with 'dim:' which dimension of each parameter has the heads or columns that "
        "this code keeps apart; it may take sizes from parameters and attributes, not its input",
    ),
    "parts that a bare parameter does not have": (
        lambda: uses.Decoder("einsum"),
        uses.EINSUM_RULES.replace("dim: 1", "dim: 1, packed: [q, k]"),
        IDS,
        False,
        "attn.qkv",
        "layers.*.attn: on rank 1 of 2 it gives parts that do not sum up to what the whole model",
        "state with 'dim:' which dimension of each parameter is summed over; and let what is done "
        "to the sum (a residual, an activation) be done outside of this module",
    ),
    "a bare parameter's rule with an option of modules": (
        lambda: uses.Decoder("einsum"),
        uses.EINSUM_RULES.replace("dim: 0", "dim: 0, reduce: separate"),
        IDS,
        False,
        "attn.out",
        "layers.*.attn.out (2 of them): rowwise: 'reduce' says nothing of a bare parameter",
        "leave it out",
    ),
    "a dimension of a module": (
        lambda: uses.Decoder("einsum"),
        uses.EINSUM_RULES.replace("up: colwise", "up: {style: colwise, dim: 0}"),
        IDS,
        False,
        "layers.*.up",
        "layers.*.up (2 of them): colwise: 'dim' is for bare parameters",
        "leave it out: of a module it follows from what it computes",
    ),
    "a weight that is made of others": (
        lambda: Stack(lambda _: Normed()),
        {"layers.*.fc": "colwise", "layers.*.out": "replicate"},
        INPUT,
        False,
        "layers.*.fc",
        "layers.*.fc (2 of them): colwise: its weight is made of other parameters by _WeightNorm, "
        "which needs the whole of it; fold that into the weight first",
        "give it another style, or modules inside of it this one; replicate suits all",
    ),
    "layers that are only held": (
        lambda: Stack(lambda _: Layer()),
        {"layers": "layers", "rules": MLP},
        INPUT,
        True,
        "layers: layers",
        "layers: 'layers' names modules that are only held, not called",
        "name those inside of them: 'layers.*'",
    ),
    "layers that are not there": (
        lambda: Stack(lambda _: Layer()),
        {"layers": "layer.*", "rules": MLP},
        INPUT,
        True,
        "layers: layer.*",
        "layers: 'layer.*' names no module that was called",
        "did you mean 'layers.*'?",
    ),
    "layers inside of a Sequential": (
        pooled,
        sentence.RULES + '"1.scale": replicate',
        SENTENCES,
        True,
        "rules:",
        "the model itself: no layer stack was found for the sequence-sharded stream",
        "name it, 'layers: 0.auto_model.encoder.layer.*', or turn sequence_parallel off",
    ),
}


@pytest.mark.parametrize("case", SITUATIONS)
def test_what_where_and_what_to_do(case: str) -> None:
    make, rules, call, sp, where, what, cure = SITUATIONS[case]
    (found,) = said(make(), rules, call, sp)
    assert found.position is not None
    assert where in found.position.text
    assert found.message.startswith(what)
    assert found.hint == cure


ERRORS: dict[str, tuple[Callable[[torch.Tensor], object], Stop]] = {
    "view": (lambda x: x.view(5, 5), Stop.SIZES),
    "split": (lambda x: x.split([1, 2], -1), Stop.SIZES),
    "unflatten": (lambda x: x.unflatten(-1, (3, 3)), Stop.SIZES),
    "broadcast": (lambda x: x + torch.zeros(7), Stop.SIZES),
    "product": (lambda x: x @ torch.zeros(7, 7), Stop.SIZES),
    "table": (lambda x: F.embedding(torch.tensor([9]), x), Stop.ENTRY),
    "index": (lambda x: x[torch.tensor([9])], Stop.ENTRY),
    "list": (lambda x: [x][1], Stop.CODE),
    "key": (lambda x: {}["size"], Stop.CODE),
    "type": (lambda x: x + None, Stop.CODE),  # type: ignore[operator]
    "name": (lambda x: x.shapes, Stop.CODE),  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_kind_of_error(case: str) -> None:
    run, kind = ERRORS[case]
    with pytest.raises(Exception) as caught:
        run(torch.zeros(4, 8))
    assert kind_of(caught.value) is kind
    place = place_of(caught.value)
    assert place is not None
    assert place.text.strip()
