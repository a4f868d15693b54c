"""Kernels against float64: compiled where there is a GPU, else under Triton's interpreter.

Under the interpreter values are rounded to bfloat16 by cutting off, so a bfloat16 error may be
twice what it is on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests.ranks import DEVICE
from tpplan.kernels import launch

# of one chain of operations, rounded where it is stored; relative to the largest value
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCES), ids=["float32", "bfloat16", "float16"])


def random(*shape: int, dtype: torch.dtype, seed: int, mean: float = 0.0) -> torch.Tensor:
    """Normal values on the device that is tested, as a leaf that needs its gradient."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64) + mean
    return values.to(DEVICE, dtype).requires_grad_()


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, over the largest value that is expected."""
    assert found.shape == expected.shape
    if expected.numel() == 0:
        return 0.0
    difference = (found.detach().double() - expected.detach().double()).abs().max()
    return float(difference / expected.detach().abs().max().clamp_min(1e-30))


def errors(
    kernel: Callable[..., Any],
    formula: Callable[..., Any],
    inputs: Sequence[torch.Tensor | None],
) -> dict[str, float]:
    """Errors of the results of ``kernel``, and of all gradients, against ``formula`` in float64.

    Both are called with the inputs, and return a tensor or several.
    """
    assert launch.fused(*(t for t in inputs if t is not None and t.is_floating_point()))
    wide = [
        t.detach().double().requires_grad_() if t is not None and t.is_floating_point() else t
        for t in inputs
    ]
    found, expected = kernel(*inputs), formula(*wide)
    if isinstance(found, torch.Tensor):
        found, expected = (found,), (expected,)
    grads = [random(*t.shape, dtype=t.dtype, seed=100 + n).detach() for n, t in enumerate(found)]
    leaves = [n for n, t in enumerate(inputs) if t is not None and t.requires_grad]
    mine = torch.autograd.grad(found, [inputs[n] for n in leaves], grads)  # type: ignore[misc]
    theirs = torch.autograd.grad(
        expected,
        [wide[n] for n in leaves],
        [g.double() for g in grads],  # type: ignore[misc]
    )
    results = {
        f"result {n}": error(a, b) for n, (a, b) in enumerate(zip(found, expected, strict=True))
    }
    gradients = {
        f"gradient of input {n}": error(a, b) for n, a, b in zip(leaves, mine, theirs, strict=True)
    }
    return {**results, **gradients}


def beyond(found: dict[str, float], tolerance: float) -> dict[str, float]:
    """The errors that are too large, or not numbers."""
    return {name: e for name, e in found.items() if not e <= tolerance}
