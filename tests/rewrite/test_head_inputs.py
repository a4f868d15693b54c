"""Gradients of what is given for all heads: of callers' tensors, of parameters, of masks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import tpplan
from tests.compare import Errors, Findings, beyond, full, gradient_errors, same
from tests.life.parts import HEAD, WIDTH, attend
from tests.models import weighed
from tests.ranks import Ranks
from tests.rewrite import MODES, SIZES
from tpplan.simulate import Recorder

HEADS, LENGTH = WIDTH // HEAD, 6


class Biased(nn.Module):
    """Attention with a bias for every head as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.num_heads = HEADS

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], self.num_heads, 3, HEAD)
        q, k, v = (t.transpose(1, 2) for t in self.qkv(x).view(shape).unbind(-2))
        bias = bias * 0.5
        if bias.size(-3) > 1:
            bias = bias.view(-1, self.num_heads, *bias.shape[-2:])
        return self.o(attend(q, k, v, bias))


class Layer(nn.Module):
    """One of them with its residual."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Biased()
        self.run: Callable[..., torch.Tensor] = lambda f, *args: f(*args)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return x + self.run(self.attn, x, bias)


class Model(nn.Module):
    """Two layers that are given the same bias, to which the model adds its own."""

    def __init__(self, learned: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.slopes = nn.Parameter(torch.randn(HEADS, 1, 1)) if learned else None
        self.mix = nn.Linear(1, 1) if learned else None
        self.double()

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        if self.slopes is not None and self.mix is not None:
            bias = self.mix(bias.unsqueeze(-1)).squeeze(-1)
        for layer in self.layers:
            x = layer(x, bias)
            if self.slopes is not None:
                x = layer(x, self.slopes * torch.ones(LENGTH, LENGTH, dtype=x.dtype))
        return x


PLAN: dict[str, Any] = {
    "tpplan": 1,
    "rules": {
        "layers.*.attn": {
            "style": "attention",
            "heads": "num_heads",
            "attributes": {"num_heads": "heads"},
            "head_inputs": {"bias": -3},
        },
        "layers.*.attn.qkv": {
            "style": "colwise",
            "packed": {"parts": ["q", "k", "v"], "repeat": "heads"},
        },
        "layers.*.attn.o": "rowwise",
    },
}
LEARNED = {**PLAN, "rules": {**PLAN["rules"], "slopes": "replicate", "mix": "replicate"}}


def given(*leading: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, and a bias."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    bias = torch.randn(*leading, LENGTH, LENGTH, generator=generator, dtype=torch.float64)
    return x.requires_grad_(), bias


def pair(
    mesh: DeviceMesh, sp: bool, reference: nn.Module, plan: Any, *args: Any
) -> tuple[Any, Any]:
    """The whole model and a sharded copy."""
    model = copy.deepcopy(reference)
    args = tuple(a.detach().float() for a in args)
    tpplan.parallelize(model, plan, mesh, sp, inputs=args, prove=False)
    return reference, model


def differ(models: tuple[Any, Any], x: torch.Tensor, bias: torch.Tensor) -> Errors:
    """The errors of all gradients, those of what was given among them."""
    found = []
    for model in models:
        model.zero_grad()
        leaves = {"x": x.detach().clone(), "bias": bias.detach().clone()}
        for leaf in leaves.values():
            leaf.requires_grad_()
        weighed(model(*leaves.values())).backward()
        grads = {n: p.grad for n, p in model.named_parameters()}
        grads |= {n: leaf.grad for n, leaf in leaves.items()}
        found.append({n: None if g is None else full(g) for n, g in grads.items()})
    return gradient_errors(*found)


def gradients_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Biases of all heads, of one for all, of batch and heads in one; recomputed; of parameters."""
    found = Findings()
    for leading in ((HEADS,), (1,), (2, HEADS), (2 * HEADS,)):
        models = pair(mesh, sp, Model(), PLAN, *given(*leading))
        for title, reentrant in (("kept", None), ("recomputed", False), ("reentrant", True)):
            for model in models:
                for layer in model.layers:
                    if reentrant is not None:
                        layer.run = lambda f, *args, r=reentrant: checkpoint(
                            f, *args, use_reentrant=r
                        )
            with found.case(f"{leading}, {title}"):
                found.add(f"{leading}, {title}", differ(models, *given(*leading)))
    models = pair(mesh, sp, Model(learned=True), LEARNED, *given(HEADS))
    found.add("of parameters", differ(models, *given(HEADS)))
    return found.errors


def counts_job(mesh: DeviceMesh) -> Errors:
    """One gather for all layers where gradients are asked, none where not."""
    found = Findings()
    _, model = pair(mesh, True, Model(), PLAN, *given(HEADS))
    for asked in (False, True):
        x, bias = given(HEADS)
        with Recorder() as recorder:
            weighed(model(x, bias.requires_grad_(asked))).backward()
        sent = [c.kind for c in recorder.collectives if "for all heads" in c.reason]
        found.add(f"{asked}: {sent}", same(sent == ["all_gather"] * asked))
    return found.errors


class Masked(nn.Module):
    """torch's own attention, with a mask that is added."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.MultiheadAttention(WIDTH, HEADS, batch_first=True) for _ in range(2)
        )
        self.double()

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x, x, x, attn_mask=mask, need_weights=False)[0]
        return x


class Sliced(Biased):
    """Without a bias where none is given; of one it takes as many heads as it has, the first."""

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if bias is None:
            bias = x.new_zeros(self.num_heads, x.size(1), x.size(1))
        return super().forward(x, bias[..., : self.num_heads, :, :])


class Unbiased(nn.Module):
    """One layer of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer()])
        self.layers[0].attn = Sliced()
        self.double()

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        given = () if bias is None else (bias,)
        return x + self.layers[0].attn(x, *given)  # type: ignore[operator, no-any-return]


def later_job(mesh: DeviceMesh) -> Errors:
    """No example gives the bias that the plan speaks of, a later call does."""
    x, bias = given(HEADS)
    return differ(pair(mesh, False, Unbiased(), PLAN, x), x, bias)


def masks_job(mesh: DeviceMesh) -> Errors:
    """Masks for all heads, and one for each."""
    found = Findings()
    plan = {"tpplan": 1, "rules": {"layers.*": "attention"}}
    for leading in ((), (2 * HEADS,)):
        models = pair(mesh, False, Masked(), plan, *given(*leading))
        found.add(f"{leading}", differ(models, *given(*leading)))
    return found.errors


@SIZES
@MODES
def test_gradients(ranks: Ranks, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, gradients_job, sp), 1e-9)


def test_counts(ranks: Ranks) -> None:
    assert not beyond(ranks.run(2, counts_job))


@pytest.mark.parametrize("tp", [2, 4])
def test_masks(ranks: Ranks, tp: int) -> None:
    assert not beyond(ranks.run(tp, masks_job), 1e-9)


def test_no_example_gives_it(ranks: Ranks) -> None:
    assert not beyond(ranks.run(2, later_job), 1e-9)
