"""What is advised: what fits, what is fastest, and the reasons."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

import tpplan
from benchmarks import zoo
from tests.models import hf
from tpplan import Advice
from tpplan.cost.advise import USABLE, Choice
from tpplan.cost.dry_run import Setting
from tpplan.cost.hardware import load_hardware
from tpplan.cost.run import DryRun
from tpplan.language import Diagnostic

# the sweep they read is made once, in one process
pytestmark = pytest.mark.xdist_group("advise")

H100 = load_hardware("h100-nvlink")
PAIRS = replace(H100, name="pairs", node=2)


@pytest.fixture(scope="module")
def advice() -> Advice:
    """A model of two KV heads and four layers on two nodes of two GPUs."""
    model = hf(device="meta", num_hidden_layers=4, num_key_value_heads=2)
    return tpplan.advise(model, "llama.yaml", 4, 8, 16, hardware=PAIRS)


@pytest.mark.turns(24)
def test_a_model_that_fits_a_gpu_is_not_cut(advice: Advice) -> None:
    assert advice.best is not None
    assert advice.best.tp == 1
    assert all(c.tp * c.pp * c.dp == 4 for c in advice.choices)
    assert "Choose tp 1" in str(advice)


@pytest.mark.turns(24)
def test_what_a_size_costs_is_said(advice: Advice) -> None:
    four = next(size for size in advice.sizes if size.tp == 4)
    assert any("crosses the node of 2" in note for note in four.notes)
    assert any("more ranks than KV heads" in note for note in four.notes)
    assert "tp 4: " in str(advice)


@pytest.mark.turns(24)
def test_more_pipeline_stages_more_idle_time(advice: Advice) -> None:
    idle = {c.pp: c.idle / c.seconds for c in advice.choices if c.tp == 1 and not c.checkpointing}
    assert idle[1] == 0
    assert 0 < idle[2] < idle[4]


@pytest.mark.turns(12)
def test_what_fits_nowhere_is_said_and_heads_that_do_not_divide() -> None:
    tight = replace(H100, name="small", memory=1e4)
    model = hf(device="meta", hidden_size=96, num_attention_heads=6, num_key_value_heads=3)
    advice = tpplan.advise(model, "llama.yaml", 4, 8, 16, hardware=tight)
    assert advice.best is None
    assert "Nothing fits" in str(advice)
    four = next(size for size in advice.sizes if size.tp == 4)
    assert four.best is None
    assert any("does not divide" in note for note in four.notes)


@pytest.mark.turns(24)
def test_batches_that_cannot_be_shared_out() -> None:
    advice = tpplan.advise(hf(device="meta"), "llama.yaml", 2, 3, 16)
    assert {c.dp for c in advice.choices} <= {1}


@pytest.mark.turns(24)
def test_ways_to_share_experts() -> None:
    """Two GPUs a node: ranks of ep share experts within it, and as many as can."""
    tight = replace(PAIRS, memory=2e6)
    model = zoo.tiny("mixtral").to("meta")
    advice = tpplan.advise(model, "auto", 4, 4, 16, hardware=tight)
    of_two = {(c.shard, c.ep) for c in advice.choices if c.tp == 2}
    assert of_two == {("inner", 1), ("experts", 1), ("inner", 2)}
    assert {c.ep for c in advice.choices if c.tp == 1} == {1, 2, 4}
    assert all(c.dp % c.ep == 0 for c in advice.choices)
    # what ranks of ep hold of experts is not held by the others
    least = {n: min(c.bytes for c in advice.choices if c.tp == 1 and c.ep == n) for n in (1, 4)}
    assert least[4] <= least[1]
    assert "experts: inner" in str(advice)


@pytest.mark.turns(24)
def test_ways_that_do_not_go_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ranks of ep cannot run stands beside what goes."""
    advising = sys.modules["tpplan.cost.advise"]
    executed = advising.dry_run

    def refusing(model: nn.Module, setting: Setting, *args: Any, **kwargs: Any) -> DryRun:
        if setting.ep > 1:
            raise tpplan.PlanError([Diagnostic("no such luck")])
        return executed(model, setting, *args, **kwargs)

    monkeypatch.setattr(advising, "dry_run", refusing)
    model = zoo.tiny("mixtral").to("meta")
    advice = tpplan.advise(model, "auto", 2, 2, 16, hardware=PAIRS)
    assert "ep 2: no such luck" in next(size for size in advice.sizes if size.tp == 1).notes
    assert {c.ep for c in advice.choices} == {1}


@pytest.mark.turns(24)
def test_rows_are_kept_where_there_is_no_room_for_more() -> None:
    """Between what layers need that keep all and that keep rows, keeping rows is what fits."""
    model = hf(device="meta", num_hidden_layers=2)

    def ways(room: float) -> dict[str, Choice]:
        hardware = replace(H100, name="tight", memory=room, node=2)
        advice = tpplan.advise(model, "llama.yaml", 2, 2, 256, micro_batch=2, hardware=hardware)
        assert ("rows kept" in str(advice)) == (room > 1)
        two = (c for c in advice.choices if c.tp == 2 and c.sequence_parallel and c.pp == 1)
        return {c.save: c for c in two if not c.checkpointing}

    least = {save: choice.bytes for save, choice in ways(1).items()}
    assert least["shard"] < least["gathered"]
    found = ways(sum(least.values()) / 2 / USABLE)
    assert {save: choice.fits for save, choice in found.items()} == {
        "gathered": False,
        "shard": True,
    }
