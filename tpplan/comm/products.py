"""Products whose weights' gradients are deferred, and which keep of their input what is asked."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from tpplan import compat
from tpplan.comm.collectives import Group, Site, start_all_gather
from tpplan.comm.conjugates import Transition, gather_in
from tpplan.comm.deferred import ACCOUNT, Account, Regathered, defer, weight_gradient

# from how many multiplications on a weight's gradient is deferred: the host needs about 15
# microseconds more for it, in which a core computes some millions of them
WORTH = 1 << 24
# on a gathered tensor: what it was gathered from
_ROWS = "_tpplan_rows"


@dataclass
class Again:
    """How an input is gathered a second time, in backward: once for all products that took it.

    Attributes:
        dim, length: along which, and how long it is then.
        dtype: that was gathered, where it is not that of the rows.
        current: what the backward pass of number ``task`` has gathered, while it is waited for.
    """

    group: Group
    site: Site
    dim: int
    length: int
    dtype: torch.dtype | None
    task: int = -1
    current: weakref.ref[Regathered] | None = field(default=None)

    def start(self, rows: torch.Tensor) -> Regathered:
        """Begin to gather ``rows``, where no product of this backward pass has."""
        task = compat.backward_pass()
        found = None if self.current is None or self.task != task else self.current()
        if found is None:
            rows = rows if self.dtype is None else rows.to(self.dtype)
            found = Regathered(start_all_gather(rows, self.dim, self.length, self.group, self.site))
            self.task, self.current = task, weakref.ref(found)
        return found

    def differentiably(self, rows: torch.Tensor) -> torch.Tensor:
        """All of it, at once, for a backward that is itself differentiated."""
        transition = Transition(self.group, self.site, self.site)
        return gather_in(rows, self.dim, self.length, transition, self.dtype)


class _Rows(NamedTuple):
    rows: torch.Tensor
    again: Again
    versions: tuple[int, int]


def keep_rows(whole: torch.Tensor, rows: torch.Tensor, again: Again) -> None:
    """Have products that are given ``whole`` keep the ``rows`` it was gathered from, not itself."""
    setattr(whole, _ROWS, _Rows(rows, again, (rows._version, whole._version)))


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    /,
    transposed: bool = False,
) -> torch.Tensor:
    """``x`` (..., in) times a weight (out, in), or ``transposed``: (in, out), and the bias.

    The gradient of the weight is deferred where it has an account and takes long enough.
    """
    if not torch.compiler.is_compiling() and torch.is_grad_enabled():
        account = getattr(weight, ACCOUNT, None)
        if account is not None and x.dim() > 1:
            kept = getattr(x, _ROWS, None)
            if kept is not None and kept.versions != (kept.rows._version, x._version):
                kept = None
            large = x.numel() * weight.size(-1 if transposed else 0) >= WORTH
            if large or kept is not None:
                device = x.device.type
                if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
                    x = x.to(torch.get_autocast_dtype(device))
                return _Product.apply(x, weight, bias, transposed, account, kept)  # type: ignore[no-any-return, no-untyped-call]
    return F.linear(x, weight.t() if transposed else weight, bias)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        transposed: bool,
        account: tuple[Account, int],
        kept: _Rows | None,
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.again = None if kept is None else kept.again
        ctx.save_for_backward(x if kept is None else kept.rows, weight)
        ctx.transposed, ctx.account = transposed, account
        return F.linear(x, weight.t() if transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        if grad is None:
            return (None,) * 6
        x, weight = ctx.saved_tensors
        transposed, again = ctx.transposed, ctx.again
        recorded = compat.differentiates_backward()
        if again is not None:  # before anything is computed, beside which it arrives
            x = again.differentiably(x) if recorded else again.start(x)
        for_x = for_weight = for_bias = None
        if ctx.needs_input_grad[0]:
            # autocast, which is over, made the product of another dtype than the weight's
            cast = weight if weight.dtype == grad.dtype else weight.to(grad.dtype)
            for_x = grad @ (cast.t() if transposed else cast)
        if ctx.needs_input_grad[2]:
            for_bias = grad.reshape(-1, grad.size(-1)).sum(0)
        if recorded:
            for_weight = weight_gradient(grad, x, transposed)
        else:
            account, index = ctx.account
            defer(account, index, (grad, x, transposed, weight))
        return for_x, for_weight, for_bias, None, None, None
