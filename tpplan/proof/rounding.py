"""How much of an error is rounding: what the unsharded model differs from itself."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tpplan.proof.ranks import Reference, differentiate, gradient_errors, relative

_aten = torch.ops.aten
_FACTORS = {
    _aten.mm.default: 0,
    _aten.bmm.default: 0,
    _aten.addmm.default: 1,
    _aten.baddbmm.default: 1,
}
"""Where the two factors are among the arguments of a matrix product."""
_ORDERS = 5


class Reordered(TorchDispatchMode):
    """Matrix products add their terms in a random order, which changes nothing but rounding."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """``func``, of factors whose columns and rows are in another order."""
        at = _FACTORS.get(func)
        if at is not None:
            left, right = args[at : at + 2]
            order = torch.randperm(left.size(-1), generator=self.generator)
            pair = (left.index_select(-1, order), right.index_select(-2, order))
            args = (*args[:at], *pair, *args[at + 2 :])
        return func(*args, **(kwargs or {}))


def reordered(reference: Reference, seed: int) -> Reference:
    """The same unsharded model, its sums in another order."""
    twin = copy.deepcopy(reference.model)
    with Reordered(seed):
        found = differentiate(twin, reference.call, reference.seed)
    return Reference(twin, reference.call, reference.seed, *found, reference.called)


def differences(one: Reference, other: Reference) -> dict[str, float]:
    """By ``verify``'s metric: the error of each gradient, and of the outputs under ``""``."""
    pairs = zip(one.outputs, other.outputs, strict=True)
    outputs = max((relative(a, b) for a, b in pairs), default=0.0)
    return {"": outputs, **gradient_errors(one.gradients, other.gradients)}


def own_rounding(reference: Reference, exact: Reference) -> dict[str, float]:
    """The worst differences of the unsharded model from itself.

    Args:
        exact: the same in float64, from which it differs, as it does with its sums reordered.
    """
    found = [differences(exact, reference)]
    found += [differences(reference, reordered(reference, seed)) for seed in range(_ORDERS)]
    return {name: max(errors[name] for errors in found) for name in found[0]}
