"""Dry runs of code that goes by what is chosen by numbers: each expert as often as the others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tpplan
from tests.rewrite import MODES
from tests.routed import EXPERTS, INNER, WIDTH, Model, plan


@MODES
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_counts_and_flops(sp: bool, device: str) -> None:
    torch.manual_seed(0)
    real, inputs = Model(), torch.randn(2, 8, WIDTH)
    with torch.device(device):
        model: nn.Module = Model()
    report = tpplan.dry_run(model, plan(sp), 2, inputs=inputs)
    (check,) = tpplan.verify(real, plan(sp), 2, sequence_parallel=sp, inputs=inputs).checks
    for phase in ("forward", "backward"):
        assert report.counts(phase) == check.counts[phase]
    # of a rank and a token: two experts in each layer, of which it has a half
    weights = WIDTH * WIDTH + 2 * WIDTH * (EXPERTS + 2 * 3 * INNER // 2) + 4 * WIDTH
    assert report.time is not None  # no gradient of the inputs is wanted
    assert report.time.flops == 16 * (6 * weights - 2 * WIDTH * WIDTH)


@MODES
def test_folded(sp: bool) -> None:
    inputs = torch.randn(2, 8, WIDTH)
    folded = tpplan.dry_run(Model(6), plan(sp), 2, inputs=inputs)
    whole = tpplan.dry_run(Model(6), plan(sp), 2, inputs=inputs, fold=False)
    assert folded.collectives == whole.collectives
    assert folded.memory == whole.memory
    assert folded.time is not None and whole.time is not None
    assert folded.time.flops == whole.time.flops
