"""Dropout: masks agree where ranks hold the whole, are independent where each has a part.

The masks that the ranks drew are read off and put together; an unsharded model that is given them
must compute the same loss and the same gradients. What is left to check is the masks themselves.
"""

from __future__ import annotations

import contextlib
import math
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from tests.compare import (
    Errors,
    Findings,
    beyond,
    compare_gradients,
    error,
    full,
    gradient_errors,
    local,
    same,
)
from tests.models import sharded, token_ids
from tests.ranks import Ranks
from tests.rewrite import MODES, SIZES
from tests.rewrite.dropout import (
    BARE,
    FUNCTIONAL,
    FUSED,
    MODELS,
    Masks,
    OneLineBlock,
    P,
    Tokens,
    equal,
    functional,
    gathered,
    gpt,
    llama,
    masks_errors,
    objective,
    run,
)

_dropout = F.dropout


def as_torch(function: types.FunctionType) -> Any:
    """A function that stands for one of torch's: no place in a model's own code."""
    known = {**function.__globals__, "__name__": "torch.nn.functional"}
    return types.FunctionType(
        function.__code__, known, None, function.__defaults__, function.__closure__
    )


@contextlib.contextmanager
def reading(masks: Masks) -> Iterator[None]:
    """Keep every mask that is drawn."""

    @as_torch
    def draw(x: torch.Tensor, p: float = 0.5, training: bool = True, _: bool = False) -> Any:
        if p == 0 or not training:
            return x
        mask = _dropout(torch.ones_like(x), p, training)
        masks.append(local(mask))
        return x * mask

    with mock.patch.object(F, "dropout", draw):
        yield


@contextlib.contextmanager
def given(parts: list[Masks], found: Findings, together: list[tuple[str, Masks]]) -> Iterator[None]:
    """Use the masks that the ranks drew, put together; ``together`` gets each and what it is."""
    drawn = iter(zip(*parts, strict=True))

    def use(x: torch.Tensor, p: float = 0.5, training: bool = True, _: bool = False) -> Any:
        if p == 0 or not training:
            return x
        pieces = list(next(drawn))
        if pieces[0].shape == x.shape:
            together.append(("whole", pieces))
            return x * pieces[0]
        dim = next(i for i, n in enumerate(pieces[0].shape) if n != x.size(i))
        kind = "heads" if x.dim() == 4 else "rows" if dim == 1 else "columns"
        together.append((kind, pieces))
        return x * torch.cat(pieces, dim).narrow(dim, 0, x.size(dim))

    with mock.patch.object(F, "dropout", use):
        yield
    found.add("every mask was used", same(next(drawn, None) is None))


def parity_job(mesh: DeviceMesh, sp: bool, name: str) -> Errors:
    """The ranks' masks put together in an unsharded model: the same loss, the same gradients."""
    found = Findings()
    make, plan = {**MODELS, **BARE}[name]
    reference = make()
    model = sharded(reference, mesh, sp, plan)
    kinds = {"heads"} | (set() if name == "Llama" else {"rows" if sp else "whole"})
    kinds |= {"columns"} if "both" in name else set()
    for length in (16, 13):
        errors = together_errors(reference, model, mesh, token_ids(8, length, 5), kinds)
        found.add(f"length {length}", errors)
    return found.errors


def together_errors(
    reference: nn.Module, model: nn.Module, mesh: DeviceMesh, ids: torch.Tensor, kinds: set[str]
) -> Errors:
    """The errors of one step, and of its masks."""
    found = Findings()
    model.zero_grad()
    reference.zero_grad()
    mine: Masks = []
    torch.manual_seed(6)
    with reading(mine):
        ours = objective(model, ids)
    ours.backward()
    together: list[tuple[str, Masks]] = []
    with given(gathered(mine, mesh), found, together):
        theirs = objective(reference, ids)
    theirs.backward()
    found.add("loss", error(theirs, ours))
    found.add("", compare_gradients(reference, model))
    drawn = {kind for kind, _ in together}
    found.add(f"kinds of masks {drawn}", same(drawn == kinds))
    for i, (kind, pieces) in enumerate(together):
        found.add(f"{kind} {i}", masks_errors(kind, pieces))
    flat = [torch.cat([p.flatten() for p in pieces]) for _, pieces in together]
    found.add("no mask twice", same(all_differ(flat)))
    kept = torch.cat([(m != 0).double() for m in flat])
    z = (kept.mean() - (1 - P)).item() / math.sqrt(P * (1 - P) / kept.numel())
    found.add(f"kept {kept.mean()} of {kept.numel()}, z {z}", same(abs(z) < 4))
    found.add("enough", same(kept.numel() > 5000))
    return found.errors


