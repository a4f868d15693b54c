"""Sums in another order change nothing but rounding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tpplan
from benchmarks import zoo
from tpplan.proof.rounding import Reordered, differences, own_rounding, reordered
from tpplan.proof.verify import references_of


def test_products_in_another_order() -> None:
    x, w, b = (torch.randn(*s, dtype=torch.float64) for s in ((3, 5, 40), (7, 40), (7,)))
    with Reordered(1):
        found = (x @ w.t(), torch.nn.functional.linear(x, w, b), x @ x.transpose(1, 2))
    expected = (x @ w.t(), torch.nn.functional.linear(x, w, b), x @ x.transpose(1, 2))
    for mine, theirs in zip(found, expected, strict=True):
        assert not torch.equal(mine, theirs)
        torch.testing.assert_close(mine, theirs)


def test_of_a_model() -> None:
    model = zoo.makers()["llama"]()
    (reference,) = references_of(model, zoo.example(model), 0)
    errors = differences(reference, reordered(reference, 1))
    assert errors.keys() == {"", *reference.gradients}
    assert 0 < max(errors.values()) < 1e-5
    worst = own_rounding(reference, reference)
    assert all(worst[name] <= 1e-5 for name in errors)
    assert max(worst.values()) > 0


class Low(nn.Module):
    """On a rank only, whose columns are fewer, the gradient goes through a bfloat16 factor."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("factor", torch.tensor(0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, exact = self.fc(x).relu(), self.get_buffer("factor")
        if y.shape[-1] == 32:
            return x + self.out(exact * y)
        low = exact.to(torch.bfloat16).to(y.dtype)
        return x + self.out(low * y + ((exact - low) * y).detach())


class Lows(nn.Module):
    """Such layers; with a norm at the end a plain sum of the outputs has no gradient."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(Low() for _ in range(2)), norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.layer_norm(x, (16,)) if self.norm else x


@pytest.mark.parametrize("norm", [False, True])
def test_what_float64_hides_is_no_rounding(norm: bool) -> None:
    torch.manual_seed(0)
    rules = {"layers.*.fc": "colwise", "layers.*.out": "rowwise"}
    plan = tpplan.load_plan({"tpplan": 1, "sequence_parallel": False, "rules": rules})
    with pytest.raises(tpplan.VerificationError, match="gradients by"):
        tpplan.verify(Lows(norm), plan, 2, inputs=torch.randn(2, 8, 16))
