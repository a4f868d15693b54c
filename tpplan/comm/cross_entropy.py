"""Cross entropy of logits whose vocabulary is sharded, without ever gathering them.

Shoeybi et al., "Megatron-LM" (2019), section 3: what a rank needs to know of the other ranks'
logits are three numbers for each token, each of them one all-reduce: the largest logit, the sum of
the exponentials, and the logit of the target (``tensor_parallel/cross_entropy.py`` in
Megatron-core). The gradient of a rank's logits needs nothing more, so the backward sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tpplan.comm.collectives import Group, Site, all_reduce
from tpplan.comm.conjugates import Transition, copy_in
from tpplan.compat import FakeTensor, differentiates_backward

_BLOCK = 2**24  # elements of a float32 temporary: rows are worked on in blocks of so many


@dataclass(frozen=True)
class Vocabulary:
    """How the classes are sharded, and the sites of the three collectives.

    Attributes:
        classes: how many there are on all ranks together.
        first: the first one of this rank.
        group: the ranks.
        largest, total, target: what the maximum, the sum of the exponentials and the targets'
            logits are reported under.
    """

    classes: int
    first: int
    group: Group
    largest: Site
    total: Site
    target: Site


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    vocabulary: Vocabulary,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """``F.cross_entropy`` with class indices, whole and equal on every rank.

    Statistics are of float32 for logits of less; gradients of gradients are right as well.

    Args:
        logits: (tokens, this rank's classes).
        target: (tokens,) class indices, the same on every rank.
        weight: (classes,) the whole weights.

    Returns:
        A scalar, or (tokens,) where ``reduction`` is "none".

    Raises:
        IndexError: a target is no class (on a GPU a device-side assertion, as torch's).
    """
    low = logits.dtype in (torch.bfloat16, torch.half)
    ignored = target == ignore_index
    _require_classes(target, ignored, vocabulary.classes)
    mine = None
    if weight is not None:
        weight = weight.to(torch.float32 if low else logits.dtype)
        mine = weight.narrow(0, vocabulary.first, logits.size(1))
    smooth = label_smoothing > 0
    index = (target - vocabulary.first).masked_fill(ignored, -1)
    log_sum, chosen, every = _Statistics.apply(logits, index, mine, smooth, vocabulary)  # type: ignore[no-untyped-call]
    loss = log_sum - chosen
    counted = (~ignored).to(loss.dtype)
    if weight is not None:
        counted = weight[target.masked_fill(ignored, 0)].masked_fill(ignored, 0)
        loss = loss * counted
    if smooth:
        whole = vocabulary.classes if weight is None else weight.sum()
        share = label_smoothing / vocabulary.classes
        loss = (1 - label_smoothing) * loss + share * (whole * log_sum - every)
    loss = loss.masked_fill(ignored, 0)
    if reduction == "mean":
        loss = loss.sum() / counted.sum()
    elif reduction == "sum":
        loss = loss.sum()
    # autocast would have run the whole of it in float32
    autocast = torch.is_autocast_enabled(logits.device.type)
    return loss if low and autocast else loss.to(logits.dtype)  # type: ignore[no-any-return]


def _require_classes(target: torch.Tensor, ignored: torch.Tensor, classes: int) -> None:
    if isinstance(target, FakeTensor) or target.is_meta:
        return
    wrong = ((target < 0) | (target >= classes)) & ~ignored
    if target.device.type != "cpu":
        torch._assert_async(~wrong.any(), "cross_entropy: a target is out of bounds")  # type: ignore[no-untyped-call]
    elif wrong.any():
        raise IndexError(f"Target {int(target[wrong][0])} is out of bounds.")


def _blocks(x: torch.Tensor) -> Iterator[slice]:
    rows = max(1, _BLOCK // max(1, x.size(1)))
    for start in range(0, x.size(0), rows):
        yield slice(start, start + rows)


class _Statistics(torch.autograd.Function):
    """For each token, of logits less the largest: log Σ exp, the target's, and (weighted) Σ.

    The largest counts as a constant: it cancels in every loss made of the three. The last is
    nothing where it is not asked for.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        index: torch.Tensor,
        weight: torch.Tensor | None,
        smooth: bool,
        vocabulary: Vocabulary,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        group, columns = vocabulary.group, logits.size(1)
        kind = torch.promote_types(logits.dtype, torch.float32)
        here = (index >= 0) & (index < columns)
        index = index.masked_fill(~here, 0).unsqueeze(1)

        largest = logits.new_full((logits.size(0),), -torch.inf, dtype=kind)
        if columns:
            largest = logits.amax(1).to(kind)
        largest = all_reduce(largest, group, vocabulary.largest, "max")

        total = torch.empty_like(largest)
        target = torch.zeros_like(largest)
        every = torch.zeros_like(largest)
        for block in _blocks(logits):
            shifted = logits[block].to(kind, copy=True).sub_(largest[block].unsqueeze(1))
            if columns:
                own = shifted.gather(1, index[block]).squeeze(1)
                target[block] = own.masked_fill_(~here[block], 0)
            if smooth:
                every[block] = (shifted if weight is None else shifted * weight).sum(1)
            total[block] = shifted.exp_().sum(1)
        total = all_reduce(total, group, vocabulary.total)
        if smooth:
            both = all_reduce(torch.stack([target, every]), group, vocabulary.target)
            target, every = both[0].clone(), both[1].clone()
        else:
            target = all_reduce(target, group, vocabulary.target)
            ctx.mark_non_differentiable(every)
        log_sum = total.log_()
        ctx.save_for_backward(logits, index, here, largest, log_sum, weight)
        ctx.smooth, ctx.vocabulary = smooth, vocabulary
        return log_sum, target, every

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, of_sum: torch.Tensor, of_target: torch.Tensor, of_every: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        logits, index, here, largest, log_sum, weight = ctx.saved_tensors
        if differentiates_backward():
            site = ctx.vocabulary.total
            crossing = Transition(ctx.vocabulary.group, site, site)
            # whole tensors that meet this rank's classes: what flows back to them is summed
            of_sum, of_target, of_every, log_sum = (
                copy_in(t, crossing) for t in (of_sum, of_target, of_every, log_sum)
            )
            shifted = logits.to(largest.dtype) - (largest + log_sum).unsqueeze(1)
            grad = shifted.exp() * of_sum.unsqueeze(1)
            grad = _with_rest(grad, index, here, of_target, of_every, weight, ctx.smooth)
            return grad.to(logits.dtype), None, None, None, None
        result = torch.empty_like(logits)
        for block in _blocks(logits):
            grad = logits[block].to(largest.dtype, copy=True)
            grad = grad.sub_(largest[block].unsqueeze(1)).sub_(log_sum[block].unsqueeze(1))
            grad = grad.exp_().mul_(of_sum[block].unsqueeze(1))
            result[block] = _with_rest(
                grad, index[block], here[block], of_target[block], of_every[block], weight,
                ctx.smooth,
            )  # fmt: skip
        return result, None, None, None, None


def _with_rest(
    grad: torch.Tensor,
    index: torch.Tensor,
    here: torch.Tensor,
    of_target: torch.Tensor,
    of_every: torch.Tensor,
    weight: torch.Tensor | None,
    smooth: bool,
) -> torch.Tensor:
    """Add to ``grad`` what flows to the targets' logits and to the sums of all logits."""
    if grad.size(1):
        grad.scatter_add_(1, index, of_target.masked_fill(~here, 0).unsqueeze(1))
    if smooth:
        each = of_every.unsqueeze(1)
        grad.add_(each if weight is None else each * weight)
    return grad
