"""Vocab-parallel cross entropy: kernels against float64, on the shards of several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.kernels import DEVICE, DTYPES, TOLERANCES, beyond, error, random
from tpplan.comm.collectives import Group, Site
from tpplan.comm.cross_entropy import Vocabulary, cross_entropy
from tpplan.compat import fake_world
from tpplan.kernels import launch
from tpplan.kernels.cross_entropy import gradient, statistics

ROWS = 3
# of one rank: a power of two's neighbours, GPT-2's, Llama 3's of eight, longer than one block
WIDTHS = pytest.mark.parametrize("v", [1, 7, 1025, 16032, 50257])
KINDS = pytest.mark.parametrize(
    ("smooth", "weighs"), [(False, False), (True, False), (True, True)],
    ids=["plain", "smooth", "weighted"],
)  # fmt: skip


def targets(*places: int) -> torch.Tensor:
    return torch.tensor(places, device=DEVICE)


def check(
    logits: torch.Tensor, target: torch.Tensor, start: int, smooth: bool, weight: Any = None
) -> dict[str, float]:
    """Errors of both kernels, against float64."""
    assert launch.fused(logits, weight)
    logits = logits.detach()
    found = statistics(logits, target, start, weight, smooth=smooth, fuse=True)
    x = logits.double()
    largest, log_sum = x.amax(1), (x - x.amax(1, keepdim=True)).exp().sum(1).log()
    index = target - start
    here = (index >= 0) & (index < x.size(1))
    onehot = F.one_hot(index.masked_fill(~here, 0), x.size(1)) * here.unsqueeze(1)
    each = torch.ones_like(x[0]) if weight is None else weight.double()
    expected = [largest, log_sum.exp(), (x * onehot).sum(1)]
    expected += [((x - largest.unsqueeze(1)) * each).sum(1)] if smooth else [x.new_empty(0)]
    of = [random(len(x), dtype=torch.float32, seed=n).detach() for n in (5, 6, 7)]
    dx = gradient(
        logits, target, start, weight, largest.float(), log_sum.float(), of[0], of[1],
        of[2] if smooth else None, fuse=True,
    )  # fmt: skip
    a, b, c = (t.double().unsqueeze(1) for t in of)
    down = F.softmax(x, 1) * a + onehot * b + (c * each if smooth else 0)
    names = ("largest", "total", "target", "every")
    results = {n: error(f, e) for n, f, e in zip(names, found, expected, strict=True)}
    return results | {"gradient": error(dx, down) if dx.dtype == logits.dtype else 1.0}


@WIDTHS
@KINDS
@DTYPES
@pytest.mark.turns(12)
def test_values_and_gradients(v: int, smooth: bool, weighs: bool, dtype: torch.dtype) -> None:
    logits = random(ROWS, v, dtype=dtype, seed=v, mean=3.0)
    weight = random(v, dtype=torch.float32, seed=1).detach().abs() if weighs else None
    start = 2 * v
    # the last one here, one on another rank, one that is ignored
    found = check(logits, targets(start + v - 1, start - 1, -1), start, smooth, weight)
    # only what is of the logits' dtype is rounded to it
    gradients = {"gradient": found.pop("gradient")}
    assert not beyond(found, 1e-6) | beyond(gradients, TOLERANCES[dtype])


def test_far_from_zero() -> None:
    for mean in (300.0, -300.0):
        logits = random(ROWS, 20000, dtype=torch.float32, seed=1, mean=mean)
        assert not beyond(check(logits, targets(0, 19999, 5), 0, True), 1e-6)


def test_classes_that_cannot_be() -> None:
    """-inf, which masks of the vocabulary use: of a whole chunk, and of all a rank has."""
    logits = random(3, 20000, dtype=torch.float32, seed=2).detach()
    logits[0, :9000] = -torch.inf
    logits[1, 9000:] = -torch.inf
    logits[2] = -torch.inf
    target = targets(10000, 1, 1)
    mine = statistics(logits, target, 0, smooth=True, fuse=True)
    theirs = statistics(logits, target, 0, smooth=True, fuse=False)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)
    assert mine[1][2] == 0
    assert bool((mine[3] == -torch.inf).all())


def test_any_layout() -> None:
    wide = random(6, 300, dtype=torch.float32, seed=1).detach()
    for view in (wide[::2, 10:200], wide[:3, ::2], wide.t()[:3], wide[:1].expand(3, 300)):
        target = targets(4, 105, 0, -1, 100, 7)[::2]
        assert not beyond(check(view, target, 0, True), 1e-6)


def test_nothing_to_do() -> None:
    for rows, v in ((0, 8), (3, 0)):
        logits = torch.empty(rows, v, device=DEVICE)
        target = torch.zeros(rows, dtype=torch.long, device=DEVICE)
        largest, total, chosen, every = statistics(logits, target, 8, smooth=True, fuse=True)
        assert bool((largest == -torch.inf).all())
        assert not (total.any() or chosen.any() or every.any())
        dx = gradient(
            logits, target, 8, None, largest, total, total, chosen, every, fuse=True
        )  # fmt: skip
        assert dx.shape == logits.shape


@pytest.fixture
def group() -> Iterator[Group]:
    """One rank, whose sums are its own."""
    with fake_world(1) as mesh:
        yield Group.of(mesh)


def loss_of(logits: torch.Tensor, target: torch.Tensor, group: Group, **how: Any) -> torch.Tensor:
    site = Site("", "")
    vocabulary = Vocabulary(logits.size(1), 0, group, site, site, site)
    return cross_entropy(logits, target, vocabulary, **how)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighs", [False, True])
def test_the_loss(group: Group, reduction: str, smoothing: float, weighs: bool) -> None:
    """With and without the kernels, some targets ignored."""
    logits = random(5, 1000, dtype=torch.float32, seed=3)
    weight = random(1000, dtype=torch.float32, seed=4).detach().abs() if weighs else None
    target = targets(1, 7, -100, 999, -100)
    how: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
    wide = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(wide, target, None if weight is None else weight.double(), **how)
    (down,) = torch.autograd.grad(expected.sum(), wide)
    for fuse in (True, False):
        loss = loss_of(logits, target, group, weight=weight, fuse=fuse, **how)
        (grad,) = torch.autograd.grad(loss.sum(), logits)
        assert error(loss, expected) <= 1e-6
        assert error(grad, down) <= 1e-6
        assert not grad[[2, 4]].any()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_gradients_of_gradients(group: Group, smoothing: float) -> None:
    logits = random(3, 4, dtype=torch.float64, seed=3)
    target = targets(1, -100, 3)
    assert torch.autograd.gradgradcheck(
        lambda x: loss_of(x, target, group, label_smoothing=smoothing, fuse=True), logits
    )


def test_shards_meet() -> None:
    """Three ranks' statistics make the loss of whole logits, one rank's all being -inf."""
    whole = random(4, 30, dtype=torch.float32, seed=8).detach()
    whole[0, 10:20] = -torch.inf
    target = targets(3, 15, 29, 10)
    parts = [
        statistics(part, target, 10 * rank, smooth=False, fuse=True)
        for rank, part in enumerate(whole.split(10, 1))
    ]
    own, sums, chosen = (torch.stack([p[n] for p in parts]) for n in range(3))
    largest = own.amax(0)
    log_sum = (sums * (own - largest).exp()).sum(0).log()
    expected = F.cross_entropy(whole.double(), target, reduction="none")
    assert error(log_sum - (chosen.sum(0) - largest), expected) <= 1e-6


@pytest.mark.parametrize("smooth", [False, True])
def test_pytorch_knows_the_ops(smooth: bool) -> None:
    logits = random(3, 8, dtype=torch.bfloat16, seed=1).detach()
    weight = random(8, dtype=torch.float32, seed=2).detach() if smooth else None
    args = (logits, targets(1, 9, -1), 0, weight, smooth)
    torch.library.opcheck(torch.ops.tpplan.cross_entropy_statistics.default, args)
    rows = [random(3, dtype=torch.float32, seed=n).detach() for n in range(5)]
    back = (*args[:4], *rows[:4], rows[4] if smooth else None)
    torch.library.opcheck(torch.ops.tpplan.cross_entropy_gradient.default, back)


def test_one_graph() -> None:
    def run(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        own, total, chosen, _ = statistics(2 * x, target, 0, smooth=False, fuse=True)
        ones = torch.ones_like(own)
        return gradient(2 * x, target, 0, None, own, total.log(), ones, chosen, None, fuse=True)

    x, target = random(4, 64, dtype=torch.float32, seed=1).detach(), targets(1, 2, 70, -1)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, target), run(x, target))
