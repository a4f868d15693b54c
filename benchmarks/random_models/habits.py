"""Odd habits of code: one at a time goes into a model that a plan is right for without it.

Some make sharding wrong and must be refused, some look odd and do no harm.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.random_models.recipe import Recipe

Lines = tuple[str, ...]

# sharded columns, y, before the row-parallel layer of an MLP
_MLP: Mapping[str, Lines] = {
    "mean over columns": ("y = y - y.mean(-1, keepdim=True)",),
    "unit columns": ("y = F.normalize(y, dim=-1)",),
    "softmax over columns": ("y = y.softmax(-1)",),
    "layer norm over columns": ("y = F.layer_norm(y, y.shape[-1:])",),
    "by the number of columns": ("y = y * y.size(-1) ** -0.5",),
    "columns detached": ("y = y.detach()",),
    "columns half detached": ("y = y + (2 * y).detach()",),
    "straight-through mean": ("m = y.mean(-1, keepdim=True)", "y = y + m - m.detach()"),
    "columns summed up": ("y = y.cumsum(-1)",),
    "columns sorted": ("y = y.sort(-1).values",),
    "columns rolled": ("y = y.roll(1, -1)",),
    "columns turned around": ("y = y.flip(-1)",),
    "largest columns": ("y = torch.where(y >= y.topk(4, -1).values[..., -1:], y, 0.0)",),
    "columns numbered": ("y = y * torch.arange(y.size(-1), device=y.device)",),
    "largest of all": ("y = y / (1 + y.abs().max())",),
    "rows clipped": ("y = y * (30.0 / y.norm(dim=-1, keepdim=True)).clamp(max=1.0)",),
    "deviation of all": ("y = y / (1 + y.std())",),
    "unit columns in training": ("if self.training:", "    y = F.normalize(y, dim=-1)"),
    "unit columns from the second step": (
        "steps = self.steps = getattr(self, 'steps', 0) + self.training",
        "if steps > 1:",
        "    y = F.normalize(y, dim=-1)",
    ),
    "mean of the step before": (
        "if self.training:",
        "    y = y * getattr(self, 'before', 1.0)",
        "    self.before = 1.0 + y.detach().mean()",
    ),
    "columns of long inputs": ("if x.shape[:2].numel() > 20:", "    y = y.softmax(-1)"),
    "four groups": ("y = y.unflatten(-1, (4, -1)).softmax(-1).flatten(-2)",),
    "groups of four": ("y = y.unflatten(-1, (-1, 4)).softmax(-1).flatten(-2)",),
    "across groups of four": ("y = y.unflatten(-1, (-1, 4)).softmax(-2).flatten(-2)",),
    "first column": ("y = y * y[..., :1].sigmoid()",),
    "half of the columns": ("a, c = y.chunk(2, -1)", "y = torch.cat([a.tanh(), c], -1)"),
    "sixteen columns": ("y = torch.cat([y[..., :16].tanh(), y[..., 16:]], -1)",),
    "norm of the gradient, hook": (
        "if y.requires_grad:",
        "    y.register_hook(lambda g: g / (1 + g.norm()))",
    ),
    "gradient doubled, hook": ("if y.requires_grad:", "    y.register_hook(lambda g: 2 * g)"),
    "norm of the gradient": ("y = UnitGradient.apply(y)",),
    "gradient halved": ("y = HalfGradient.apply(y)",),
    "in place": ("y = y * 1.0", "y.mul_(0.5).add_(1.0)"),
    "one column zeroed": ("y = y.clone()", "y[..., 0] = 0.0"),
    "calls counted": ("calls = self.calls = getattr(self, 'calls', 0) + 1", "y = y * calls"),
    "products of columns": ("y = y * (y * y).sum(-1, keepdim=True)",),
    "a number of the data": ("y = y * float(y.detach().mean())",),
    "positions numbered": ("y = y * torch.arange(1, y.size(1) + 1, device=y.device)[:, None]",),
    "mean over positions": ("y = y - y.mean(1, keepdim=True)",),
    "batch norm": ("y = (y - y.mean((0, 1))) / (1 + y.std((0, 1)))",),
    "batch cut": ("y = torch.cat(y.split(1, 0))",),
    "of the weights": ("y = y * self.<up>.weight.norm()",),
    "of the other weights": ("y = y + self.<down>.weight.mean()",),
    "variance of columns, unused": ("y = y + 0.0 * y.var(-1, keepdim=True)",),
    "columns and batch swapped": ("y = y.transpose(0, 1).contiguous().transpose(0, 1)",),
    "columns kept as state": ("self.last = y.detach()", "y = y * self.last.sigmoid()"),
    "mean detached": ("y = y - y.mean(-1, keepdim=True).detach()",),
    "checkpointed activation": ("y = checkpoint(torch.tanh, y, use_reentrant=False)",),
    "columns given back by rows": ("y = torch.stack([row.relu() for row in y])",),
    "float32 inside": ("y = y.float().tanh().to(x.dtype)",),
}  # fmt: skip
# heads: q, k and v are (batch, heads, positions, columns)
_ATTENTION: Mapping[str, Lines] = {
    "mean over heads": ("q = q - q.mean(1, keepdim=True)",),
    "first head of the keys": ("q = q * k[:, :1].sigmoid()",),
    "by the number of heads": ("q = q / q.size(1)",),
    "heads numbered": ("q = q * torch.arange(1, q.size(1) + 1, device=q.device)[:, None, None]",),
    "said heads numbered": (
        "q = q * torch.arange(1, self.heads + 1, device=q.device)[:, None, None]",
    ),
    "by the said heads": ("q = q / self.heads",),
    "keys detached": ("k = k.detach()",),
    "keys without gradients": ("with torch.no_grad():", "    k = k * 1.0"),
    "values and their mean": ("v = v + v.mean(1, keepdim=True)",),
    "width over heads": ("q = q * (x.size(-1) // q.size(1)) ** -0.5",),
    "values' mean in training": ("if self.training:", "    v = v - v.mean(1, keepdim=True)"),
    "heads of long inputs": ("if q.size(2) > 8:", "    q = q.softmax(1)"),
    "keys summed up": ("k = k.cumsum(2)",),
    "largest of all queries": ("q = q / (1 + q.abs().amax())",),
    "heads in pairs": ("q = q.unflatten(1, (-1, 2)).flip(2).flatten(1, 2)",),
    "halves of the heads": ("a, c = q.chunk(2, 1)", "q = torch.cat([c, a], 1)"),
    "one head zeroed": ("q = q.clone()", "q[:, 0] = 0.0"),
    "heads and batch in one": ("q = q.flatten(0, 1).unflatten(0, (q.size(0), -1)).view_as(q)",),
}  # fmt: skip
_WEIGHTS: Mapping[str, Lines] = {
    "weights above their mean": ("att = att * (att > att.mean())",),
    "weights over heads": ("att = att / att.sum(1, keepdim=True)",),
    "weights of the next head": ("att = att.roll(1, 1)",),
    "weights sharpened": ("att = att.square() / att.square().sum(-1, keepdim=True)",),
    "entropy, a number": ("self.kept = -(att * att.clamp_min(1e-9).log()).sum(-1).mean()",),
}
_MIXED: Mapping[str, Lines] = {
    "heads turned around": ("y = y.flip(1)",),
    "heads rolled": ("y = y.roll(1, 1)",),
    "norm of all heads": ("y = y / (1 + y.norm(dim=(1, 3), keepdim=True))",),
    "norm of each head": ("y = y / (1 + y.norm(dim=3, keepdim=True))",),
    "mean of all heads": ("y = y + y.mean(1, keepdim=True)",),
}
# the stream, x, in a layer
_STREAM: Mapping[str, Lines] = {
    "length": ("x = x * x.size(1) ** -0.5",),
    "mean of the sequence": ("x = x - x.mean(1, keepdim=True)",),
    "first position": ("x = x - x[:, :1]",),
    "last position": ("x = x + x[:, -1:]",),
    "positions shifted": ("x = x + F.pad(x, (0, 0, 1, 0))[:, :-1]",),
    "positions summed up": ("x = x.cumsum(1)",),
    "positions turned around": ("x = x.flip(1)",),
    "positions rolled": ("x = x + x.roll(1, 1)",),
    "largest of the sequence": ("x = x / (1 + x.abs().amax(1, keepdim=True))",),
    "mean of the batch": ("x = x - x.mean(0, keepdim=True)",),
    "norm of everything": ("x = x / (1 + x.norm())",),
    "deviation of everything": ("x = x / (1 + x.std())",),
    "long inputs": ("if x.size(1) > 8:", "    x = 0.5 * x"),
    "mean of the sequence in training": (
        "if self.training:",
        "    x = x - x.mean(1, keepdim=True)",
    ),
    "position numbers": ("x = x * torch.arange(1, x.size(1) + 1, device=x.device)[:, None]",),
    "every other position": ("x = x.clone()", "x[:, ::2] *= 2.0"),
    "tokens without their batch": ("x = x.flatten(0, 1).tanh().view(x.shape)",),
    "stream half detached": ("x = x + x.detach()",),
    "stream's gradient doubled": ("if x.requires_grad:", "    x.register_hook(lambda g: 2 * g)"),
    "norm of the stream's gradient": (
        "if x.requires_grad:",
        "    x.register_hook(lambda g: g / (1 + g.norm()))",
    ),
    "norm of the stream's gradient, inside": ("x = UnitGradient.apply(x)",),
    "how many numbers": ("x = x / x.numel()",),
    "batch size": ("x = x * x.size(0)",),
    "batch and sequence swapped": ("x = x.transpose(0, 1).contiguous().transpose(0, 1)",),
    "pooled gate": ("x = x * x.mean(1, keepdim=True).sigmoid()",),
    "no NaN": ("assert not torch.isnan(x).any()",),
    "a branch on the data": ("if float(x.detach()[..., 0].sum()) > 0:", "    x = 2 * x"),
    "only batch and length": ("x = x.reshape(x.size(0), x.size(1), -1)",),
    "softmax over positions": ("x = x + x.softmax(1)",),
    "columns of the stream": ("x = x - x.mean(-1, keepdim=True)",),
    "stream's columns turned around": ("x = x.flip(-1)",),
    "similar positions": ("x = x + torch.softmax(x @ x.mT, -1) @ x",),
    "calls of the layer counted": (
        "calls = self.calls = getattr(self, 'calls', 0) + 1",
        "x = x * calls",
    ),
    "positions cut in two": ("x = torch.cat(x.chunk(2, 1), 1)",),
    "positions sorted": ("x = x.sort(1).values",),
    "interpolated": (
        "x = x + F.interpolate(x.mT, size=x.size(1), mode='linear').mT",
    ),
    "stream in place": ("x = x * 1.0", "x.mul_(0.5)"),
}  # fmt: skip
# the stream after the last layer: a DTensor of the global shape under sequence parallelism
_MODEL: Mapping[str, Lines] = {
    name: (f"x = {made}",)
    for name, made in {
        "end: mean of the sequence": "x - x.mean(1, keepdim=True)",
        "end: last position": "x * x[:, -1:]",
        "end: summed up": "x.cumsum(1)",
        "end: turned around": "x.flip(1)",
        "end: shifted": "x + F.pad(x, (0, 0, 1, 0))[:, :-1]",
        "end: attention": "F.scaled_dot_product_attention(x, x, x)",
        "end: softmax over positions": "x.softmax(1)",
        "end: norm of everything": "x / (1 + x.norm())",
        "end: deviation": "x / (1 + x.std())",
        "end: sorted": "x.sort(1).values",
        "end: in another order": "x[:, torch.arange(x.size(1) - 1, -1, -1, device=x.device)]",
        "end: products": "x + torch.softmax(x @ x.mT, -1) @ x",
        "end: rolled": "x.roll(1, 1)",
        "end: as tokens": "x.reshape(-1, x.size(-1)).tanh().view(x.shape)",
        "end: cut in two": "torch.cat(x.chunk(2, 1), 1)",
        "end: length": "x * x.size(1) ** -0.5",
        "end: numbered": "x * torch.arange(x.size(1), device=x.device)[:, None]",
        "end: stacked": "torch.stack([x, 2 * x]).sum(0)",
        "end: unbound": "torch.stack(x.unbind(1), 1)",
        "end: batch mean": "x - x.mean(0, keepdim=True)",
        "end: where": "torch.where(x > 0, x, 0.1 * x)",
        "end: einsum": 'torch.einsum("btc,bsc->btc", x, x)',
        "end: gathered": "x.gather(1, torch.zeros_like(x, dtype=torch.long))",
        "end: masked": "x.masked_fill(torch.arange(x.size(1), device=x.device)[:, None] == 1, 0.0)",
        "end: windows": "x + x.unfold(1, 1, 1).squeeze(-1)",
        "end: largest": "x / (1 + x.abs().max())",
        "end: half detached": "x + x.detach()",
    }.items()
}  # fmt: skip
# what the model gives out: logits where it has a head, else the stream
_OUTPUT: Mapping[str, Lines] = {
    name: (f"<out> = {made}",)
    for name, made in {
        "out: log-probabilities": "<out>.log_softmax(-1)",
        "out: probabilities": "torch.softmax(<out> / 0.7, dim=-1)",
        "out: summed up": "<out>.cumsum(-1)",
        "out: turned around": "<out>.flip(-1)",
        "out: a part": "<out>.split(4, -1)[1].repeat_interleave(2, -1)",
        "out: the largest": "torch.where(<out> < <out>.topk(3).values[..., -1:], 0.0, <out>)",
        "out: sums of exponentials": "<out> - <out>.logsumexp(-1, keepdim=True)",
        "out: mean": "<out> - <out>.mean(-1, keepdim=True)",
        "out: deviation": "<out> / (1 + <out>.std(-1, keepdim=True))",
        "out: norm": "<out> / (1 + <out>.norm(dim=-1, keepdim=True))",
        "out: sorted": "<out>.sort(-1).values",
        "out: by its size": "<out> / <out>.size(-1)",
        "out: mean squares": "<out> + F.mse_loss(<out>, torch.ones_like(<out>))",
        "out: huber": "<out> + F.huber_loss(<out>, torch.zeros_like(<out>))",
        "out: smooth": "<out> + F.smooth_l1_loss(<out>, torch.zeros_like(<out>))",
        "out: binary": "<out> + F.binary_cross_entropy_with_logits(<out>, torch.ones_like(<out>))",
        "out: divergence": "<out> + F.kl_div(<out>.log_softmax(-1), <out>.softmax(-1).detach())",
        "out: rolled": "<out>.roll(1, -1)",
        "out: padded": "F.pad(<out>, (0, 3))",
        "out: one of them": "<out> * <out>[..., :1]",
        "out: the largest of all": "<out> - <out>.max()",
        "out: two halves": "torch.cat(<out>.chunk(2, -1)[::-1], -1)",
        "out: a column set": "torch.where(torch.arange(<out>.size(-1)) == 3, -1e4, <out>)",
        "out: last position": "<out> + <out>[:, -1:]",
        "out: over positions": "<out>.softmax(1)",
        "out: argmax": "<out> * F.one_hot(<out>.argmax(-1), <out>.size(-1))",
        "out: logs of sums": "<out>.logcumsumexp(-1)",
        "out: gathered": "<out>.gather(-1, <out>.argmax(-1, keepdim=True)) + <out>",
        "out: a half, detached": "<out> + <out>.detach().mean()",
        "out: in place": "(<out> * 1.0).mul_(0.5)",
        "out: clamped": "<out>.clamp(-1.0, 1.0)",
        "out: with weights": "<out> + 1e-3 * sum(p.pow(2).sum() for p in self.parameters())",
        "out: with what is kept": "<out> + sum(getattr(m, 'kept', 0.0) for m in self.modules())",
    }.items()
}  # fmt: skip
_KEPT = _OUTPUT["out: with what is kept"]
# lines in several places
_SPREAD: Mapping[str, Mapping[str, Lines]] = {
    "columns of a buffer": {
        "mlp init": ('self.register_buffer("wave", torch.randn(<inner>))',),
        "mlp": ("y = y * self.wave",),
    },
    "running mean of columns": {
        "mlp init": ('self.register_buffer("ema", torch.ones(()))',),
        "mlp": (
            "if self.training:",
            "    self.ema.mul_(0.5).add_(0.5 * y.detach().abs().mean())",
            "y = y / self.ema.clone()",
        ),
    },
    "columns' sum kept": {"mlp": ("self.kept = y.pow(2).mean()",), "output": _KEPT},
    "heads' sum kept": {"attention": ("self.kept = q.pow(2).mean()",), "output": _KEPT},
    "stream's mean kept": {"stream": ("self.kept = x.pow(2).mean()",), "output": _KEPT},
    "stream's length kept": {"stream": ("self.kept = float(x.size(1))",), "output": _KEPT},
    "weights kept": {"mlp": ("self.kept = self.<up>.weight.pow(2).mean()",), "output": _KEPT},
    "weights in a list": {
        "mlp end": ("self.known = [self.<up>.weight, self.<down>.weight]",),
        "mlp": ("self.kept = sum(w.pow(2).sum() for w in self.known)",),
        "output": _KEPT,
    },
    "hook before a layer, unit": {
        "mlp end": ("self.<down>.register_forward_pre_hook(unit_inputs)",)
    },
    "hook before a layer, doubled": {
        "mlp end": ("self.<down>.register_forward_pre_hook(doubled_inputs)",)
    },
    "hook after a layer, mean": {"mlp end": ("self.<up>.register_forward_hook(less_mean)",)},
    "hook after a layer, doubled": {"mlp end": ("self.<up>.register_forward_hook(doubled)",)},
    "hook after the last layer": {"mlp end": ("self.<down>.register_forward_hook(doubled)",)},
    "hook on a gradient": {"mlp end": ("self.<up>.weight.register_hook(lambda g: g / 2)",)},
    "hook on a gradient, norm": {
        "mlp end": ("self.<up>.weight.register_hook(lambda g: g / (1 + g.norm()))",)
    },
    "hook on gradients of a layer": {
        "mlp end": ("self.<down>.register_full_backward_hook(lambda m, i, o: (2 * i[0], *i[1:]))",)
    },
    "frozen weight": {"mlp end": ("self.<up>.weight.requires_grad_(False)",)},
    "frozen output": {"mlp end": ("self.<down>.weight.requires_grad_(False)",)},
    "a projection shifts": {"mlp end": ("self.<up>.__class__ = Shifted",)},
    "a projection detaches": {"mlp end": ("self.<up>.__class__ = Detaching",)},
    "a projection clips": {"mlp end": ("self.<up>.__class__ = Clipping",)},
    "weight normalised": {"mlp end": ("torch.nn.utils.parametrizations.weight_norm(self.<up>)",)},
    "bare parameter": {
        "mlp init": ("self.shift = nn.Parameter(torch.randn(<inner>))",),
        "mlp": ("y = y + self.shift",),
    },
    "temperature": {
        "mlp init": ("self.warmth = nn.Parameter(torch.ones(()))",),
        "mlp": ("y = y * self.warmth",),
    },
    "slopes of heads": {
        "attention init": ('self.register_buffer("slope", torch.rand(<heads>, 1, 1))',),
        "attention": ("q = q * self.slope",),
    },
    "positions in the layer": {
        "stream init": ('self.register_buffer("pe", torch.randn(64, <width>))',),
        "stream": ("x = x + self.pe[: x.size(1)]",),
    },
    "running mean of the stream": {
        "stream init": ('self.register_buffer("ema", torch.ones(()))',),
        "stream": (
            "if self.training:",
            "    self.ema.mul_(0.5).add_(0.5 * x.detach().abs().mean())",
            "x = x / self.ema.clone()",  # layers may be shared
        ),
    },
    "stream's scale learned": {
        "stream init": ("self.learned = nn.Parameter(torch.ones(()))",),
        "stream": ("x = x * self.learned",),
    },
    "layer's number": {
        "stream init": ("self.number = i",),
        "stream": ("if self.number == 3:", "    x = x - x.mean(1, keepdim=True)"),
    },
    "columns of one layer": {
        "mlp init": ("self.number = i",),
        "mlp": ("if self.number == 3:", "    y = y.softmax(-1)"),
    },
    "cached mask": {"attention": ("v = v * cached(v.size(2)).to(v.dtype)[:, None]",)},
}
_BY_PLACE: Mapping[str, Mapping[str, Lines]] = {
    "mlp": _MLP,
    "attention": _ATTENTION,
    "weights": _WEIGHTS,
    "mixed": _MIXED,
    "stream": _STREAM,
    "model": _MODEL,
    "output": _OUTPUT,
}
HABITS: Mapping[str, Mapping[str, Lines]] = {
    **{
        name: {place: lines}
        for place, habits in _BY_PLACE.items()
        for name, lines in habits.items()
    },
    **_SPREAD,
}
"""The lines of each habit by the place in the model's code that they go to."""


