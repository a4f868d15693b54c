"""The bias + GeLU kernel: values and gradients at any width, and how PyTorch sees it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.kernels import DEVICE, DTYPES, TOLERANCES, beyond, error, errors, random
from tpplan.kernels.gelu import gelu

FORMS = pytest.mark.parametrize("tanh", [True, False], ids=["tanh", "erf"])


def formula(x: torch.Tensor, bias: torch.Tensor | None = None, *, tanh: bool) -> torch.Tensor:
    u = x if bias is None else x + bias
    if tanh:
        return u * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (u + 0.044715 * u**3))) / 2
    return u * (1 + torch.erf(u / 2**0.5)) / 2


@pytest.mark.parametrize("h", [1, 7, 768, 4097])
@DTYPES
@FORMS
def test_values_and_gradients(h: int, dtype: torch.dtype, tanh: bool) -> None:
    inputs = [random(2, 3, h, dtype=dtype, seed=h), random(h, dtype=dtype, seed=1)]
    found = errors(lambda *t: gelu(*t, tanh=tanh), lambda *t: formula(*t, tanh=tanh), inputs)
    assert len(found) == 3
    assert not beyond(found, TOLERANCES[dtype])


@FORMS
@pytest.mark.parametrize("shape", [(1, 28672), (75, 520), (1100, 40)], ids=str)
@pytest.mark.turns(12)
def test_wide_and_long(shape: tuple[int, int], tanh: bool) -> None:
    # several blocks of rows for a program, several programs for a column's sum
    inputs = [random(*shape, dtype=torch.float32, seed=1)]
    inputs.append(random(shape[1], dtype=torch.float32, seed=2))
    found = errors(lambda *t: gelu(*t, tanh=tanh), lambda *t: formula(*t, tanh=tanh), inputs)
    assert not beyond(found, 1e-6)


@FORMS
def test_without_a_bias_and_frozen(tanh: bool) -> None:
    x, bias = random(4, 96, dtype=torch.float32, seed=1), random(96, dtype=torch.float32, seed=2)
    bare = errors(lambda x: gelu(x, tanh=tanh), lambda x: formula(x, tanh=tanh), [x])
    assert not beyond(bare, 1e-6)
    for fixed in (bias, x):
        fixed.requires_grad_(False)
        frozen = errors(
            lambda *t: gelu(*t, tanh=tanh), lambda *t: formula(*t, tanh=tanh), [x, bias]
        )
        assert len(frozen) == 2
        assert not beyond(frozen, 1e-6)
        fixed.requires_grad_()


@FORMS
def test_the_sum_is_not_rounded(tanh: bool) -> None:
    # half of what bfloat16 tells apart at 1: a rounded sum would be 1 everywhere
    x = torch.ones(2, 64, device=DEVICE, dtype=torch.bfloat16)
    bias = torch.full((64,), 2**-8, device=DEVICE, requires_grad=True)
    (found,) = torch.autograd.grad(gelu(x, bias, tanh=tanh).sum(), bias)
    wide = bias.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(formula(x.double(), wide, tanh=tanh).sum(), wide)
    assert error(found, expected) <= 1e-6


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@FORMS
def test_far_from_zero(tanh: bool) -> None:
    ends = [-3e38, -1e19, -1e4, -90.0, -13.0, -5.0, 0.0, 5.0, 13.0, 90.0, 1e4, 1e19, 3e38]
    x = torch.tensor(ends, device=DEVICE).requires_grad_()
    y = gelu(x, tanh=tanh)
    (dx,) = torch.autograd.grad(y.sum(), x)
    wide = torch.tensor(ends, dtype=torch.float64, device=DEVICE).requires_grad_()
    expected = F.gelu(wide, approximate="tanh" if tanh else "none")
    (slopes,) = torch.autograd.grad(expected.sum(), wide)
    torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=1e-6)
    # further out the square is infinite, times zero in PyTorch's own float32 as well
    finite = x.detach().abs() <= 1e19
    torch.testing.assert_close(dx[finite].double(), slopes[finite], rtol=1e-6, atol=1e-6)


@FORMS
def test_any_layout(tanh: bool) -> None:
    base = random(6, 4, 130, dtype=torch.float32, seed=1)
    bias = random(260, dtype=torch.float32, seed=2)[::2].detach().requires_grad_()
    for view in (
        lambda x: x.transpose(0, 1),
        lambda x: x[::2, 1:3],
        lambda x: x[:, :1].expand(6, 4, 130),
        lambda x: x[0, 0],
    ):
        found = errors(
            lambda x, b, view=view: gelu(view(x), b, tanh=tanh),
            lambda x, b, view=view: formula(view(x), b, tanh=tanh),
            [base, bias],
        )
        assert not beyond(found, 1e-6)
    narrow = base[..., ::2]
    assert error(gelu(narrow, tanh=tanh), formula(narrow.double(), tanh=tanh)) <= 1e-6


def test_what_triton_does_not_take() -> None:
    for shape in ((3, 5), (5,)):
        x = random(*shape, dtype=torch.float64, seed=1)
        bias = random(5, dtype=torch.float64, seed=2)
        y = gelu(x, bias, tanh=True)
        assert y.dtype == torch.float64
        grads = torch.autograd.grad(y.sum(), (x, bias))
        theirs = torch.autograd.grad(formula(x, bias, tanh=True).sum(), (x, bias))
        for mine, their in zip(grads, theirs, strict=True):
            torch.testing.assert_close(mine, their)


def test_nothing_in_the_batch() -> None:
    x = torch.randn(0, 4, 8, device=DEVICE, requires_grad=True)
    bias = torch.randn(8, device=DEVICE, requires_grad=True)
    gelu(x, bias, tanh=True).sum().backward()
    assert x.grad is not None
    assert bias.grad is not None
    assert x.grad.shape == x.shape
    assert not bias.grad.any()


@FORMS
def test_gradients_of_gradients(tanh: bool) -> None:
    inputs = (random(2, 5, dtype=torch.float64, seed=1), random(5, dtype=torch.float64, seed=2))
    assert torch.autograd.gradcheck(lambda x, b: gelu(x, b, tanh=tanh), inputs)
    assert torch.autograd.gradgradcheck(lambda x, b: gelu(x, b, tanh=tanh), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["triton", "reference"])
def test_pytorch_knows_the_ops(dtype: torch.dtype) -> None:
    x, dy = (random(3, 4, 8, dtype=dtype, seed=n) for n in (1, 2))
    bias = random(8, dtype=dtype, seed=3)
    for tanh, b, t in ((True, bias, x), (False, None, x.transpose(0, 1))):
        torch.library.opcheck(torch.ops.tpplan.gelu.default, (t, b, tanh))
        back = (dy.detach(), x.detach(), None if b is None else b.detach(), tanh, b is not None)
        torch.library.opcheck(torch.ops.tpplan.gelu_backward.default, back)


def test_one_graph() -> None:
    def run(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return gelu(x * 2, bias, tanh=True).square().sum()

    x, bias = random(4, 64, dtype=torch.float32, seed=1), random(64, dtype=torch.float32, seed=2)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    mine = torch.autograd.grad(compiled(x, bias), (x, bias))
    theirs = torch.autograd.grad(run(x, bias), (x, bias))
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
