"""State-space mixers in code of their own: right, at the least cost, or refused in clear words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import tpplan
from tests.mixers import (
    BY_HEADS,
    CHANNELS,
    INNER,
    OPENED,
    READING,
    WIDTH,
    ByChannels,
    ByHeads,
    Fusing,
    Gated,
    Layer,
    Opened,
    Reading,
)
from tests.planner.helpers import Stack, stream
from tpplan.compiled import CompiledPlan

pytestmark = pytest.mark.turns(4)

Rules = Mapping[str, Any]


def model_of(mixer: Callable[[], nn.Module]) -> nn.Module:
    return Stack(lambda _: Layer(mixer()))


def verified(
    mixer: Callable[[], nn.Module], rules: Rules, tp: int = 2, sp: bool = False
) -> tpplan.Verification:
    plan = tpplan.load_plan({"tpplan": 1, "rules": dict(rules)})
    inputs = stream(13, torch.float32)
    return tpplan.verify(model_of(mixer), plan, tp, sequence_parallel=sp, inputs=inputs)


def checked(mixer: Callable[[], nn.Module], rules: Rules) -> CompiledPlan:
    plan = tpplan.load_plan({"tpplan": 1, "rules": dict(rules)})
    return tpplan.check(model_of(mixer), plan, 2, False, inputs=stream(13, torch.float32))


def refusal(mixer: Callable[[], nn.Module], rules: Rules, sp: bool = False) -> str:
    with pytest.raises(tpplan.PlanError) as raised:
        verified(mixer, rules, sp=sp)
    return str(raised.value)


# mixer, its rules, and the reductions beyond the exit, for tp 2 and 4
RIGHT: Mapping[str, tuple[Callable[[], nn.Module], Rules, tuple[int, int]]] = {
    "channels": (ByChannels, CHANNELS, (1, 1)),
    "channels, a convolution that is read": (Reading, READING, (1, 1)),
    "heads": (ByHeads, BY_HEADS, (1, 1)),
    "a sum with a gate": (Opened, OPENED, (0, 0)),
    "heads in two groups": (partial(ByHeads, partial(Gated, 2)), BY_HEADS, (0, 1)),
}


@pytest.mark.parametrize(("tp", "sp"), [(2, False), (2, True), (4, False), (4, True)])
@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.turns(24)
def test_right(name: str, tp: int, sp: bool) -> None:
    mixer, rules, beyond = RIGHT[name]
    result = verified(mixer, rules, tp, sp)
    assert result.gradient_error <= 1e-5
    more = 2 * beyond[tp > 2]
    for phase in ("forward", "backward"):
        counts = {kind: n for kind, n in result.counts[phase].items() if n}
        if not sp:
            assert counts == {"all_reduce": 2 + more}
        else:
            assert counts.get("all_reduce", 0) == more
            assert counts["reduce_scatter"] == 2


def without(rules: Rules, pattern: str, **others: Any) -> Rules:
    """The rules but for one, and others."""
    assert pattern in rules
    kept = {k: v for k, v in rules.items() if k != pattern}
    return {**kept, **{f"layers.*.mixer.{name}": rule for name, rule in others.items()}}


class Bent(Opened):
    """More than linear."""

    def ended(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return gate * y.tanh()


class Dropped(Opened):
    """Gives something else."""

    def ended(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return gate


DIAL = "layers.*.mixer.dial"
SCALES = "layers.*.mixer.{decay,skip}"
OF_HEADS = "layers.*.mixer.{decay,skip,gain}"
WRONG: Mapping[str, tuple[Callable[[], nn.Module], Rules, str]] = {
    "parts that are bent": (Bent, OPENED, "gives parts that do not sum up"),
    "a sum that is not given": (Dropped, OPENED, "it gives no sum of row-parallel layers inside"),
    "a layer that is reduced as a whole": (
        Opened,
        {**without(OPENED, "layers.*.mixer"), "layers.*": OPENED["layers.*.mixer"]},
        "an element of the stack gives the stream, not a part of a sum",
    ),
    "a sum that is whole outside": (
        ByChannels,
        without(CHANNELS, DIAL, dial="rowwise"),
        "if the code goes on with the sum, give layers.*.mixer.dial 'output: inside'",
    ),
    "a product of a part": (
        ByChannels,
        without(CHANNELS, DIAL, dial="replicate"),
        "takes the columns of layers.*.mixer.blur, and nothing sums it",
    ),
    "columns of columns": (
        ByChannels,
        without(CHANNELS, DIAL, dial="colwise"),
        "its input is already sharded",
    ),
    "columns of a sum": (
        ByChannels,
        without(CHANNELS, DIAL, dial={"style": "rowwise", "output": "shard"}),
        "its columns reach layers.*.mixer.pace, and nothing sums them",
    ),
    "an exit that goes on": (
        ByChannels,
        {**CHANNELS, "layers.*.mixer.back": {"style": "rowwise", "output": "inside"}},
        "sharded activations leave it",
    ),
    "no rule for a convolution": (
        ByChannels,
        without(CHANNELS, "layers.*.mixer.blur"),
        "give 'layers.*.mixer.blur' a rule of its own",
    ),
    "no rule for what is read": (
        Reading,
        without(READING, "layers.*.mixer.blur.{weight,bias}"),
        "give 'layers.*.mixer.blur' a rule of its own",
    ),
    "a whole scale": (
        ByChannels,
        without(CHANNELS, SCALES, skip="replicate", decay="colwise"),
        "layers.*.mixer.skip may have an entry for every column or head: make it colwise",
    ),
    "a whole decay": (
        ByHeads,
        without(BY_HEADS, OF_HEADS, **{"{skip,gain}": "colwise", "decay": "replicate"}),
        "layers.*.mixer.decay may have an entry for every column or head: make it colwise",
    ),
    "a whole buffer": (
        ByHeads,
        without(BY_HEADS, OF_HEADS, **{"{skip,decay}": "colwise"}),
        "layers.*.mixer.gain may have an entry for every column or head: make it colwise",
    ),
    "a buffer to multiply by": (
        ByHeads,
        without(BY_HEADS, OF_HEADS, **{"{skip,decay}": "colwise", "gain": "rowwise"}),
        "a buffer can be colwise or replicate, not rowwise",
    ),
    "a whole norm": (
        ByHeads,
        {**BY_HEADS, "layers.*.mixer.level": "replicate"},
        "and it is given columns: make layers.*.mixer.level colwise",
    ),
    "parts that are not named": (
        ByHeads,
        {**BY_HEADS, "layers.*.mixer.blur": "colwise"},
        "name the parts under 'packed' as they lie in the weight",
    ),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.turns(12)
def test_wrong(name: str) -> None:
    mixer, rules, said = WRONG[name]
    text = refusal(mixer, rules)
    assert said in text.replace("layers.0.", "layers.*."), text


EVALUATING = {
    **CHANNELS,
    "layers.*.mixer": {"style": "attention", "gather": ["x"], "eval": True},
}


def test_code_for_training_that_knows_of_one_rank() -> None:
    assert verified(Fusing, EVALUATING, 2, True).gradient_error <= 1e-5
    assert checked(Fusing, EVALUATING).modules["layers.0.mixer"].draws is None
    with pytest.raises(tpplan.PlanError, match="mixed torch"):
        checked(Fusing, CHANNELS)


class Drawing(Fusing):
    """Draws in training."""

    def blurred(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().blurred(x), 0.1, self.training)


def test_code_that_draws_cannot_run_as_in_evaluation(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(yaml.safe_dump({"tpplan": 1, "rules": EVALUATING}))
    with pytest.raises(tpplan.PlanError, match="its own code draws random numbers") as refused:
        tpplan.check(model_of(Drawing), file, 2, False, inputs=stream(13, torch.float32))
    (found,) = refused.value.diagnostics
    assert found.position is not None
    assert found.position.text[found.position.column - 1 :].startswith("eval")


class Torchs(nn.Module):
    """torch's own attention in a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.attn(x, x, x, need_weights=False)[0]
        return x + made


