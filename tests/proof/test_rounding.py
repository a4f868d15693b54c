"""Sums in another order change nothing but rounding."""

from __future__ import annotations

import torch

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
