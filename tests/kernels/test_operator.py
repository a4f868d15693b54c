"""Ops around the dispatcher and through it: the same numbers, seen by whoever looks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.kernels import DEVICE, random
from tpplan.kernels.gated import gated
from tpplan.kernels.gelu import gelu
from tpplan.kernels.norm import norm, residual_norm
from tpplan.kernels.operator import Operator
from tpplan.kernels.transition import pack, unpack


class Seen(TorchDispatchMode):
    """The names of tpplan's ops that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "tpplan":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def layer(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """One of each."""
    y = norm(x, w, b, eps=1e-5, centred=True)
    y, total = residual_norm(gelu(y, b, tanh=True), x, w, eps=1e-6, centred=False)
    y = gated(y, total, kind="silu")
    return unpack(pack(y, 1, 2, bias=b), 1, y.size(1))


def inputs() -> list[torch.Tensor]:
    return [random(*s, dtype=torch.float32, seed=n) for n, s in enumerate(((2, 5, 8), (8,), (8,)))]


def both(run: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    """The result, and the gradients of the inputs."""
    leaves = inputs()
    out = run(*leaves)
    out.square().sum().backward()
    return [out, *(t.grad for t in leaves if t.grad is not None)]


def test_the_same_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    around = both(layer)
    with Seen() as seen:
        watched = both(layer)
    assert seen.names == [
        *("norm", "gelu", "norm", "gated", "pack", "unpack"),
        *("pack", "unpack", "gated_backward"),
        *("norm_backward", "gelu_backward", "norm_backward"),
    ]
    monkeypatch.setattr(Operator, "__call__", lambda self, *args: self._op(*args))
    through = both(layer)
    for one, two, three in zip(around, watched, through, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


def test_recomputed_and_compiled() -> None:
    expected = both(layer)
    for reentrant in (False, True):
        again = both(lambda *t, r=reentrant: checkpoint(layer, *t, use_reentrant=r))
        assert all(map(torch.equal, again, expected))
    compiled = both(torch.compile(layer, fullgraph=True, backend="aot_eager"))
    assert all(map(torch.equal, compiled, expected))


def test_frozen_and_without_gradients() -> None:
    x, w, b = inputs()
    with torch.no_grad():
        assert not layer(x, w, b).requires_grad
    frozen = layer(x.detach(), w.detach(), b.detach())
    assert not frozen.requires_grad
    with torch.inference_mode():
        assert torch.equal(layer(x, w, b), frozen)


def test_vectorized() -> None:
    x, w, b = inputs()
    y = layer(x, w, b)
    grads = torch.randn(3, *y.shape, device=DEVICE)
    (batched,) = torch.autograd.grad(y, x, grads, retain_graph=True, is_grads_batched=True)
    for one, grad in zip(batched, grads, strict=True):
        torch.testing.assert_close(one, torch.autograd.grad(y, x, grad, retain_graph=True)[0])
    with torch.no_grad():
        torch.testing.assert_close(torch.vmap(lambda t: layer(t, w, b))(x[:, None])[:, 0], y)


def test_other_tensors_go_through_the_dispatcher() -> None:
    x, w, _ = inputs()
    fake = torch._subclasses.FakeTensorMode()
    with fake:
        y = norm(fake.from_tensor(x), fake.from_tensor(w), eps=1e-6, centred=False)
    assert isinstance(y, torch._subclasses.FakeTensor)
    meta = norm(x.to("meta"), w.to("meta"), eps=1e-6, centred=False)
    assert meta.shape == x.shape
    parameter = torch.nn.Parameter(torch.ones(8, device=DEVICE))
    norm(x, parameter, eps=1e-6, centred=False).sum().backward()
    assert parameter.grad is not None
