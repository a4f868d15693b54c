"""Dropout: masks agree where ranks hold the whole, are independent where each has a part.

The masks that the ranks drew are read off and put together; an unsharded model that is given them
must compute the same loss and the same gradients. What is left to check is the masks themselves.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import tpplan
from tests.compare import (
    Errors,
    Findings,
    beyond,
    compare_gradients,
    error,
    full,
    gradient_errors,
    gradients,
    local,
    same,
)
from tests.gpt import GPT
from tests.models import VOCAB, hf, randomize, sharded, token_ids
from tests.ranks import Ranks
from tests.rewrite import MODES, SIZES
from tpplan.comm import Group
from tpplan.rewrite.draws import part_of_dropout

P = 0.2
Masks = list[torch.Tensor]


class FunctionalBlock(nn.Module):
    """A post-norm layer that drops out with functions, in its own forward, as BART's do."""

    def __init__(self, width: int, activation: float) -> None:
        super().__init__()
        self.activation = activation
        self.attn = FunctionalAttention(width)
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.fc, self.proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(self.attn(x), P, self.training)
        x = self.ln1(x + y)
        y = F.dropout(self.fc(x).relu(), self.activation, self.training)
        return self.ln2(x + F.dropout(self.proj(y), P, self.training))


class FunctionalAttention(nn.Module):
    """Drops attention weights out with a function, and its output with a module."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.resid = nn.Dropout(P)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, 8)).transpose(1, 2) for p in (self.q, self.k, self.v))
        weights = F.dropout((q @ k.transpose(2, 3)).softmax(-1), P, self.training)
        return self.resid(self.out((weights @ v).transpose(1, 2).flatten(2)))


class Functional(nn.Module):
    """Drops the embeddings out with a function in the model's own forward."""

    def __init__(self, width: int = 64, activation: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(FunctionalBlock(width, activation) for _ in range(2))
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.reentrant: bool | None = None

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.embed(input_ids), P, self.training)
        for layer in self.layers:
            x = through(layer, x, self.reentrant)
        return self.head(x)


FUNCTIONAL: dict[str, Any] = {
    "tpplan": 1,
    "rules": {
        "embed": "vocab",
        "layers.*.attn.{q,k,v}": "colwise",
        "layers.*.attn.out": "rowwise",
        "layers.*.{ln1,ln2}": "sequence_parallel",
        "layers.*.fc": "colwise",
        "layers.*.proj": "rowwise",
        "head": "vocab",
    },
}


class CheckpointedGPT(GPT):
    """Recomputes its blocks, where asked to."""

    reentrant: bool | None = None

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(idx.size(1), device=idx.device)
        x = self.drop(self.tok_emb(idx) + self.pos_emb(positions))
        for block in self.blocks:
            x = through(block, x, self.reentrant)
        return self.head(self.ln_f(x))


def through(layer: nn.Module, x: torch.Tensor, reentrant: bool | None) -> torch.Tensor:
    return layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant)


class Llama(nn.Module):
    """Logits of a Llama with dropout on its attention weights, and nothing else."""

    def __new__(cls, implementation: str = "eager") -> Any:
        return hf("Llama", attention_dropout=P, attn_implementation=implementation)


def gpt(p: float = P) -> CheckpointedGPT:
    model = CheckpointedGPT(vocabulary=VOCAB, dropout=p).train()
    randomize(model, 3)
    return model


def functional(activation: float = 0.0) -> Functional:
    model = Functional(activation=activation).train()
    randomize(model, 4)
    return model


# without the rules for dropout modules: nothing needs to be said about them
BARE_GPT: dict[str, Any] = {
    "tpplan": 1,
    "extends": "gpt.yaml",
    "rules": {"drop": "remove", "blocks.*.drop": "remove"},
}
MODELS: dict[str, tuple[Callable[[], Any], Any]] = {
    "GPT": (gpt, "gpt"),
    "GPT, no rules for dropout": (gpt, BARE_GPT),
    "functional": (functional, FUNCTIONAL),
    "Llama": (Llama, "llama.yaml"),
}


def objective(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids)
    logits = getattr(logits, "logits", logits)
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


_dropout = F.dropout


@contextlib.contextmanager
def reading(masks: Masks) -> Iterator[None]:
    """Keep every mask that is drawn."""

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
        together.append(("rows" if x.dim() == 3 else "heads", pieces))
        return x * torch.cat(pieces, dim).narrow(dim, 0, x.size(dim))

    with mock.patch.object(F, "dropout", use):
        yield
    found.add("every mask was used", same(next(drawn, None) is None))


