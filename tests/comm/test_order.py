"""What a process does in an order of its own: that of a set of names, or of addresses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from tests.comm.test_agreement import complaint
from tests.compare import Errors, Findings, beyond, compare_gradients, error, full, same
from tests.models import VOCAB, hf, sharded, token_ids
from tests.ranks import Ranks
from tests.rewrite import MODES

WIDTH = 16
NAMES = ("one", "two", "three")
PLAN = {
    "tpplan": 1,
    "rules": {
        "table": "replicate",
        "layers.*.norm": "sequence_parallel",
        "layers.*.up.*": "colwise",
        "layers.*.down.*": "rowwise",
    },
}


class Layer(nn.Module):
    """Branches, each with weights of its own, of which the second half comes in some order."""

    def __init__(self, made: tuple[str, ...], ups: tuple[str, ...], downs: tuple[str, ...]) -> None:
        super().__init__()
        self.ups, self.downs = ups, downs
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.ModuleDict({name: nn.Linear(WIDTH, 2 * WIDTH) for name in made})
        self.down = nn.ModuleDict({name: nn.Linear(2 * WIDTH, WIDTH) for name in made})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        entered = self.norm(x)
        inner = {name: F.gelu(self.up[name](entered)) for name in self.ups}
        out = {name: self.down[name](inner[name]) for name in self.downs}
        return x + sum(torch.tanh(out[name]) * (2 + i) for i, name in enumerate(NAMES))


class Model(nn.Module):
    """Gives what each layer makes, in some order."""

    def __init__(
        self,
        made: tuple[str, ...] = NAMES,
        ups: tuple[str, ...] = NAMES,
        downs: tuple[str, ...] = NAMES,
        given: tuple[int, ...] = (0, 1),
    ) -> None:
        super().__init__()
        self.given = given
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer(made, ups, downs) for _ in given)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        outs = [self.table(ids)]
        for layer in self.layers:
            outs.append(layer(outs[-1]))
        return {f"after {i}": outs[1 + i] for i in self.given}


def model(**orders: Any) -> Model:
    """With the same numbers whatever the orders."""
    made = Model(**orders).double()
    for i, (_, parameter) in enumerate(sorted(made.named_parameters())):
        generator = torch.Generator().manual_seed(i)
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.double) / 4
    return made


def step(made: nn.Module, seed: int = 0) -> dict[str, torch.Tensor]:
    made.zero_grad()
    out = made(token_ids(2, 9, seed))
    sum((out[name].square().sum() for name in sorted(out)), torch.zeros(())).backward()
    return dict(out)


def order_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Orders that differ between ranks are refused where something is sent, and else are right."""
    found = Findings()
    rank = mesh.get_local_rank()
    mine = NAMES[::-1] if rank else NAMES

    def rewritten(**orders: Any) -> nn.Module:
        return tpplan.parallelize(model(**orders), PLAN, mesh, sequence_parallel=sp)

    said = complaint(rewritten, made=mine)
    found.add("made", same("rank 1" in said and "has the module layers.0.up.three" in said))
    said = complaint(rewritten, downs=mine)
    found.add("sent", same("sends layers.0.down.three" in said and "or sort it" in said))
    due = model()
    expected = step(due)
    for name, orders in {
        "called": {"ups": mine},
        "given": {"given": (1, 0) if rank else (0, 1)},
    }.items():
        ours = rewritten(**orders)
        got = step(ours)
        found.add(f"right: {name}", {k: error(y, full(got[k])) for k, y in expected.items()})
        found.add(f"right: {name}", compare_gradients(due, ours))
    return found.errors


def later_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """An order that comes to differ is noticed at the next comparison."""
    found = Findings()
    ours: Any = tpplan.parallelize(model(), PLAN, mesh, sequence_parallel=sp)
    for seed in range(4):
        step(ours, seed)
    told = []
    for seed in range(4, 8):
        told.append(complaint(step, ours, seed))
        if mesh.get_local_rank() == 1:
            ours.layers[1].downs = NAMES[::-1]
    found.add("at the eighth", same([bool(text) for text in told] == [False, False, False, True]))
    found.add("said", same("in another order" in told[-1]))
    return found.errors


def masks_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Masks by kind of layer, which transformers makes in the order of a set."""
    found = Findings()
    config = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    due = hf("Gemma2", **config).eval()
    ours = sharded(hf("Gemma2", **config), mesh, sp).eval()
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    masks = {"full_attention": causal, "sliding_attention": causal.triu(-3)}
    kinds = sorted(masks, reverse=bool(mesh.get_local_rank()))
    given = {kind: masks[kind][None, None] for kind in kinds}
    expected, got = (m(token_ids(1, 9, 0), attention_mask=given).logits for m in (due, ours))
    found.add("logits", error(expected, full(got)))
    return found.errors


@MODES
@pytest.mark.parametrize("job", [order_job, later_job, masks_job])
def test_order(ranks: Ranks, job: Any, sp: bool) -> None:
    assert not beyond(ranks.run(2, job, sp))
