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


def test_more_numbers_than_are_looked_at_at_once() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(7, 30_001), (3, 2, 20_011), (100_003,)]
    for shape in shapes:
        due = torch.rand(shape, generator=generator, dtype=torch.float64)
        got = due.clone()
        flat = got.view(-1)  # what differs is in the last piece, then in the first
        flat[-1] += 2.0
        assert difference(due, got) == 2.0 and largest(got) == float(flat[-1])
        flat[0] -= 4.0
        assert abs(difference(due, got) - 4.0) < 1e-12 and largest(got) == abs(float(flat[0]))
        assert difference(due, got.transpose(0, -1).contiguous().transpose(0, -1)) >= 4.0
        flat[-2] = NAN
        assert difference(due, got) == INF and largest(got) == abs(float(flat[0]))
        assert difference(got, got) == INF and difference(got, got, equal_nan=True) == 0.0
        flat[-2] = INF
        assert difference(got, got) == 0.0 and difference(due, got) == INF
    numbers = torch.view_as_complex(torch.rand(70_001, 2, generator=generator))
    assert largest(numbers) == float(numbers.abs().max())
    assert difference(numbers, numbers + 1) > 0.99