def gathered(value: Any, mesh: DeviceMesh) -> list[Any]:
    """What each rank has."""
    everybody: list[Any] = [None] * mesh.size()
    dist.all_gather_object(everybody, value, group=mesh.get_group())
    return everybody


def parity_job(mesh: DeviceMesh, sp: bool, name: str, length: int) -> Errors:
    """The ranks' masks put together in an unsharded model: the same loss, the same gradients."""
    found = Findings()
    make, plan = MODELS[name]
    reference = make()
    model = sharded(reference, mesh, sp, plan)
    ids = token_ids(8, length, 5)
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
    kinds = {kind for kind, _ in together}
    expected = {"heads"} | (set() if name == "Llama" else {"rows" if sp else "whole"})
    found.add(f"kinds of masks {kinds}", same(kinds == expected))
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
    model = sharded(Llama("sdpa"), mesh, sp)
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
    model = tpplan.parallelize(gpt(), "gpt", mesh, sequence_parallel=sp)
    ids = token_ids(2, 13, 16)
    losses = gathered(objective(model, ids).item(), tp)
    found.add("within a group", same(len(set(losses)) == 1))
    losses = gathered(losses[0], mesh["dp"])
    found.add("across groups", same(len(set(losses)) == 2))
    return found.errors


def masks_errors(kind: str, pieces: Masks) -> Errors:
    if kind == "whole":
        return {"agree": same(all(torch.equal(p, pieces[0]) for p in pieces))}
    fewest = min(p.numel() for p in pieces)  # the last rows of a DTensor are not padded
    shares = [(p != 0).double().flatten()[:fewest] for p in pieces]
    worst = 0.0
    for i, a in enumerate(shares):
        for b in shares[:i]:
            correlation = ((a - a.mean()) * (b - b.mean())).mean() / (a.std() * b.std())
            worst = max(worst, abs(correlation.item()) * math.sqrt(a.numel()))
    return {f"independent, z {worst}": same(worst < 4.5)}


def all_differ(tensors: Masks) -> bool:
    return not any(
        a.shape == b.shape and torch.equal(a, b) for i, a in enumerate(tensors) for b in tensors[:i]
    )


def run(model: Any, ids: torch.Tensor, seed: int) -> tuple[torch.Tensor, dict[str, Any]]:
    """Loss and gradients from a seed."""
    model.zero_grad()
    torch.manual_seed(seed)
    loss = objective(model, ids)
    loss.backward()
    return loss.detach(), {n: full(g) for n, g in gradients(model).items() if g is not None}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a.keys() | b.keys())


def seeds_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """The same seed draws the same, another one something else; the ranks stay in step."""
    found = Findings()
    models = {**MODELS, "Llama, sdpa": (lambda: Llama("sdpa"), "llama.yaml")}
    for name, (make, plan) in models.items():
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
    models = {**MODELS, "Llama, sdpa": (lambda: Llama("sdpa"), "llama.yaml")}
    for name, (make, plan) in models.items():
        model = sharded(make(), mesh, sp, plan)
        ids = token_ids(2, 13, 10)
        loss, grads = run(model, ids, 11)
        for reentrant in (False, True):
            if name.startswith("Llama"):
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
        for i in range(3):
            objective(model, token_ids(2, 13, i)).backward()
            optimizer.step()
            optimizer.zero_grad()
        whole = {n: local(p) for n, p in model.named_parameters() if p.placements[0].is_replicate()}
        others = gathered(whole, mesh)
        found.add(
            name, {n: same(all(torch.equal(o[n], p) for o in others)) for n, p in whole.items()}
        )
    return found.errors


def message_of(mesh: DeviceMesh, job: Callable[..., Any], *args: Any) -> str:
    """What a job that fails alike on every rank says."""
    try:
        job(mesh, *args)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def apart_job(mesh: DeviceMesh, sp: bool) -> None:
    model = sharded(gpt(), mesh, sp, "gpt")
    torch.manual_seed(mesh.get_local_rank())
    model.eval()
    model(token_ids(2, 8, 0))  # harmless, and the only batch that would have been compared
    model.train()
    model(token_ids(2, 8, 0))


def both_job(mesh: DeviceMesh, sp: bool) -> float:
    model = sharded(functional(activation=P), mesh, sp, FUNCTIONAL)
    objective(model.eval(), token_ids(2, 8, 0))
    loss = objective(model.train(), token_ids(2, 8, 0))
    loss.backward()
    return loss.item()


