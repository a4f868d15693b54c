"""Fake tensors, of which ops make no less than of real ones."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses import fake_tensor

from tpplan.compat.modes import Uncompiled

uncached = fake_tensor.disable_fake_tensor_cache
"""Within it a fake mode remembers no answers: for who does so himself (see ``answers``)."""

_BESIDE_BFLOAT16 = (torch.float32, torch.float16)


class FakeTensorMode(Uncompiled, fake_tensor.FakeTensorMode):
    """Torch's mode, and in it grouped products in every precision that torch computes.

    Torch itself makes those of bfloat16 alone.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What ``func`` makes of fake tensors."""
        if func is torch.ops.aten._grouped_mm.default:
            first, second, *others = args
            if first.dtype == second.dtype and first.dtype in _BESIDE_BFLOAT16:
                with self:
                    factors = _in_bfloat16(first), _in_bfloat16(second)
                    made = func(*factors, *others, **(kwargs or {}))
                    return torch.empty(made.shape, dtype=first.dtype, device=made.device)
        return super().__torch_dispatch__(func, types, args, kwargs)


def _in_bfloat16(factor: torch.Tensor) -> torch.Tensor:
    """One of the same sizes, with rows of as many bytes, that torch may find fault with them."""
    bytes_each = factor.element_size() // torch.bfloat16.itemsize
    strides = [step if step == 1 else step * bytes_each for step in factor.stride()]
    return torch.empty_strided(factor.shape, strides, dtype=torch.bfloat16, device=factor.device)
