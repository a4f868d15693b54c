"""Dropout in compiled graphs; and what cannot be right with dropout is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from tests.compare import Errors, Findings, beyond, same
from tests.models import randomize, sharded, token_ids
from tests.ranks import Ranks
from tests.rewrite import MODES, SIZES
from tests.rewrite.dropout import (
    FUNCTIONAL,
    Functional,
    FunctionalAttention,
    FunctionalBlock,
    OneLineBlock,
    P,
    equal,
    functional,
    gathered,
    gpt,
    masks_errors,
    objective,
    run,
)
from tpplan.comm import Group
from tpplan.roles.draws import kept, part_of_dropout

# --- jobs


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
    model = sharded(functional(activation=P, block=OneLineBlock), mesh, sp, FUNCTIONAL)
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


class BrokenBlock(FunctionalBlock):
    """Drops out in a function of its own, with breaks in the graph before and after."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.ln1(x + self.dropped(self.attn(x), P))
        torch._dynamo.graph_break()
        y = self.proj(self.dropped(self.fc(x).relu(), self.activation))
        return self.ln2(x + self.dropped(y, P))

    def dropped(self, x: torch.Tensor, p: float) -> torch.Tensor:
        torch._dynamo.graph_break()
        return F.dropout(x, p, self.training)


# of one layer: compiling takes long
COMPILED: dict[str, tuple[Callable[[], Any], Any]] = {
    "GPT": (lambda: gpt(layers=1), "gpt"),
    "functional": (lambda: functional(layers=1), FUNCTIONAL),
    "functional, for both": (lambda: functional(P, layers=1), FUNCTIONAL),
    "broken, for both": (lambda: functional(P, layers=1, block=BrokenBlock), FUNCTIONAL),
}


def compiled_job(mesh: DeviceMesh, sp: bool, name: str, fullgraph: bool, warm: bool) -> Errors:
    """Dropout modules compile into one graph; their masks are as good as in eager mode."""
    found = Findings()
    make, plan = COMPILED[name]
    model = sharded(make(), mesh, sp, plan)
    ids = token_ids(4, 16, 12)
    if warm:
        model(ids)
    torch._dynamo.reset()
    whole = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
    loss, grads = run(whole, ids, 13)
    again, grads_again = run(whole, ids, 13)
    found.add("same seed", same(torch.equal(loss, again) and equal(grads, grads_again)))
    found.add("as in eager mode", same(fullgraph or torch.equal(loss, run(model, ids, 13)[0])))
    found.add("other seed", same(not torch.equal(loss, run(whole, ids, 14)[0])))
    found.add("one loss", same(all(torch.equal(x, loss) for x in gathered(loss, mesh))))
    found.add(
        "one state", same(len({*map(tuple, gathered(torch.get_rng_state().tolist(), mesh))}) == 1)
    )
    found.add("drops out", same(not torch.allclose(objective(make().eval(), ids), loss)))
    return found.errors


def part_job(mesh: DeviceMesh) -> Errors:
    """The parts that compiled graphs draw: independent, and kept with the right probability."""
    found = Findings()
    group = Group.of(mesh)
    x = torch.ones(50, 40, dtype=torch.bfloat16, requires_grad=True)
    mask = torch.compile(part_of_dropout, backend="aot_eager", fullgraph=True)(x, P, group)
    (grad,) = torch.autograd.grad(mask.sum(), x)
    found.add("backward", same(torch.equal(grad, mask)))
    pieces = gathered(mask, mesh)
    found.add("parts", masks_errors("rows", pieces))
    whole = torch.cat(pieces)
    found.add("scale", same(set(whole.unique().tolist()) == {0.0, 1.25}))
    z = ((whole != 0).double().mean() - (1 - P)).item() / math.sqrt(P * (1 - P) / whole.numel())
    found.add(f"kept, z {z}", same(abs(z) < 4))
    found.add("p=1", part_of_dropout(torch.ones(3), 1.0, group).abs().max().item())
    return found.errors


# --- tests


def test_parts_of_compiled_graphs_are_drawn_with_two_numbers() -> None:
    """Nothing is larger than the activations, and what is as large is a kernel's own."""
    group = Group(None, "", 8, 3)
    graph = make_fx(lambda x: part_of_dropout(x, P, group))(torch.ones(3, 5, 7)).graph
    made = [node for node in graph.nodes if node.op == "call_function"]
    drawn = [n for n in made if torch.Tag.nondeterministic_seeded in n.target.tags]
    assert [n.meta["val"].shape for n in drawn] == [(2,)]
    assert max(n.meta["val"].numel() for n in made) == 3 * 5 * 7


@pytest.mark.parametrize("p", [0.01, 0.2, 0.9])
def test_parts_of_compiled_graphs_are_independent(p: float) -> None:
    """Of the ranks, of the next draw, of neighbours; and as many as asked for."""
    x, sure = torch.ones(512, 1024), math.sqrt(p * (1 - p))
    keys = torch.tensor([5, 6], dtype=torch.int32)
    masks = [
        (kept(x, p, keys + n, rank).float() - (1 - p)) / sure for n in (0, 1) for rank in (0, 1)
    ]
    first = masks[0]
    pairs = [(first, other) for other in masks[1:]] + [(masks[1], masks[2])]
    pairs += [(first[:, d:], first[:, :-d]) for d in (1, 2, 32)]
    pairs += [(first[d:], first[:-d]) for d in (1, 2, 32)]
    assert all(abs((a * b).sum().item()) < 5 * math.sqrt(a.numel()) for a, b in pairs)
    assert all(abs(mask.sum().item()) < 5 * math.sqrt(mask.numel()) for mask in masks)


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
@pytest.mark.turns(48)
def test_dropout_modules_compile_into_one_graph(ranks: Ranks, sp: bool) -> None:
    # a first call is compiled twice: what it caches is new to the second
    assert beyond(ranks.run(2, compiled_job, sp, "GPT", True, sp)) == {}


@SIZES
def test_parts_drawn_by_compiled_graphs(ranks: Ranks, tp: int) -> None:
    assert beyond(ranks.run(tp, part_job)) == {}


@pytest.mark.turns(48)
def test_dropout_inside_a_forward_breaks_the_graph(ranks: Ranks) -> None:
    for message in ranks.run(2, message_of, compiled_job, False, "functional", True, False):
        assert re.search(r"layers\.0\.attn: dropout .* compiles in an nn\.Dropout", message)
    assert beyond(ranks.run(2, compiled_job, False, "functional", False, True)) == {}


@pytest.mark.turns(48)
@pytest.mark.parametrize("name", ["functional, for both", "broken, for both"])
def test_modules_that_draw_for_both_run_with_breaks_in_the_graph(ranks: Ranks, name: str) -> None:
    assert beyond(ranks.run(2, compiled_job, False, name, False, True)) == {}
