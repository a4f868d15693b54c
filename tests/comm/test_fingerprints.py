"""Sums that tell tensors of two ranks apart by how far they are."""

from __future__ import annotations

import pytest
import torch

from tpplan.comm.fingerprints import APART, are_apart, projections

SHAPES = ((), (1,), (7,), (3, 5), (2, 9, 16), (2**17,), (2**17, 1), (1, 2**17), (300, 500))
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.complex128)


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=dtype, generator=generator)


def apart(a: torch.Tensor, b: torch.Tensor, tolerance: float = APART) -> bool:
    found = torch.stack([projections(a), projections(b)])
    assert found.dtype == torch.float64 and found.shape == (2, 5)
    assert not are_apart(found, tolerance)[0]
    return bool(are_apart(found, tolerance)[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_difference_counts_by_its_size(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, other = drawn(shape, dtype), drawn(shape, dtype, 1)
    assert not apart(x, x.clone())
    assert apart(x, other) and apart(x, -x) and apart(x, 1.1 * x)
    assert not apart(x, (1 + 1e-3) * x)
    assert apart(x, torch.zeros_like(x)) and not apart(0 * x, 0 * x)
    size = torch.linalg.vector_norm(x.to(torch.complex128))
    assert float(projections(x)[0]) == pytest.approx(float(size), rel=1e-5)


def test_rows_and_columns_that_change_places_count() -> None:
    x = drawn((40, 60), torch.float64)
    assert apart(x, x.flip(0)) and apart(x, x.flip(1)) and apart(x, x.roll(1, 0))


@pytest.mark.parametrize("masked", [-torch.inf, torch.finfo(torch.float32).min, torch.nan, 1e20])
def test_what_is_masked_hides_nothing(masked: float) -> None:
    x = drawn((4, 6), torch.float32)
    y = 2 * x
    x[0, 0] = y[0, 0] = masked
    assert apart(x, y) and not apart(x, x.clone())


def test_small_numbers_have_a_size() -> None:
    x = 1e-30 * drawn((4, 6), torch.float32)
    assert not apart(x, (1 + 1e-5) * x) and apart(x, 2 * x)


def test_half_precision_around_it_is_not_taken() -> None:
    x = 3e4 * torch.ones(8, 64)
    expected = projections(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(projections(x), expected)


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(0, 3), torch.zeros(3, 0), torch.eye(3).to_sparse(),
        torch.ones(3, dtype=torch.bool), torch.arange(4), torch.ones(2, dtype=torch.uint8),
        torch.ones(4).to(torch.float8_e4m3fn), torch.ones(3, 2, dtype=torch.complex64).conj(),
        torch.ones(5, 4).t(), torch.ones(1).expand(6), torch.ones(4, requires_grad=True),
    ],
    ids=str,
)  # fmt: skip
def test_of_any_tensor(x: torch.Tensor) -> None:
    assert not apart(x, x) and not projections(x).requires_grad
