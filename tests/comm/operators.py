"""What user code does to a tensor: functions of it and of plain tensors, to run whole and sharded.

Each takes a floating tensor of three dimensions and returns tensors. ``SENT_BY`` says of some how
many collectives they may issue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Function = Callable[[torch.Tensor, "Beside"], Any]


class Beside:
    """Plain tensors that go with one of a shape: all of them leaves that are trained."""

    def __init__(self, shape: tuple[int, ...], seed: int = 3) -> None:
        self.shape = shape
        self._made: dict[str, torch.Tensor] = {}
        self._seed = seed

    def of(self, *shape: int) -> torch.Tensor:
        """Of that shape, the same each time."""
        name = str(shape)
        if name not in self._made:
            generator = torch.Generator().manual_seed(self._seed + len(self._made))
            made = torch.randn(shape, generator=generator, dtype=torch.float64)
            self._made[name] = made.requires_grad_()
        return self._made[name]

    @property
    def same(self) -> torch.Tensor:
        """Of the shape itself."""
        return self.of(*self.shape)

    def ids(self, high: int, *shape: int) -> torch.Tensor:
        """Integers."""
        generator = torch.Generator().manual_seed(self._seed)
        return torch.randint(0, high, shape, generator=generator)

    def trained(self) -> Mapping[str, torch.Tensor]:
        """All that were asked for."""
        return self._made


def last(x: torch.Tensor) -> int:
    """The size of the last dimension."""
    return x.size(-1)


def in_place(x: torch.Tensor, change: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    """``x`` after a change of it."""
    change(x)
    return x * 1.5


def set_item(x: torch.Tensor, key: Any, value: Any) -> torch.Tensor:
    """``x`` after ``x[key] = value``."""
    x[key] = value
    return x.sin()


def late_view(x: torch.Tensor) -> Any:
    """A view read after what it is a view of was changed, and the other way round."""
    first = x[:, 0]
    x.mul_(2.0)
    before = first.sin()
    first.add_(1.0)
    return before, first * 3, x.cos()


def attended(q: torch.Tensor, k: torch.Tensor, causal: bool) -> torch.Tensor:
    """One head."""
    return F.scaled_dot_product_attention(q[:, None], k[:, None], q[:, None], is_causal=causal)


class Doubled(torch.autograd.Function):
    """A function with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x.sum(-1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * x.mean(1, keepdim=True)


LOSSES: dict[str, Function] = {
    "mse_loss": lambda x, b: F.mse_loss(x, b.same),
    "mse_loss of plain": lambda x, b: F.mse_loss(b.same, x, reduction="sum"),
    "mse_loss of itself": lambda x, b: F.mse_loss(x, x.roll(1, 1)),
    "mse_loss none": lambda x, b: F.mse_loss(x, b.same, reduction="none"),
    "huber_loss": lambda x, b: F.huber_loss(x, b.same),
    "smooth_l1_loss": lambda x, b: F.smooth_l1_loss(x, b.same),
    "l1_loss": lambda x, b: F.l1_loss(x, b.same),
    "bce": lambda x, b: F.binary_cross_entropy(x.sigmoid(), b.same.sigmoid().detach()),
    "bce with logits": lambda x, b: F.binary_cross_entropy_with_logits(x, b.same.sigmoid()),
    "kl_div batchmean": lambda x, b: F.kl_div(
        x.log_softmax(-1), b.same.softmax(-1), reduction="batchmean"
    ),
    "kl_div mean": lambda x, b: F.kl_div(x, b.same.softmax(-1)),
    "nll_loss": lambda x, b: F.nll_loss(
        x.flatten(0, 1).log_softmax(-1), b.ids(last(x), x.size(0) * x.size(1))
    ),
    "cross_entropy": lambda x, b: F.cross_entropy(
        x.flatten(0, 1), b.ids(last(x), x.size(0) * x.size(1))
    ),
    "cross_entropy of classes in the middle": lambda x, b: F.cross_entropy(
        x.transpose(1, 2), b.ids(last(x), x.size(0), x.size(1))
    ),
    "gaussian_nll_loss": lambda x, b: F.gaussian_nll_loss(x, b.same, x.square() + 1),
    "poisson_nll_loss": lambda x, b: F.poisson_nll_loss(x, b.same.square().detach()),
    "cosine_embedding_loss": lambda x, b: F.cosine_embedding_loss(
        x[:, 0], b.of(x.size(0), last(x)), torch.ones(x.size(0))
    ),
    "cosine_similarity": lambda x, b: F.cosine_similarity(x, b.same, dim=-1),
    "margin_ranking_loss": lambda x, b: F.margin_ranking_loss(x, b.same, torch.ones(x.shape)),
    "soft_margin_loss": lambda x, b: F.soft_margin_loss(x, b.same.sign().detach()),
    "triplet_margin_loss": lambda x, b: F.triplet_margin_loss(x, b.same, x.detach() + 1),
    "pairwise_distance": lambda x, b: F.pairwise_distance(x, b.same),
    "hinge_embedding_loss": lambda x, b: F.hinge_embedding_loss(x, b.same.sign().detach()),
    "multi_margin_loss": lambda x, b: F.multi_margin_loss(x[:, -1], b.ids(last(x), x.size(0))),
}

REDUCTIONS: dict[str, Function] = {
    "sum": lambda x, b: x.sum(),
    "sum 0": lambda x, b: x.sum(0),
    "sum 1": lambda x, b: x.sum(1),
    "sum 2": lambda x, b: x.sum(-1, keepdim=True),
    "sum 0 2": lambda x, b: x.sum((0, 2)),
    "mean": lambda x, b: x.mean(),
    "mean 1": lambda x, b: x.mean(1),
    "mean 2": lambda x, b: x.mean(-1, keepdim=True),
    "var": lambda x, b: x.var(),
    "var 1": lambda x, b: x.var(1, unbiased=False),
    "var 2": lambda x, b: x.var(-1),
    "std 2": lambda x, b: (x.std(-1), x.std((0, 1), unbiased=False)),
    "var_mean": lambda x, b: torch.var_mean(x, -1),
    "norm": lambda x, b: x.norm(),
    "norm 1": lambda x, b: x.norm(dim=1),
    "norm 2": lambda x, b: x.norm(p=1, dim=2),
    "vector_norm": lambda x, b: torch.linalg.vector_norm(x, 3, (0, 2)),
    "amax 1": lambda x, b: x.amax(1),
    "amax 2": lambda x, b: x.amax(-1),
    "aminmax": lambda x, b: x.aminmax(dim=1),
    "max": lambda x, b: x.max(),
    "max 1": lambda x, b: x.max(1),
    "max 2": lambda x, b: x.max(-1).values,
    "min 0": lambda x, b: x.min(0),
    "logsumexp 1": lambda x, b: x.logsumexp(1),
    "logsumexp 2": lambda x, b: x.logsumexp(-1),
    "prod 2": lambda x, b: x.prod(-1),
    "prod 1": lambda x, b: x.prod(1),
    "nansum": lambda x, b: x.nansum(1),
    "median": lambda x, b: x.median(1),
    "quantile": lambda x, b: x.quantile(0.3, dim=1),
    "any": lambda x, b: ((x > 1).any(1), (x > 1).any(), (x > -9).all(-1)),
    "count_nonzero": lambda x, b: x.count_nonzero(1),
    "allclose": lambda x, b: torch.tensor([torch.allclose(x, x), torch.equal(x, b.same)]),
    "item": lambda x, b: x * x.max().item(),
    "bool": lambda x, b: x * 2 if (x > 0).any() else x,
    "trace": lambda x, b: torch.einsum("bij,bij->b", x, x),
}

ALONG: dict[str, Function] = {
    "softmax 1": lambda x, b: x.softmax(1),
    "softmax 2": lambda x, b: x.softmax(-1),
    "log_softmax 1": lambda x, b: x.log_softmax(1),
    "log_softmax 2": lambda x, b: F.log_softmax(x, -1),
    "softmin": lambda x, b: F.softmin(x, 1),
    "gumbel": lambda x, b: F.softmax(x / 0.3 + b.same, dim=-1),
    "normalize": lambda x, b: F.normalize(x, dim=-1),
    "normalize 1": lambda x, b: F.normalize(x, dim=1),
    "layer_norm": lambda x, b: F.layer_norm(x, (last(x),), b.of(last(x)), b.of(last(x), 1)[:, 0]),
    "layer_norm of two": lambda x, b: F.layer_norm(x, tuple(x.shape[1:])),
    "rms_norm": lambda x, b: F.rms_norm(x, (last(x),), b.of(last(x))),
    "rms by hand": lambda x, b: (
        x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * b.of(last(x))
    ),
    "group_norm": lambda x, b: F.group_norm(x, 1),
    "batch_norm": lambda x, b: F.batch_norm(x, None, None, training=True),
    "instance_norm": lambda x, b: F.instance_norm(x),
    "cumsum 1": lambda x, b: x.cumsum(1),
    "cumsum 2": lambda x, b: x.cumsum(-1),
    "cumprod": lambda x, b: x.cumprod(1),
    "cummax": lambda x, b: (x.cummax(1).values, x.cummax(2).values),
    "logcumsumexp": lambda x, b: (x.logcumsumexp(1), x.logcumsumexp(2)),
    "sort": lambda x, b: x.sort(1),
    "sort 2": lambda x, b: x.sort(-1, descending=True),
    "argsort": lambda x, b: (x.argsort(1), x.argsort(2)),
    "topk 1": lambda x, b: x.topk(1, 1),
    "topk 2": lambda x, b: x.topk(3, -1),
    "argmax": lambda x, b: (x.argmax(-1), x.argmax(1), x.argmax()),
    "kthvalue": lambda x, b: x.kthvalue(1, 1),
    "flip": lambda x, b: (x.flip(1), x.flip(2), x.flip((0, 1))),
    "roll": lambda x, b: (x.roll(1, 1), x.roll(2, 2), x.roll(1)),
    "diff": lambda x, b: (x.diff(dim=1), x.diff(dim=2)),
    "top-p": lambda x, b: x.masked_fill(
        x.softmax(-1).sort(-1).values.cumsum(-1) < 0.3, float("-inf")
    ).softmax(-1),
}

SHAPES: dict[str, Function] = {
    "view": lambda x, b: x.view(-1, last(x)),
    "view 4": lambda x, b: x.view(x.size(0), x.size(1), -1, 1).sin(),
    "view flat": lambda x, b: x.view(-1),
    "reshape": lambda x, b: x.transpose(0, 1).reshape(x.size(1), -1),
    "flatten": lambda x, b: (x.flatten(0, 1), x.flatten(1), x.flatten()),
    "unflatten": lambda x, b: x.unflatten(1, (1, -1)).exp(),
    "transpose": lambda x, b: x.transpose(1, 2).contiguous().cos(),
    "permute": lambda x, b: x.permute(2, 0, 1) * 2,
    "movedim": lambda x, b: x.movedim(0, 1).square().movedim(1, 0),
    "mT": lambda x, b: x.mT @ x,
    "unsqueeze": lambda x, b: (x.unsqueeze(1) * 2, x[:, :, None].squeeze(2) + 1),
    "squeeze": lambda x, b: (x[:1].squeeze() * 2, x[:1].squeeze(0) + 1, x[:1].squeeze((0, 1))),
    "expand": lambda x, b: x[:, None].expand(-1, 3, -1, -1) * 2,
    "expand_as": lambda x, b: x[:1].expand_as(x) * b.same,
    "repeat": lambda x, b: (x.repeat(1, 2, 1), x.repeat(2, 1, 1), x.repeat_interleave(2, 1)),
    "tile": lambda x, b: x.tile(2),
    "split": lambda x, b: [t.sin() for t in x.split(2, -1)],
    "split 1": lambda x, b: [t.sin() for t in x.split(3, 1)],
    "one of split": lambda x, b: x.split(4, -1)[0],
    "chunk": lambda x, b: (*x.chunk(2, -1), *x.chunk(2, 1), x.chunk(2, 0)[1]),
    "unbind": lambda x, b: (*x.unbind(0), x.unbind(1)[0], x.unbind(2)[1]),
    "tensor_split": lambda x, b: x.tensor_split(2, 1),
    "cat": lambda x, b: (torch.cat([x, b.same], 0), torch.cat([x, x * 2], -1)),
    "cat 1": lambda x, b: (torch.cat([b.same, x], 1), torch.cat([x[:, -1:], x[:, :-1]], 1)),
    "stack": lambda x, b: (torch.stack([x, x * 2]), torch.stack([b.same, x], 2)),
    "pad": lambda x, b: (F.pad(x, (0, 0, 1, 2)), F.pad(x, (1, 1)), F.pad(x, (0, 0, -1, 1))),
    "pad reflect": lambda x, b: F.pad(x, (1, 1), mode="replicate"),
    "interpolate": lambda x, b: F.interpolate(x, size=5, mode="linear"),
    "avg_pool": lambda x, b: (F.adaptive_avg_pool1d(x, 1), F.avg_pool1d(x, 2)),
    "max_pool": lambda x, b: F.adaptive_max_pool1d(x, 2),
    "unfold": lambda x, b: x.unfold(2, 3, 2) * 2,
    "tril": lambda x, b: (x.tril(), x.triu(1)),
    "diagonal": lambda x, b: x.diagonal(0, 1, 2) * 2,
    "meshed": lambda x, b: x[:, :, None] - x[:, :, :, None],
}

INDEXING: dict[str, Function] = {
    "last": lambda x, b: x[:, -1],
    "last kept": lambda x, b: x[:, -1:] * 2,
    "first of last": lambda x, b: x[..., 0].exp(),
    "shifted": lambda x, b: F.mse_loss(x[:, :-1], b.same[:, 1:]) if x.size(1) > 1 else x,
    "stepped": lambda x, b: (x[:, ::2] * 2, x[..., ::2] * 2, x[:, :, 1:-1] * 2),
    "everything": lambda x, b: x[:, :, :] * x[...] * x[:],
    "none": lambda x, b: x[None, :, None] * 2,
    "some of the batch": lambda x, b: x[[1, 0]] * x[0:1],
    "mask of the batch": lambda x, b: x[torch.tensor([True, False])].sin(),
    "mask of tokens": lambda x, b: x[b.ids(3, *x.shape[:2]) > 0].sin(),
    "mask of all": lambda x, b: x[b.same > 0] * 2,
    "mask of its own": lambda x, b: x[x > 0] * 2,
    "pairs": lambda x, b: x[torch.arange(x.size(0)), b.ids(x.size(1), x.size(0))] * 2,
    "argmax pooled": lambda x, b: x[torch.arange(x.size(0)), x.mean(-1).argmax(1)],
    "list of columns": lambda x, b: x[..., [1, 3]] * 2,
    "columns of tokens": lambda x, b: x[:, b.ids(x.size(1), 3), b.ids(last(x), 3)] * 2,
    "index_select": lambda x, b: [x.index_select(i, torch.tensor([0, 0])) for i in range(3)],
    "gather": lambda x, b: x.gather(-1, b.ids(last(x), *x.shape[:2], 1)).squeeze(-1),
    "gather 1": lambda x, b: x.gather(1, b.ids(x.size(1), x.size(0), 2, last(x))),
    "take_along_dim": lambda x, b: x.take_along_dim(x.argsort(-1), -1),
    "masked_select": lambda x, b: x.masked_select(b.same > 0),
    "nonzero": lambda x, b: (x > 0).nonzero(),
    "where": lambda x, b: torch.where(b.same > 0, x, b.same),
    "where of its own": lambda x, b: torch.where(x > 0, x.sin(), 0.0),
    "masked_fill": lambda x, b: x.masked_fill(b.same > 0, -3.0),
    "masked_fill broadcast": lambda x, b: x.masked_fill(b.ids(2, last(x)) > 0, float("-inf")),
    "masked tokens": lambda x, b: x.masked_fill(b.ids(2, *x.shape[:2], 1) > 0, 0.0),
    "scatter": lambda x, b: x.scatter(-1, b.ids(last(x), *x.shape[:2], 1), 2.0),
    "scatter_add": lambda x, b: b.same.scatter_add(1, b.ids(x.size(1), *x.shape), x),
    "index_add": lambda x, b: b.same.index_add(1, b.ids(x.size(1), x.size(1)), x),
    "index_put": lambda x, b: x.index_put((torch.tensor([0]),), b.of(last(x))),
    "index_put of it": lambda x, b: b.same.index_put((torch.tensor([1, 0]),), x),
    "select_scatter": lambda x, b: x.select_scatter(b.of(x.size(0), last(x)), 1, 0),
    "slice_scatter": lambda x, b: x.slice_scatter(b.of(x.size(0), 1, last(x)), 1, 0, 1),
    "one_hot": lambda x, b: F.one_hot(x.argmax(-1), last(x)) * x,
    "embedding": lambda x, b: F.embedding(x.argmax(-1), b.of(last(x), 4)),
}

PRODUCTS: dict[str, Function] = {
    "linear": lambda x, b: F.linear(x, b.of(4, last(x)), b.of(4)),
    "linear, no bias": lambda x, b: F.linear(x, b.of(4, last(x))),
    "matmul": lambda x, b: x @ b.of(last(x), 3),
    "scores": lambda x, b: x @ x.transpose(1, 2),
    "bmm": lambda x, b: torch.bmm(b.same, x.mT),
    "einsum": lambda x, b: torch.einsum("bsh,hk->bsk", x, b.of(last(x), 3)),
    "einsum of tokens": lambda x, b: torch.einsum("bsh,bth->bst", x, b.same),
    "mixed over tokens": lambda x, b: torch.einsum("bsh,st->bth", x, b.of(x.size(1), 3)),
    "tensordot": lambda x, b: torch.tensordot(x, b.same, dims=([0, 2], [0, 2])),
    "outer": lambda x, b: x[:, 0, :, None] * x[:, 0, None],
    "addmm": lambda x, b: torch.addmm(b.of(3), x[0], b.of(last(x), 3)),
    "baddbmm": lambda x, b: torch.baddbmm(
        x, b.of(x.size(0), x.size(1), 2), b.of(x.size(0), 2, last(x))
    ),
    "bilinear": lambda x, b: F.bilinear(x, x, b.of(2, last(x), last(x))),
    "cdist": lambda x, b: torch.cdist(x, b.same),
    "conv1d": lambda x, b: F.conv1d(x.mT, b.of(2, last(x), 1)),
    "attention": lambda x, b: attended(x, b.same, False),
    "causal attention": lambda x, b: attended(x, x, True),
    "attention by hand": lambda x, b: (
        (x @ x.mT)
        .masked_fill(torch.ones(x.size(1), x.size(1)).triu(1) > 0, float("-inf"))
        .softmax(-1)
        @ x
    ),
    "pooled by attention": lambda x, b: ((x @ b.of(last(x))).softmax(-1)[..., None] * x).sum(1),
    "inverse": lambda x, b: torch.linalg.inv(x.mT @ x + torch.eye(last(x))),
}

POINTWISE: dict[str, Function] = {
    "scaled": lambda x, b: x * 2.5 + 1,
    "scaled by a tensor": lambda x, b: x / torch.tensor(3.0, dtype=torch.float64) - 2 * x,
    "reversed": lambda x, b: 2 - 3 / (x.square() + 1),
    "bias": lambda x, b: x + b.of(last(x)),
    "positions": lambda x, b: x + b.of(x.size(1), last(x)),
    "positions of a batch": lambda x, b: x * b.of(1, x.size(1), 1) + b.of(x.size(1), 1),
    "by batch": lambda x, b: x * b.of(x.size(0), 1, 1),
    "same": lambda x, b: x * b.same - b.same.sin() * x,
    "broadcast up": lambda x, b: x * b.of(3, 1, 1, 1),
    "broadcast up more": lambda x, b: x[None, :, :, :] * b.of(2, 1, x.size(1), last(x)),
    "itself": lambda x, b: x * x.exp() - x.tanh(),
    "gelu": lambda x, b: F.gelu(x) + F.gelu(x, approximate="tanh"),
    "silu": lambda x, b: F.silu(x) * F.relu(x) + F.mish(x),
    "softcap": lambda x, b: torch.tanh(x / 3) * 3,
    "softplus": lambda x, b: F.softplus(x) + F.elu(x) + F.leaky_relu(x) + F.hardtanh(x),
    "logsigmoid": lambda x, b: F.logsigmoid(x) + F.hardswish(x) + F.softsign(x),
    "glu": lambda x, b: (F.glu(x[..., :2]), F.glu(torch.cat([x, x], 1), 1)),
    "prelu": lambda x, b: F.prelu(x, b.of(1)),
    "clamp": lambda x, b: x.clamp(-1, 1) + x.clamp(min=b.same.detach()),
    "maximum": lambda x, b: torch.maximum(x, b.same) + torch.fmin(x, b.same),
    "pow": lambda x, b: x.pow(2) + x.abs().pow(b.of(last(x))),
    "lerp": lambda x, b: torch.lerp(x, b.same, 0.3) + torch.addcmul(x, b.same, x),
    "atan2": lambda x, b: torch.atan2(x, b.same) + torch.hypot(x, b.same),
    "log1p": lambda x, b: x.abs().log1p() + x.square().sqrt() + torch.sigmoid(x).logit(),
    "erf": lambda x, b: torch.erf(x) + torch.expm1(x) + torch.special.entr(x.sigmoid()),
    "round": lambda x, b: x.round() + x.floor() + x.frac() + x % 2,
    "frexp": lambda x, b: torch.frexp(x),
    "compared": lambda x, b: ((x > b.same) & (x < 2) | (x == x)).to(x.dtype) * x,
    "isnan": lambda x, b: x.nan_to_num().masked_fill(x.isnan(), 0),
    "cast": lambda x, b: (x.float().double(), x.to(torch.bfloat16).double(), x.int(), x.bool()),
    "complex": lambda x, b: torch.view_as_real(torch.complex(x, x * 2) * 1j),
    "clone": lambda x, b: (x.clone(), x.detach() * x, x.contiguous(), x.to(x.device)),
    "like": lambda x, b: torch.zeros_like(x) + torch.full_like(x, 2.0) * torch.ones_like(x) * x,
    "new": lambda x, b: x.new_zeros(x.shape) + x.new_full((last(x),), 2.0) * x + x.new_ones(1),
    "fake mask": lambda x, b: x + torch.arange(x.size(1))[None, :, None] * torch.ones(x.shape),
    "sizes": lambda x, b: x * x.size(1) + x.shape[-1] + x.numel() + x.stride(0) * 0,
    "layer_norm module": lambda x, b: nn.LayerNorm(last(x), dtype=torch.float64)(x),
    "identity": lambda x, b: nn.Dropout(0.0)(nn.Identity()(x)),
    "own function": lambda x, b: Doubled.apply(x),
    "hooked": lambda x, b: in_place(x, lambda x: x.register_hook(lambda g: g * 2)),
}

IN_PLACE: dict[str, Function] = {
    "mul_": lambda x, b: in_place(x, lambda x: x.mul_(2).add_(1)),
    "add_ bias": lambda x, b: in_place(x, lambda x: x.add_(b.of(last(x)))),
    "add_ positions": lambda x, b: in_place(x, lambda x: x.add_(b.of(x.size(1), 1))),
    "into plain": lambda x, b: in_place(b.same * 1, lambda y: y.add_(x)),
    "iadd": lambda x, b: in_place(x, lambda x: x.__iadd__(x.sin())),
    "masked_fill_": lambda x, b: in_place(x, lambda x: x.masked_fill_(b.same > 0, 0.5)),
    "clamp_": lambda x, b: in_place(x, lambda x: x.clamp_(min=0).sqrt_() if x.min() < -9 else x),
    "zero_ of a view": lambda x, b: in_place(x, lambda x: x[..., 1:3].zero_()),
    "view, then": lambda x, b: in_place(x, lambda x: x.view(-1, last(x)).mul_(3)),
    "first token": lambda x, b: in_place(x, lambda x: x[:, 0].mul_(3)),
    "tokens": lambda x, b: in_place(x, lambda x: x[:, 1:].add_(b.of(last(x)))),
    "column": lambda x, b: in_place(x, lambda x: x[..., 0].add_(x[..., 1])),
    "narrow": lambda x, b: in_place(x, lambda x: x.narrow(1, 0, 1).copy_(b.of(1, last(x)))),
    "diagonal": lambda x, b: in_place(x, lambda x: x.diagonal(0, 1, 2).fill_(2.0)),
    "cumsum_": lambda x, b: in_place(x, lambda x: x.cumsum_(1)),
    "out": lambda x, b: in_place(x.detach(), lambda x: torch.mul(x, 2, out=x)),
    "copy_": lambda x, b: in_place(x, lambda x: x.copy_(b.same)),
    "index_fill_": lambda x, b: in_place(x, lambda x: x.index_fill_(1, torch.tensor([0]), 2.0)),
    "scatter_": lambda x, b: in_place(
        x, lambda x: x.scatter_(2, b.ids(last(x), *x.shape[:2], 1), 1.0)
    ),
    "index_put_": lambda x, b: set_item(x, b.ids(2, *x.shape[:2]) > 0, 1.5),
    "x[:, 0] =": lambda x, b: set_item(x, (slice(None), 0), b.of(last(x))),
    "x[:, :, 2:4] =": lambda x, b: set_item(x, (slice(None), slice(None), slice(2, 4)), -5.0),
    "x[..., [1, 3]] =": lambda x, b: set_item(x, (..., [1, 3]), b.of(2)),
    "x[0] =": lambda x, b: set_item(x, 0, b.of(x.size(1), last(x))),
    "x[mask] =": lambda x, b: set_item(x, b.same > 0, 0.25),
    "x[own mask] =": lambda x, b: set_item(x, x.detach() > 0, 0.25),
    "x[:] =": lambda x, b: set_item(x, slice(None), b.same),
    "late view": lambda x, b: late_view(x),
    "view of a view": lambda x, b: in_place(x, lambda x: x[:, :2][..., 1:3][0].mul_(3)),
}

FUNCTIONS: dict[str, Function] = {
    f"{kind}: {name}": function
    for kind, functions in (
        ("loss", LOSSES),
        ("reduction", REDUCTIONS),
        ("along", ALONG),
        ("shape", SHAPES),
        ("indexing", INDEXING),
        ("product", PRODUCTS),
        ("pointwise", POINTWISE),
        ("in place", IN_PLACE),
    )
    for name, function in functions.items()
}
