"""Partial sums that nobody else has are summed over the ranks in their own memory."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.compare import Errors, beyond, same, step
from tests.models import hf, recomputed, sharded, token_ids
from tests.ranks import Ranks
from tpplan.comm import conjugates, reduce_out
from tpplan.comm.collectives import Group, Site
from tpplan.comm.conjugates import Transition
from tpplan.simulate import Recorder


class Functions(TorchFunctionMode):
    """Sees every function, and changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Ops(TorchDispatchMode):
    """Sees every op, and changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


MADE: dict[str, tuple[bool, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "matrix": (True, lambda x, w: F.linear(x[0], w)),
    "product": (True, F.linear),
    "no gradient": (True, lambda x, w: F.linear(x, w).detach()),
    "view": (False, lambda x, w: F.linear(x, w)[:1]),
    "across": (False, lambda x, w: F.linear(x, w).transpose(0, 1).contiguous().transpose(0, 1)),
}
SEEN: dict[str, tuple[bool, Callable[[], Any]]] = {
    "nobody": (True, contextlib.nullcontext),
    "recorder": (True, Recorder),
    "functions": (False, Functions),
    "ops": (False, Ops),
    "counted": (False, CommDebugMode),
}


def held(mesh: DeviceMesh, made: str, seen: str) -> tuple[bool, Errors]:
    """Whether the sum lies where the partial sums did; errors of it and of its gradients."""
    group = Group.of(mesh)
    transition = Transition(group, Site("a", "forward"), Site("a", "backward"))
    tp, rank = mesh.size(), group.rank
    generator = torch.Generator().manual_seed(1)
    x, w = (torch.randn(n, 3, 4, generator=generator, dtype=torch.float64) for n in (2 * tp, tp))
    xs, ws = x.view(tp, 2, 3, 4), w
    mine, own = xs[rank].clone().requires_grad_(), ws[rank].clone().requires_grad_()
    alone = own.detach().clone().requires_grad_()
    make = MADE[made][1]
    expected = make(mine.detach(), alone)
    others = [make(xs[r], ws[r]) for r in range(tp) if r != rank]
    expected = expected + torch.stack(others).sum(0)
    with SEEN[seen][1]():
        partial = make(mine, own)
        kept, at = partial.detach().clone(), partial.data_ptr()
        out = reduce_out(partial, transition, owned=True)
    errors = {"sum": (out - expected).abs().max().item()}
    in_place = out.data_ptr() == at
    errors["partial"] = same(in_place or torch.equal(partial, kept))
    if not out.requires_grad:
        return in_place, errors
    (want,) = torch.autograd.grad(expected.sin().sum(), alone, create_graph=True)
    (got,) = torch.autograd.grad(out.sin().sum(), own, create_graph=True)
    errors["gradient"] = (want - got).abs().max().item()
    # of all ranks' gradients: each of them hangs on the sum, whose parts all ranks have
    (got,) = torch.autograd.grad(got.sum(), own)
    whole = [ws[r].clone().requires_grad_() for r in range(tp)]
    total = torch.stack([make(xs[r], whole[r]) for r in range(tp)]).sum(0)
    firsts = torch.autograd.grad(total.sin().sum(), whole, create_graph=True)
    want = torch.autograd.grad(torch.stack(firsts).sum(), whole)[rank]
    errors["of the gradient"] = (want - got).abs().max().item()
    return in_place, errors


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.turns(4)
def test_where_the_sum_lies(ranks: Ranks, tp: int, made: str, seen: str) -> None:
    found = ranks.run(tp, held, made, seen)
    assert [in_place for in_place, _ in found] == [MADE[made][0] and SEEN[seen][0]] * tp
    assert beyond([errors for _, errors in found], 1e-12) == {}


def life(mesh: DeviceMesh, event: str) -> tuple[Counter[bool], Errors]:
    """How often sums lie in place, and the errors of a step, twice."""
    reference = hf(use_cache=False)
    model = sharded(hf(use_cache=False), mesh, sp=False)
    if event in ("checkpoint", "selective"):
        recomputed(model, event == "selective")
    if event == "projection":
        for layer in model.model.layers:
            down = layer.mlp.down_proj
            made = {"last": torch.empty(0)}

            def kept(x: Any, weight: Any, bias: Any = None, made: Any = made) -> torch.Tensor:
                made["last"] = F.linear(x, weight, bias)
                return made["last"]

            down._tpplan_project = kept
    counts, plain = Counter[bool](), conjugates.may_hold_sum

    def counted(x: torch.Tensor) -> bool:
        counts[plain(x)] += 1
        return plain(x)

    errors: Errors = {}
    with patch.object(conjugates, "may_hold_sum", counted):
        for seed in (1, 2):
            ids = token_ids(2, 9, seed)

            def outputs(m: Any, ids: torch.Tensor = ids) -> dict[str, torch.Tensor]:
                out = m(ids, labels=ids)
                return {"objective": out.loss, "loss": out.loss, "logits": out.logits}

            found = step(reference, model, outputs, plain=False)
            errors |= {f"{name} {seed}": e for name, e in found.items()}
    return counts, errors


# two of each of two layers, in two steps; a layer's last is not computed again
LIVES = {
    "plain": {True: 2 * 2 * 2},
    "checkpoint": {True: 2 * 2 * (2 + 1)},
    "selective": {False: 2 * 2 * (2 + 1)},
    "projection": {True: 2 * 2},
}


@pytest.mark.parametrize("event", LIVES)
def test_life(ranks: Ranks, event: str) -> None:
    for counts, errors in ranks.run(2, life, event):
        assert counts == LIVES[event]
        assert beyond([errors]) == {}
