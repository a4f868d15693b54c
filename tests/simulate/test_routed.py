"""Dry runs of code that goes by what is chosen by numbers: each expert as often as the others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tpplan
from tests.rewrite import MODES
from tests.routed import EXPERTS, INNER, WIDTH, Model, plan
from tpplan.compat import FakeTensor, FakeTensorMode, NeedsValuesError
from tpplan.simulate.values import RealValues


@pytest.mark.turns(4)
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


@pytest.mark.parametrize("dim", [0, -1])
def test_each_is_chosen_as_often(dim: int) -> None:
    mode = FakeTensorMode()
    with mode, RealValues(spread=True):
        scores = torch.randn(6, 6)
        found = [
            scores.topk(2, dim).indices,
            scores.argsort(dim),
            scores.sort(dim=dim, stable=True).indices,
            scores.argmax(dim),
            scores.argmax(dim, keepdim=True),
            scores.max(dim).indices,
        ]
        with pytest.raises(NeedsValuesError):
            scores.nonzero()
    assert found[0].shape == torch.zeros(6, 6).topk(2, dim).indices.shape
    for chosen in found:
        counts = torch.bincount(chosen.flatten(), minlength=6)
        assert not isinstance(chosen, FakeTensor) and len(set(counts.tolist())) == 1
        rows = chosen.movedim(dim, -1) if chosen.dim() == 2 else chosen[:, None]
        assert all(len(set(row)) == len(row) for row in rows.tolist())


@MODES
@pytest.mark.turns(12)
def test_folded(sp: bool) -> None:
    inputs = torch.randn(2, 8, WIDTH)
    folded = tpplan.dry_run(Model(6), plan(sp), 2, inputs=inputs)
    whole = tpplan.dry_run(Model(6), plan(sp), 2, inputs=inputs, fold=False)
    assert folded.collectives == whole.collectives
    assert folded.memory == whole.memory
    assert folded.time is not None and whole.time is not None
    assert folded.time.flops == whole.time.flops


def test_a_number_of_each_sequence() -> None:
    """A language, say, that is the same for all where nobody gives one: who has it is known."""
    with FakeTensorMode(allow_non_fake_inputs=True), RealValues(spread=True):
        hidden, others = torch.randn(3, 5, WIDTH), torch.zeros(3, 5, WIDTH)
        languages = 2.0 * torch.ones(3)
        for language, count in ((1, 0), (2, 3)):
            chosen = hidden[languages == language]
            assert isinstance(chosen, FakeTensor)
            assert chosen.shape == (count, 5, WIDTH)
            others[languages == language] = chosen
            assert others.shape == hidden.shape
        assert isinstance(torch.ones(3, 5), FakeTensor)