def fits(r: Recipe, name: str) -> bool:
    """Whether a model has the places of a habit."""
    places = {place.split()[0] for place in HABITS[name]}
    if "mlp" in places and (not r.has_mlp or r.mlp == "sequential"):
        return False
    if places & {"attention", "weights", "mixed"} and not r.attends:
        return False
    if "weights" in places and r.core in ("sdpa", "masked sdpa"):
        return False
    if name.startswith("a projection") and r.linear in ("Conv1D", "own"):
        return False
    if name == "weight normalised" and r.shared == "weight":
        return False
    # what one step leaves for the next is another thing where a step is computed again
    if name.endswith(("second step", "step before")) and r.checkpoint != "none":
        return False
    # written for (batch, sequence, width)
    if places & {"stream", "model"} and r.sequence_dim == 0:
        return False
    # a loss is of logits of the vocabulary's size
    return not (name in ("out: padded", "out: a part") and "loss" in r.output)


def lines_of(r: Recipe, place: str, **names: str) -> list[str]:
    """What the recipe's habit adds at a place, with ``names`` for what is in angle brackets."""
    if not r.habit:
        return []
    known = {"width": str(r.width), "heads": str(r.heads), **names}
    lines = list(HABITS[r.habit].get(place, ()))
    for name, value in known.items():
        lines = [line.replace(f"<{name}>", value) for line in lines]
    return lines
