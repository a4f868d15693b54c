"""How far apart two tensors are, also beside numbers that are not finite."""

from __future__ import annotations

import torch

from tpplan.observe.numbers import difference, largest

INF, NAN = float("inf"), float("nan")


def test_errors() -> None:
    due = torch.tensor([1.0, -4.0, INF])
    assert largest(due) == 4.0 and largest(torch.tensor([NAN, INF])) == 0.0
    assert difference(due, torch.tensor([1.0, -4.0, INF])) == 0.0
    assert difference(due, torch.tensor([1.5, -4.0, INF])) == 0.5
    assert difference(due, torch.tensor([1.0, -4.0, -INF])) == INF
    assert difference(due, torch.tensor([1.0, -4.0, 5.0])) == INF
    assert difference(due, torch.tensor([1.0, NAN, INF])) == INF
    unknown = torch.tensor([1.0, NAN])
    assert difference(unknown, unknown) == INF
    assert difference(unknown, torch.tensor([3.0, NAN]), equal_nan=True) == 2.0
