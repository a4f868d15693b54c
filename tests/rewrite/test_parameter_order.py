"""The order in which a module holds its parameters says nothing of what they are.

A class may make its bias before its weight; weight norm or pruning that is taken off again, and a
weight that is deleted and put anew, leave the weight behind the bias.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import parametrizations, parametrize, prune

import tpplan
from tests.compare import Errors, Findings, beyond, same, step
from tests.ranks import Ranks
from tests.rewrite import MODES, SIZES
from tests.stacked import RULES, WIDTH, Stacked, ids_of

PLAN = {"tpplan": 1, "rules": {**RULES, "layers.*.wide": "colwise"}}
NAMES = {True: ("gain", "shift"), False: ("weight", "bias")}
TIGHT = 1e-11


class Product(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(outputs))
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.eps = 1e-5
        self.shift = nn.Parameter(torch.randn(width))
        self.gain = nn.Parameter(torch.randn(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.gain.shape, self.gain, self.shift, self.eps)


class Layer(nn.Module):
    def __init__(self, norm: type[nn.Module], product: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.wide = norm(WIDTH), norm(2 * WIDTH)
        self.up, self.down = product(WIDTH, 2 * WIDTH), product(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(self.wide(self.up(self.norm(x))).relu())
        return out


def _weight_norm(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        parametrizations.weight_norm(module)
        parametrize.remove_parametrizations(module, "weight")
    else:
        _anew(module)


def _pruned(module: nn.Module) -> None:
    prune.random_unstructured(module, "weight", 0.25)
    prune.remove(module, "weight")


def _anew(module: nn.Module) -> None:
    weight = module.weight
    del module.weight
    module.weight = nn.Parameter(torch.randn_like(weight))  # type: ignore[arg-type]


ORDERS: dict[str, Callable[[nn.Module], None] | None] = {
    "bias first": None,
    "weight norm taken off": _weight_norm,
    "pruning taken off": _pruned,
    "put anew": _anew,
}


def _made(order: str) -> nn.Module:
    torch.manual_seed(3)
    change = ORDERS[order]
    norm, product = (Norm, Product) if change is None else (nn.LayerNorm, nn.Linear)
    model = Stacked(2, lambda: Layer(norm, product)).double()
    if change is not None:
        for layer in model.layers:
            for module in layer.children():
                change(module)
    names = [name for name, _ in model.layers[0].up.named_parameters()]
    assert names == ["bias", "weight"], names
    return model


def order_job(mesh: DeviceMesh, order: str, sp: bool) -> Errors:
    """Two steps' outputs and gradients, of the model as it is and of one that is loaded."""
    found, reference, model = Findings(), _made(order), _made(order)
    model = tpplan.parallelize(model, PLAN, mesh=mesh, sequence_parallel=sp)
    plan = model._tpplan_plan
    form = plan.modules["layers.0.norm"].kernel.form
    found.add("names", same(form.names == NAMES[ORDERS[order] is None]))
    found.add("wide", same(plan.modules["layers.0.wide"].norm is not None))
    for turn, shape in enumerate([(2, 8), (3, 5)]):
        ids = ids_of(*shape)

        def run(m: nn.Module, ids: torch.Tensor = ids) -> dict[str, torch.Tensor]:
            out = m(ids)
            return {"out": out, "objective": out.square().sum()}

        found.add(f"step {turn}", step(reference, model, run))
        state = {name: value * 0.9 for name, value in reference.state_dict().items()}
        for m in (reference, model):
            m.load_state_dict(state)
    return found.errors


@SIZES
@MODES
@pytest.mark.parametrize("order", ORDERS)
def test_order(ranks: Ranks, order: str, sp: bool, tp: int) -> None:
    assert beyond(ranks.run(tp, order_job, order, sp), TIGHT) == {}