def fused_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """The masks that scaled_dot_product_attention draws by itself."""
    found = Findings()
    model = sharded(llama("sdpa"), mesh, sp)
    attend = F.scaled_dot_product_attention
    mine: Masks = []

    def read(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        # equal scores, and the identity for values: what comes out is the mask
        shape = (*q.shape[:3], q.size(2))
        one = torch.eye(q.size(2)).expand(shape)
        mine.append(attend(q * 0, q * 0, one, dropout_p=options["dropout_p"]).detach())
        return attend(q, k, v, **options)

    with mock.patch.object(F, "scaled_dot_product_attention", read):
        objective(model, token_ids(8, 16, 15))
    everybody = gathered(mine, mesh)
    for i, pieces in enumerate(zip(*everybody, strict=True)):
        found.add(f"layer {i}", masks_errors("heads", list(pieces)))
        kept = torch.cat(pieces) != 0
        z = (kept.double().mean() - (1 - P)).item() / math.sqrt(P * (1 - P) / kept.numel())
        found.add(f"layer {i}: kept of {kept.numel()}, z {z}", same(abs(z) < 4))
    found.add("layers", same(len(mine) == 2))
    return found.errors


def group_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Data-parallel ranks may be seeded apart; those of one tp group stay together."""
    found = Findings()
    tp = mesh["tp"]
    torch.manual_seed(20 + mesh["dp"].get_local_rank())
    model = tpplan.parallelize(gpt(), "gpt", mesh, sequence_parallel=sp, prove=False)
    ids = token_ids(2, 13, 16)
    losses = gathered(objective(model, ids).item(), tp)
    found.add("within a group", same(len(set(losses)) == 1))
    losses = gathered(losses[0], mesh["dp"])
    found.add("across groups", same(len(set(losses)) == 2))
    return found.errors


def all_differ(tensors: Masks) -> bool:
    return not any(
        a.shape == b.shape and torch.equal(a, b) for i, a in enumerate(tensors) for b in tensors[:i]
    )


def seeds_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """The same seed draws the same, another one something else; the ranks stay in step."""
    found = Findings()
    for name, (make, plan) in {**MODELS, **BARE, **FUSED}.items():
        model = sharded(make(), mesh, sp, plan)
        ids = token_ids(2, 13, 7)
        loss, grads = run(model, ids, 8)
        state = torch.get_rng_state()
        again, grads_again = run(model, ids, 8)
        other, _ = run(model, ids, 9)
        found.add(
            f"{name}: same seed", same(torch.equal(loss, again) and equal(grads, grads_again))
        )
        found.add(f"{name}: other seed", same(not torch.equal(loss, other)))
        states = gathered(state, mesh)
        found.add(f"{name}: in step", same(all(torch.equal(s, state) for s in states)))
        losses = gathered(loss, mesh)
        found.add(f"{name}: one loss", same(all(torch.equal(x, loss) for x in losses)))
        model.eval()
        with torch.no_grad():
            found.add(f"{name}: eval", error(objective(make().eval(), ids), objective(model, ids)))
    return found.errors


def checkpointing_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Recomputed masks are those of the forward: gradients are those without recomputation."""
    found = Findings()
    for name, (make, plan) in {**MODELS, **FUSED}.items():
        model = sharded(make(), mesh, sp, plan)
        ids = token_ids(2, 13, 10)
        loss, grads = run(model, ids, 11)
        for reentrant in (False, True):
            if hasattr(model, "gradient_checkpointing_enable"):
                how = {"use_reentrant": reentrant}
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
            else:
                model.reentrant = reentrant
            title = f"{name}, reentrant={reentrant}"
            with found.case(title):
                again, grads_again = run(model, ids, 11)
            found.add(f"{title}: loss", same(torch.equal(loss, again)))
            found.add(title, {n: e / 10 for n, e in gradient_errors(grads, grads_again).items()})
    return found.errors


def training_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """After some steps every replicated parameter is bitwise the same on all ranks."""
    found = Findings()
    for name, (make, plan) in MODELS.items():
        model = sharded(make(), mesh, sp, plan)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for i in range(2):
            objective(model, token_ids(2, 13, i)).backward()
            optimizer.step()
            optimizer.zero_grad()
        whole = {n: local(p) for n, p in model.named_parameters() if p.placements[0].is_replicate()}
        others = gathered(whole, mesh)
        found.add(
            name, {n: same(all(torch.equal(o[n], p) for o in others)) for n, p in whole.items()}
        )
    return found.errors


def tokens_job(mesh: DeviceMesh, function: bool) -> Errors:
    """Equal rows, as tokens without their batch, of which every rank has other ones."""
    torch.manual_seed(0)
    model = Tokens(function).train()
    rules = {"layers.*.fc": "colwise", "layers.*.out": "rowwise"}
    x = torch.randn(2, 8, 16)
    tpplan.parallelize(model, {"tpplan": 1, "rules": rules}, mesh=mesh, inputs=x)
    torch.manual_seed(1)
    rows = full(model(torch.ones_like(x)).detach()).unbind(1)
    return {"no mask twice": same(all_differ([*rows]))}


@SIZES
@pytest.mark.parametrize("function", [False, True], ids=["module", "function"])
def test_masks_of_tokens_without_their_batch(ranks: Ranks, tp: int, function: bool) -> None:
    assert beyond(ranks.run(tp, tokens_job, function)) == {}


@SIZES
@MODES
@pytest.mark.parametrize("name", [*MODELS, *BARE])
@pytest.mark.turns(48)
def test_masks_put_together_make_an_unsharded_run(
    ranks: Ranks, tp: int, sp: bool, name: str
) -> None:
    assert beyond(ranks.run(tp, parity_job, sp, name)) == {}


@SIZES
@MODES
def test_masks_inside_fused_attention(ranks: Ranks, tp: int, sp: bool) -> None:
    assert beyond(ranks.run(tp, fused_job, sp)) == {}


@MODES
def test_groups_may_be_seeded_apart(ranks: Ranks, sp: bool) -> None:
    assert beyond(ranks.run("2x2", group_job, sp)) == {}


@MODES
def test_one_seed_reproduces_everything(ranks: Ranks, sp: bool) -> None:
    assert beyond(ranks.run(2, seeds_job, sp)) == {}


@SIZES
@MODES
def test_recomputation_draws_the_same_masks(ranks: Ranks, tp: int, sp: bool) -> None:
    assert beyond(ranks.run(tp, checkpointing_job, sp), 1e-7) == {}


@MODES
def test_training_leaves_the_ranks_equal(ranks: Ranks, sp: bool) -> None:
    assert beyond(ranks.run(4, training_job, sp)) == {}


@pytest.mark.turns(4)
@MODES
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", ["functional, for both", "BART, for both"])
def test_modules_that_draw_for_both_are_proved(name: str, train: bool, sp: bool) -> None:
    make, plan = MODELS[name]
    tpplan.check(make().train(train), plan, 2, sp)


def test_a_place_that_draws_for_both_is_refused_at_compile_time() -> None:
    model = functional(P, block=OneLineBlock)
    with pytest.raises(tpplan.PlanError, match=r"layers\.0: it draws dropout masks both"):
        tpplan.check(model, FUNCTIONAL, 2, False)
    tpplan.check(model, FUNCTIONAL, 2, True)  # where rows are a rank's own as well