class Recomputing(FunctionalAttention):
    """Recomputes the end of its forward by itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, 8)).transpose(1, 2) for p in (self.q, self.k, self.v))
        weights = F.dropout((q @ k.transpose(2, 3)).softmax(-1), P, self.training)
        y = (weights @ v).transpose(1, 2).flatten(2)
        return checkpoint(lambda y: self.resid(self.out(y)), y, use_reentrant=False)


def within_job(mesh: DeviceMesh, sp: bool) -> float:
    model = Functional()
    for layer in model.layers:
        layer.attn = Recomputing(64)
    randomize(model, 5)
    model = sharded(model.train(), mesh, sp, FUNCTIONAL)
    loss = objective(model, token_ids(2, 8, 0))
    loss.backward()
    return loss.item()


def compiled_job(mesh: DeviceMesh, sp: bool, fullgraph: bool, name: str) -> Errors:
    """Dropout modules compile into one graph; their masks are as good as in eager mode."""
    found = Findings()
    make, plan = MODELS[name]
    model = sharded(make(), mesh, sp, plan)
    torch._dynamo.reset()
    whole = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
    ids = token_ids(4, 16, 12)
    loss, grads = run(whole, ids, 13)
    again, grads_again = run(whole, ids, 13)
    found.add("same seed", same(torch.equal(loss, again) and equal(grads, grads_again)))
    found.add("other seed", same(not torch.equal(loss, run(whole, ids, 14)[0])))
    found.add("one loss", same(all(torch.equal(x, loss) for x in gathered(loss, mesh))))
    found.add(
        "one state", same(len({*map(tuple, gathered(torch.get_rng_state().tolist(), mesh))}) == 1)
    )
    off = make()
    for module in off.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    found.add("drops out", same(not torch.allclose(objective(off, ids), loss)))
    return found.errors


def part_job(mesh: DeviceMesh) -> Errors:
    """The parts that compiled graphs draw: independent, and kept with the right probability."""
    found = Findings()
    group = Group.of(mesh)
    mask = torch.compile(part_of_dropout, backend="aot_eager", fullgraph=True)(
        torch.ones(50, 40, dtype=torch.bfloat16), P, group
    )
    pieces = gathered(mask, mesh)
    found.add("parts", masks_errors("rows", pieces))
    kept = torch.cat(pieces)
    found.add("scale", same(set(kept.unique().tolist()) == {0.0, 1.25}))
    z = ((kept != 0).double().mean() - (1 - P)).item() / math.sqrt(P * (1 - P) / kept.numel())
    found.add(f"kept, z {z}", same(abs(z) < 4))
    found.add("p=1", part_of_dropout(torch.ones(3), 1.0, group).abs().max().item())
    return found.errors


@SIZES
@MODES
@pytest.mark.parametrize("name", list(MODELS))
def test_masks_put_together_make_an_unsharded_run(
    ranks: Ranks, tp: int, sp: bool, name: str
) -> None:
    for length in (16, 13):
        assert beyond(ranks.run(tp, parity_job, sp, name, length)) == {}


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


@MODES
def test_ranks_of_different_seeds_are_refused(ranks: Ranks, sp: bool) -> None:
    for message in ranks.run(2, message_of, apart_job, sp):
        assert re.search(r"random state of rank 1 .* same torch\.manual_seed", message)


def test_masks_that_do_not_fit_one_module_are_refused(ranks: Ranks) -> None:
    for message in ranks.run(2, message_of, both_job, False):
        assert message.startswith("layers.0: it draws dropout masks both for what is sharded")
    losses = ranks.run(2, both_job, True)  # where rows are a rank's own as well
    assert losses[0] == losses[1]


def test_recomputation_from_within_another_sequence_is_refused(ranks: Ranks) -> None:
    for message in ranks.run(2, message_of, within_job, False):
        assert "attn.resid: activation checkpointing recomputes it" in message


@MODES
def test_dropout_modules_compile_into_one_graph(ranks: Ranks, sp: bool) -> None:
    assert beyond(ranks.run(2, compiled_job, sp, True, "GPT")) == {}


@SIZES
def test_parts_drawn_by_compiled_graphs(ranks: Ranks, tp: int) -> None:
    assert beyond(ranks.run(tp, part_job)) == {}


def test_dropout_inside_a_forward_breaks_the_graph(ranks: Ranks) -> None:
    for message in ranks.run(2, message_of, compiled_job, False, True, "Llama"):
        assert re.search(r"self_attn: dropout .* compiles in an nn\.Dropout only", message)
    assert beyond(ranks.run(2, compiled_job, False, False, "Llama")) == {}
