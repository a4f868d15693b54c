"""Cross entropy of logits whose vocabulary is sharded, without ever gathering them.

Shoeybi et al., "Megatron-LM" (2019), section 3: what a rank needs to know of the other ranks'
logits are three numbers for each token, each of them one all-reduce: the largest logit, the sum of
the exponentials, and the logit of the target (``tensor_parallel/cross_entropy.py`` in
Megatron-core). The gradient of a rank's logits needs nothing more, so the backward sends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tpplan.comm.collectives import Group, Site, all_reduce
from tpplan.comm.conjugates import Transition, copy_in
from tpplan.compat import FakeTensor, Function, differentiates_backward, is_traced
from tpplan.kernels.cross_entropy import add_rest, gradient, located, statistics


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
    fuse: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``F.cross_entropy`` with class indices, whole and equal on every rank.

    Statistics are of float32 for logits of less; gradients of gradients are right as well.

    Args:
        logits: (tokens, this rank's classes).
        target: (tokens,) class indices, the same on every rank.
        weight: (classes,) the whole weights.
        fuse: whether fused kernels work on the logits.
        dtype: of the loss, where it is not that of the logits.

    Returns:
        A scalar, or (tokens,) where ``reduction`` is "none".

    Raises:
        IndexError: a target is no class; on a GPU a device-side assertion, as torch's, and a
            RuntimeError where the loss is compiled.
    """
    low = logits.dtype in (torch.bfloat16, torch.half)
    ignored = target == ignore_index
    _require_classes(target, ignored, vocabulary.classes)
    mine = None
    if weight is not None:
        weight = weight.to(torch.float32 if low else logits.dtype)
        mine = weight.narrow(0, vocabulary.first, logits.size(1))
    smooth = label_smoothing > 0
    target = target.masked_fill(ignored, -1)
    log_sum, chosen, every = _Statistics.apply(logits, target, mine, smooth, vocabulary, fuse)
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
    return loss if low and autocast else loss.to(dtype or logits.dtype)  # type: ignore[no-any-return]


def _require_classes(target: torch.Tensor, ignored: torch.Tensor, classes: int) -> None:
    if isinstance(target, FakeTensor) or target.is_meta:
        return
    wrong = ((target < 0) | (target >= classes)) & ~ignored
    if target.device.type != "cpu" or is_traced():
        torch._assert_async(~wrong.any(), "cross_entropy: a target is out of bounds")  # type: ignore[no-untyped-call]
    elif wrong.any():
        raise IndexError(f"Target {int(target[wrong][0])} is out of bounds.")


class _Statistics(Function):
    """For each token, of logits less the largest: log Σ exp, the target's, and (weighted) Σ.

    The largest counts as a constant: it cancels in every loss made of the three. The last is
    nothing where it is not asked for.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None,
        smooth: bool,
        vocabulary: Vocabulary,
        fuse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        group, columns = vocabulary.group, logits.size(1)
        own, total, chosen, every = statistics(
            logits, target, vocabulary.first, weight, smooth=smooth, fuse=fuse
        )
        largest = all_reduce(own, group, vocabulary.largest, "max")
        below = own.sub_(largest)
        total = all_reduce(total.mul_(below.exp()), group, vocabulary.total)
        if smooth:
            if columns:  # else there is no largest one to be below
                every.add_(below.mul_(columns if weight is None else weight.sum()))
            both = all_reduce(torch.stack([chosen, every]), group, vocabulary.target)
            chosen, every = both[0] - largest, both[1].clone()
        else:
            chosen = all_reduce(chosen, group, vocabulary.target).sub_(largest)
            ctx.mark_non_differentiable(every)
        log_sum = total.log_()
        ctx.save_for_backward(logits, target, largest, log_sum, weight)
        ctx.smooth, ctx.vocabulary, ctx.fuse = smooth, vocabulary, fuse
        return log_sum, chosen, every

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, of_sum: torch.Tensor, of_target: torch.Tensor, of_every: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        logits, target, largest, log_sum, weight = ctx.saved_tensors
        vocabulary = ctx.vocabulary
        if differentiates_backward():
            site = vocabulary.total
            crossing = Transition(vocabulary.group, site, site)
            # whole tensors that meet this rank's classes: what flows back to them is summed
            of_sum, of_target, of_every, log_sum = (
                copy_in(t, crossing) for t in (of_sum, of_target, of_every, log_sum)
            )
            shifted = logits.to(largest.dtype) - (largest + log_sum).unsqueeze(1)
            grad = shifted.exp() * of_sum.unsqueeze(1)
            index, here = located(target, vocabulary.first, logits.size(1))
            each = of_every if ctx.smooth else None
            grad = add_rest(grad, index, here, of_target, each, weight).to(logits.dtype)
        else:
            each = of_every if ctx.smooth else None
            grad = gradient(
                logits, target, vocabulary.first, weight, largest, log_sum, of_sum, of_target, each,
                fuse=ctx.fuse,
            )  # fmt: skip
        return grad, None, None, None, None, None
