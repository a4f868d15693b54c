"""The vocab-parallel look-up: kernels against float64, on the shards of several ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.kernels import DEVICE, DTYPES, TOLERANCES, beyond, error, errors, random
from tpplan.kernels.embedding import look_up

START, ROWS = 20, 10


def some_ids(*shape: int, seed: int = 0, dtype: torch.dtype = torch.long) -> torch.Tensor:
    """Of three ranks of ten rows each, the second of which is tested; many twice."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(10, 40, shape, generator=generator).to(DEVICE, dtype)


def formula(
    ids: torch.Tensor, weight: torch.Tensor, padding_idx: int | None = None
) -> torch.Tensor:
    """The whole look-up, in which the other ranks' rows are zero."""
    v = weight.size(0)
    whole = F.pad(weight, (0, 0, START, 40 - START - v))
    return F.embedding(ids.long(), whole, padding_idx)


@pytest.mark.parametrize("h", [1, 7, 768, 4097])
@DTYPES
def test_values_and_gradients(h: int, dtype: torch.dtype) -> None:
    ids = some_ids(3, 8, dtype=torch.int32 if h == 7 else torch.int64)
    weight = random(ROWS, h, dtype=dtype, seed=h)
    found = errors(lambda w: look_up(ids, w, START), lambda w: formula(ids, w), [weight])
    assert found.pop("result 0") == 0
    assert not beyond(found, TOLERANCES[dtype])


@pytest.mark.parametrize("padding", [None, 5, 20, 29, 35])
def test_padding(padding: int | None) -> None:
    ids, weight = some_ids(50), random(ROWS, 8, dtype=torch.float32, seed=1)
    found = errors(
        lambda w: look_up(ids, w, START, padding), lambda w: formula(ids, w, padding), [weight]
    )
    assert not beyond(found, 1e-6)


def test_one_id_very_often() -> None:
    """Sums are float32: in bfloat16 256 + 1 is 256."""
    ids = torch.full((300,), START + 3, device=DEVICE)
    weight = random(ROWS, 8, dtype=torch.bfloat16, seed=1)
    (grad,) = torch.autograd.grad(look_up(ids, weight, START).sum(), weight)
    assert bool((grad[3] == 300).all())
    assert int(grad.count_nonzero()) == 8


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (2, 3, 4)])
def test_any_shape(shape: tuple[int, ...]) -> None:
    ids, weight = some_ids(*shape), random(ROWS, 8, dtype=torch.float32, seed=1)
    found = look_up(ids, weight, START)
    assert found.shape == (*shape, 8)
    assert torch.equal(found, formula(ids, weight))
    (grad,) = torch.autograd.grad(found.sum(), weight)
    (expected,) = torch.autograd.grad(formula(ids, weight).sum(), weight)
    assert torch.equal(grad, expected)


def test_any_layout() -> None:
    ids = some_ids(6, 8).t()[::2]
    wide = random(ROWS, 40, dtype=torch.float32, seed=1).detach()
    tall = random(16, ROWS, dtype=torch.float32, seed=1).detach()
    for weight in (wide[:, 4:20], wide[:, ::2], tall.t()):
        leaf = weight.requires_grad_()
        found = look_up(ids, leaf, START)
        assert torch.equal(found, formula(ids, leaf))
        # a gradient of other strides, and one that is expanded
        for down in (torch.randn_like(found.transpose(0, 1)).transpose(0, 1), found[:1, :1]):
            down = down.expand_as(found).detach()
            mine, theirs = (
                torch.autograd.grad(t, leaf, down)[0]
                for t in (look_up(ids, leaf, START), formula(ids, leaf))
            )
            assert error(mine, theirs) <= 1e-6


def test_no_rows_here() -> None:
    weight = torch.empty(0, 8, device=DEVICE, requires_grad=True)
    found = look_up(some_ids(2, 3), weight, START)
    assert not found.any()
    (grad,) = torch.autograd.grad(found.sum(), weight, create_graph=True)
    assert grad.shape == weight.shape


def test_gradients_of_gradients() -> None:
    ids, weight = some_ids(2, 5), random(ROWS, 3, dtype=torch.float64, seed=1)
    assert torch.autograd.gradgradcheck(lambda w: look_up(ids, w.square(), START, 25), weight)


def test_pytorch_knows_the_ops() -> None:
    ids, weight = some_ids(3, 4), random(ROWS, 8, dtype=torch.float32, seed=1)
    torch.library.opcheck(torch.ops.tpplan.look_up.default, (ids, weight, START, 25))
    dy = random(3, 4, 8, dtype=torch.float32, seed=2).detach()
    back = (dy, ids, ROWS, START, 25)
    torch.library.opcheck(torch.ops.tpplan.look_up_backward.default, back)


def test_one_graph() -> None:
    ids, weight = some_ids(3, 4), random(ROWS, 8, dtype=torch.float32, seed=1)

    def run(w: torch.Tensor) -> torch.Tensor:
        return look_up(ids, 2 * w, START).square().sum()

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    mine, theirs = (torch.autograd.grad(f(weight), weight)[0] for f in (compiled, run))
    assert torch.equal(mine, theirs)
