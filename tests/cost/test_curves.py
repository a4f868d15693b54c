"""Runs to compare a run with: what was known of the model before changes nothing of them."""

from __future__ import annotations

import pytest

import tpplan
from benchmarks import zoo
from tpplan.cost.curves import with_companions
from tpplan.cost.dry_run import Setting, dry_run
from tpplan.render import Report
from tpplan.simulate.execute import Training
from tpplan.simulate.optimizers import optimizer_named


@pytest.mark.turns(24)
@pytest.mark.parametrize("name", ["qwen3_moe", "llama"])
def test_companions_are_what_runs_of_their_own_give(name: str) -> None:
    """With layers enough to be folded."""
    model = zoo.tiny(name, num_hidden_layers=12).to("meta")
    plan, training = tpplan.load_plan("auto", model), Training(optimizer_named("adamw"))
    setting = Setting(plan, 2)
    first = dry_run(model, setting, 1, 16, training)
    assert first.executed
    found = with_companions(model, setting, first, (1, 2, 4)).companions
    apart = [Setting(plan, 1), Setting(plan, 4), Setting(plan, 2, False)]
    assert len(found) == len(apart)
    for ours, alone in zip(found, apart, strict=True):
        wanted = dry_run(model, alone, 1, 16, training, both=ours.other is not None)
        assert Report.of(ours).to_dict() == Report.of(wanted).to_dict()
