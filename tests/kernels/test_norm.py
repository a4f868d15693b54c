"""LayerNorm and RMSNorm kernels: values and gradients at any width, and how PyTorch sees them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels import DEVICE, DTYPES, TOLERANCES, beyond, error, errors, random
from tpplan.kernels.norm import norm, residual_norm

WIDTHS = pytest.mark.parametrize("h", [1, 7, 768, 4097, 8192, 16384, 65536])
EPS = 1e-5


def formula(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    *,
    centred: bool,
    offset: float = 0.0,
    **_: Any,
) -> torch.Tensor:
    top = x - x.mean(-1, keepdim=True) if centred else x
    unit = top * torch.rsqrt(top.square().mean(-1, keepdim=True) + EPS)
    unit = unit if weight is None else unit * (weight + offset)
    return unit if bias is None else unit + bias


@pytest.mark.turns(24)
@WIDTHS
@DTYPES
@pytest.mark.parametrize("centred", [True, False], ids=["layer", "rms"])
def test_values_and_gradients(h: int, dtype: torch.dtype, centred: bool) -> None:
    mean = 300.0 if dtype == torch.float32 else 1.0
    inputs = [random(2, 3, h, dtype=dtype, seed=h, mean=mean), random(h, dtype=dtype, seed=1)]
    if centred:
        inputs.append(random(h, dtype=dtype, seed=2))
    how = {"centred": centred}
    found = errors(lambda *t: norm(*t, eps=EPS, **how), lambda *t: formula(*t, **how), inputs)
    if h == 1:  # one value's norm is its sign: no gradient but of its rounding
        found = {name: e for name, e in found.items() if name != "gradient of input 0"}
        if centred:
            del found["gradient of input 1"]
    assert not beyond(found, TOLERANCES[dtype])


@pytest.mark.parametrize(("rows", "h"), [(70, 512), (70, 4224), (70, 4099)])
@pytest.mark.turns(12)
def test_many_rows(rows: int, h: int) -> None:
    """More of them than programs that run side by side, or than one of them goes down."""
    inputs = [random(rows, h, dtype=torch.float32, seed=h, mean=300.0)]
    inputs += [random(h, dtype=torch.float32, seed=n) for n in (1, 2)]
    found = errors(
        lambda *t: norm(*t, eps=EPS, centred=True), lambda *t: formula(*t, centred=True), inputs
    )
    assert not beyond(found, 1e-6)


@pytest.mark.turns(24)
@pytest.mark.parametrize("h", [64, 40000])
@pytest.mark.parametrize(
    "how",
    [
        {"centred": False, "offset": 1.0},
        {"centred": False, "early": True},
        {"centred": True, "offset": 1.0},
    ],
    ids=["gemma", "llama", "less one"],
)
@DTYPES
def test_with_the_residual(h: int, how: dict[str, Any], dtype: torch.dtype) -> None:
    inputs = [random(3, h, dtype=dtype, seed=n) for n in (1, 2)]
    inputs.append(random(h, dtype=dtype, seed=3))

    def expected(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> Any:
        rounded = (inputs[0] + inputs[1]).detach().double()
        total = x + r
        total = total + (rounded - total).detach()
        return formula(total, w, **how), total

    found = errors(lambda x, r, w: residual_norm(x, r, w, eps=EPS, **how), expected, inputs)
    assert not beyond(found, TOLERANCES[dtype])


def test_without_a_weight_and_frozen() -> None:
    x, w, b = (random(*s, dtype=torch.float32, seed=1) for s in ((4, 96), (96,), (96,)))
    bare = errors(
        lambda x: norm(x, None, eps=EPS, centred=True),
        lambda x: formula(x, None, centred=True),
        [x],
    )
    assert not beyond(bare, 1e-6)
    w.requires_grad_(False)
    frozen = errors(
        lambda x, w, b: norm(x, w, b, eps=EPS, centred=True),
        lambda x, w, b: formula(x, w, b, centred=True),
        [x, w, b],
    )
    assert len(frozen) == 3
    assert not beyond(frozen, 1e-6)


def test_any_layout() -> None:
    x = random(6, 4, 130, dtype=torch.float32, seed=1)
    w = random(130, dtype=torch.float32, seed=2)
    for view in (x.transpose(0, 1), x[::2, 1:3], x[:, :1].expand(6, 4, 130)):
        found = norm(view, w, eps=EPS, centred=False)
        assert error(found, formula(view.double(), w.double(), centred=False)) <= 1e-6
    narrow = x[..., ::2]
    found = norm(narrow, w[::2], eps=EPS, centred=False)
    assert error(found, formula(narrow.double(), w[::2].double(), centred=False)) <= 1e-6


def test_nothing_in_the_batch() -> None:
    x = torch.randn(0, 4, 8, device=DEVICE, requires_grad=True)
    w = torch.randn(8, device=DEVICE, requires_grad=True)
    norm(x, w, eps=EPS, centred=False).sum().backward()
    assert x.grad is not None
    assert w.grad is not None
    assert x.grad.shape == x.shape
    assert not w.grad.any()


def test_the_result_promotes_as_pytorch_does() -> None:
    x, w = random(2, 8, dtype=torch.bfloat16, seed=1), random(8, dtype=torch.float32, seed=2)
    assert norm(x, w, eps=EPS, centred=False, early=True).dtype == torch.float32
    assert norm(x, w, eps=EPS, centred=False).dtype == torch.bfloat16


def test_gradients_of_gradients() -> None:
    inputs = [random(2, 5, dtype=torch.float64, seed=n) for n in (1, 2)]
    w = random(5, dtype=torch.float64, seed=3)
    assert torch.autograd.gradgradcheck(
        lambda x, r, w: residual_norm(x, r, w, eps=EPS, centred=True), (*inputs, w)
    )


@pytest.mark.turns(4)
@pytest.mark.parametrize("adds", [False, True])
def test_pytorch_knows_the_ops(adds: bool) -> None:
    x, r = (random(3, 4, 8, dtype=torch.float32, seed=n) for n in (1, 2))
    w, b = (random(8, dtype=torch.float32, seed=n) for n in (3, 4))
    for centred in (False, True):
        args = (x, r if adds else None, w, b, EPS, centred, 0.0, not centred)
        torch.library.opcheck(torch.ops.tpplan.norm.default, args)
        _, _, means, rstds = torch.ops.tpplan.norm(*args)
        back = (*(t.detach() for t in (x, x, w, means, rstds)), None, 0.0, False, True, True)
        torch.library.opcheck(torch.ops.tpplan.norm_backward.default, back)


def test_one_graph() -> None:
    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return norm(x * 2, w, eps=EPS, centred=False, early=True).square().sum()

    x, w = random(4, 64, dtype=torch.float32, seed=1), random(64, dtype=torch.float32, seed=2)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    mine = torch.autograd.grad(compiled(x, w), (x, w))
    theirs = torch.autograd.grad(run(x, w), (x, w))
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