def test_torchs_own_attention_has_no_code_to_run_as_in_evaluation() -> None:
    norms = {"layers.*.norm": "sequence_parallel"}
    rules = {**norms, "layers.*.mixer.attn": {"style": "attention", "eval": True}}
    assert "torch's own attention, whose code is not run" in refusal(Torchs, rules)


class Counting(ByHeads):
    """Writes to its buffer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.gain.mul_(1.0)
        return super().forward(x)


def test_a_buffer_that_is_written_to() -> None:
    assert "the model's code writes to this buffer" in refusal(Counting, BY_HEADS)


def test_heads_that_tp_does_not_divide() -> None:
    with pytest.raises(tpplan.PlanError, match="tp 3 does not divide the 8 of its dimension 0"):
        verified(ByHeads, BY_HEADS, 3)


def test_buffers_stay_whole() -> None:
    model = model_of(ByHeads)
    names = {name: b.shape for name, b in model.named_buffers()}
    (rows,) = checked(ByHeads, BY_HEADS).modules["layers.0.mixer"].buffers.values()
    assert rows.length() == names["layers.0.mixer.gain"][0] // 2


class Convolving(nn.Module):
    """A product by channels, then a convolution of groups of several channels."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.wide, self.back = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.blur = nn.Conv1d(INNER, INNER, 3, groups=groups, padding=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.blur(self.wide(x).mT)[..., : x.size(1)].mT
        out: torch.Tensor = self.back(y.relu())
        return out


CONVOLVING = {
    "layers.*.norm": "sequence_parallel",
    "layers.*.mixer.{wide,blur}": "colwise",
    "layers.*.mixer.back": "rowwise",
}


def test_groups_of_channels() -> None:
    assert verified(partial(Convolving, 8), CONVOLVING, 4, True).gradient_error <= 1e-5
    said = refusal(partial(Convolving, 1), CONVOLVING)
    assert "tp 2 does not divide its 1 groups" in said
