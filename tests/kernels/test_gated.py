"""SwiGLU and GeGLU kernels, of two tensors and of one, and how PyTorch sees them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.kernels import DEVICE, DTYPES, TOLERANCES, beyond, errors, random
from tpplan.kernels.gated import Kind, gated, gated_packed
from tpplan.kernels.gelu import gelu

KINDS = pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": lambda u: u / (1 + torch.exp(-u)),
    "gelu": lambda u: u * (1 + torch.erf(u / 2**0.5)) / 2,
    "gelu_tanh": lambda u: u * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (u + 0.044715 * u**3))) / 2,
}


def formula(gate: torch.Tensor, up: torch.Tensor, kind: Kind) -> torch.Tensor:
    return ACTIVATIONS[kind](gate) * up


def packed_formula(x: torch.Tensor, kind: Kind, gate_first: bool) -> torch.Tensor:
    h = x.shape[-1] // 2
    first, second = x[..., :h], x[..., h:]
    return formula(first, second, kind) if gate_first else formula(second, first, kind)


@pytest.mark.parametrize("h", [1, 7, 768])
@DTYPES
@KINDS
def test_two_tensors(h: int, dtype: torch.dtype, kind: Kind) -> None:
    inputs = [random(2, 3, h, dtype=dtype, seed=n) for n in (1, 2)]
    found = errors(lambda *t: gated(*t, kind=kind), lambda *t: formula(*t, kind), inputs)
    assert len(found) == 3
    assert not beyond(found, TOLERANCES[dtype])


@pytest.mark.parametrize("h", [7, 4097])
@DTYPES
@pytest.mark.parametrize("gate_first", [True, False], ids=["gate first", "gate last"])
def test_one_tensor(h: int, dtype: torch.dtype, gate_first: bool) -> None:
    found = errors(
        lambda x: gated_packed(x, kind="silu", gate_first=gate_first),
        lambda x: packed_formula(x, "silu", gate_first),
        [random(2, 3, 2 * h, dtype=dtype, seed=h)],
    )
    assert len(found) == 2
    assert not beyond(found, TOLERANCES[dtype])


@KINDS
@pytest.mark.parametrize("shape", [(1, 28672), (75, 520), (1100, 3)], ids=str)
@pytest.mark.turns(12)
def test_wide_and_long(shape: tuple[int, int], kind: Kind) -> None:
    x = random(shape[0], 2 * shape[1], dtype=torch.float32, seed=1)
    found = errors(
        lambda x: gated_packed(x, kind=kind), lambda x: packed_formula(x, kind, True), [x]
    )
    assert not beyond(found, 1e-6)


@KINDS
def test_the_activation_is_rounded(kind: Kind) -> None:
    gate, up = (random(64, 64, dtype=torch.float16, seed=n) for n in (1, 2))
    found = gated(gate, up, kind=kind)
    apart = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda u: F.gelu(u, approximate="tanh"),
    }[kind](gate)
    # but where a difference in float32 decides how a value is rounded
    assert (found == apart * up).float().mean() > 0.99
    grads = torch.autograd.grad(found.sum(), (gate, up))
    theirs = torch.autograd.grad((apart * up).sum(), (gate, up))
    assert (grads[1] == theirs[1]).float().mean() > 0.99
    assert (grads[0] == theirs[0]).float().mean() > 0.8


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@KINDS
def test_far_from_zero(kind: Kind) -> None:
    ends = [-1e19, -1e4, -90.0, -13.0, -5.0, 0.0, 5.0, 13.0, 90.0, 1e4, 1e19]
    gate = torch.tensor(ends, device=DEVICE, requires_grad=True)
    up = torch.ones_like(gate)
    y = gated(gate, up, kind=kind)
    (dgate,) = torch.autograd.grad(y.sum(), gate)
    ones = torch.tensor([0.0 if end < 0 else 1.0 for end in ends], device=DEVICE)
    far = gate.detach().abs() > 80
    torch.testing.assert_close(y[far], (gate.detach() * ones)[far], rtol=0, atol=1e-30)
    torch.testing.assert_close(dgate[far], ones[far], rtol=0, atol=1e-30)
    assert y.isfinite().all()
    assert dgate.isfinite().all()


def test_as_gelu_does() -> None:
    gate = random(3, 100, dtype=torch.float32, seed=1)
    for kind, tanh in (("gelu", False), ("gelu_tanh", True)):
        found = gated(gate, torch.ones_like(gate), kind=kind)
        assert torch.equal(found, gelu(gate, tanh=tanh))


def test_any_layout() -> None:
    base = random(6, 4, 260, dtype=torch.float32, seed=1)
    for view in (
        lambda x: x.transpose(0, 1),
        lambda x: x[::2, 1:3],
        lambda x: x[:, :1].expand(6, 4, 260),
        lambda x: x[0, 0],
        lambda x: x[..., ::2],
    ):
        one = errors(
            lambda x, view=view: gated_packed(view(x), kind="silu"),
            lambda x, view=view: packed_formula(view(x), "silu", True),
            [base],
        )
        two = errors(
            lambda x, view=view: gated(view(x), view(x.flip(-1)), kind="gelu"),
            lambda x, view=view: formula(view(x), view(x.flip(-1)), "gelu"),
            [base],
        )
        assert not beyond(one, 1e-6)
        assert not beyond(two, 1e-6)


def test_one_of_two_is_frozen() -> None:
    inputs = [random(4, 96, dtype=torch.float32, seed=n) for n in (1, 2)]
    for fixed in inputs:
        fixed.requires_grad_(False)
        found = errors(lambda *t: gated(*t, kind="silu"), lambda *t: formula(*t, "silu"), inputs)
        assert len(found) == 2
        assert not beyond(found, 1e-6)
        fixed.requires_grad_()


def test_the_result_promotes_as_pytorch_does() -> None:
    gate, up = random(2, 8, dtype=torch.bfloat16, seed=1), random(2, 8, dtype=torch.float32, seed=2)
    y = gated(gate, up, kind="silu")
    assert y.dtype == (F.silu(gate) * up).dtype
    dgate, dup = torch.autograd.grad(y.sum(), (gate, up))
    assert (dgate.dtype, dup.dtype) == (torch.bfloat16, torch.float32)


def test_nothing_in_the_batch() -> None:
    gate, up, x = (torch.randn(0, 4, 8, device=DEVICE, requires_grad=True) for _ in range(3))
    gated(gate, up, kind="silu").sum().backward()
    gated_packed(x, kind="gelu").sum().backward()
    for t in (gate, up, x):
        assert t.grad is not None
        assert t.grad.shape == t.shape


def test_what_it_refuses() -> None:
    x = torch.randn(2, 5, device=DEVICE)
    with pytest.raises(ValueError, match="two halves"):
        gated_packed(x, kind="silu")
    with pytest.raises(ValueError, match="differ in shape"):
        gated(x, x[:1], kind="silu")
    with pytest.raises(ValueError, match="no activation 'relu'"):
        gated(x, x, kind="relu")  # type: ignore[arg-type]


@KINDS
def test_gradients_of_gradients(kind: Kind) -> None:
    gate, up = (random(2, 4, dtype=torch.float64, seed=n) for n in (1, 2))
    for run, inputs in (
        (lambda g, u: gated(g, u, kind=kind), (gate, up)),
        (lambda x: gated_packed(x, kind=kind, gate_first=False), (gate,)),
    ):
        assert torch.autograd.gradcheck(run, inputs)
        assert torch.autograd.gradgradcheck(run, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["triton", "reference"])
def test_pytorch_knows_the_ops(dtype: torch.dtype) -> None:
    ops = torch.ops.tpplan
    gate, up = (random(3, 4, 8, dtype=dtype, seed=n) for n in (1, 2))
    dy = random(3, 4, 8, dtype=dtype, seed=3).detach()
    bare = gate.detach()
    torch.library.opcheck(ops.gated.default, (gate.transpose(0, 1), up.transpose(0, 1), "silu"))
    torch.library.opcheck(ops.gated_backward.default, (dy, bare, up.detach(), "gelu"))
    torch.library.opcheck(ops.gated_packed.default, (gate, "gelu_tanh", True))
    torch.library.opcheck(ops.gated_packed_backward.default, (dy[..., :4], bare, "silu", False))


def test_one_graph() -> None:
    def run(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        both = torch.cat([gate, up], -1)
        return (gated(gate * 2, up, kind="silu") + gated_packed(both, kind="gelu")).square().sum()

    inputs = [random(4, 64, dtype=torch.float32, seed=n) for n in (1, 2)]
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    mine = torch.autograd.grad(compiled(*inputs), inputs)
    theirs = torch.autograd.grad(run(*inputs), inputs)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
