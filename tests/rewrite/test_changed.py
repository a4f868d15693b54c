"""What a sharded model consists of is changed after steps: it computes that, or says why not."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from tests.compare import Errors, Findings, beyond, compare_gradients, error, full, same
from tests.models import randomize, weighed
from tests.ranks import Ranks
from tests.rewrite import MODES, SIZES
from tests.rewrite.life import KV_HEADS, TIGHT, WIDTH, Attention, alike, built, sharded

# what is said of it in TP, and under SP; "" where it is computed
Change = tuple[Callable[[Any], object], str, str]
TAKEN = "was taken out of a sharded model, or copied by itself"
ROWS = "would be given a rank's rows of the sequence"
FORWARD = "its forward was replaced on the instance"


def _copied(path: str) -> Callable[[Any], object]:
    """A module of the second layer is a copy of the first one's, or of its own."""

    def change(model: Any) -> None:
        model.set_submodule(path, copy.deepcopy(model.get_submodule(path)))

    return change


class Holding(nn.Module):
    """What was in the attention, by other code."""

    def __init__(self, old: Any) -> None:
        super().__init__()
        self.q, self.k, self.v, self.q_norm, self.out = old.q, old.k, old.v, old.q_norm, old.out
        self.kv = old.kv

    forward = Attention.forward


def _held(model: Any) -> None:
    model.layers[1].attn = Holding(model.layers[1].attn)


def _patched(model: Any) -> None:
    attn = model.layers[1].attn
    attn.forward = types.MethodType(Attention.forward, attn)


def _around(model: Any) -> None:
    attn = model.layers[1].attn
    before = attn.forward
    attn.forward = lambda x: before(x) * 2


def _skipped(model: Any) -> None:
    model.layers[1].attn.forward = lambda x: x * 0.5


def _plain(model: Any) -> None:
    torch.manual_seed(3)
    model.layers[1].attn = Attention(KV_HEADS).double().requires_grad_(False)


def _of_class(model: Any) -> None:
    model.layers[1].attn.__class__ = Attention


def _layers(model: Any) -> None:
    model.layers.append(copy.deepcopy(model.layers[0]))
    model.layers[0] = copy.deepcopy(model.layers[1])


def _norm_outside(model: Any) -> None:
    model.norm = copy.deepcopy(model.norm)
    model.head = copy.deepcopy(model.head)


def _shared(model: Any) -> None:
    model.layers[1].attn.out = model.layers[0].attn.out
    model.layers[1].norms = model.layers[0].norms


def _moved(model: Any) -> None:
    model.head = nn.Sequential(model.layers[1].attn.q, nn.Linear(WIDTH, 5).double())
    del model.layers[1]


def _scale(model: Any) -> None:
    model.layers[1].attn.q_norm = nn.Sequential(model.layers[1].attn.q_norm, nn.PReLU().double())


CHANGES: dict[str, Change] = {
    "a norm of the stream": (_copied("layers.1.norms.0"), "", TAKEN),
    "a column-parallel layer": (_copied("layers.1.attn.k"), TAKEN, TAKEN),
    "a norm of heads": (_copied("layers.1.attn.q_norm"), TAKEN, TAKEN),
    "an attention": (_copied("layers.1.attn"), "", TAKEN),
    "whole layers": (_layers, "", ""),
    "the last norm and the head": (_norm_outside, "", ""),
    "shared": (_shared, "", ""),
    "held by others": (_held, "does not come through layers.1.attn", "does not come through"),
    "moved": (_moved, "does not come through layers.1.attn", "does not come through"),
    "a forward": (_patched, FORWARD, FORWARD),
    "a forward around it": (_around, "", ""),
    "a forward that leaves it out": (_skipped, "", ""),
    "a class": (_of_class, "its class was replaced", "its class was replaced"),
    "a whole attention": (_plain, "", ROWS),
    "trained in a region": (_scale, "is another one on each rank", "this parameter was added"),
}


def changed_job(mesh: DeviceMesh, sp: bool, name: str) -> Errors:
    """A change before the first call, and after steps, where the ranks compare nothing."""
    found = Findings()
    change, *said = CHANGES[name]
    for steps in (0, 4):
        reference = built()
        model = sharded(reference, mesh, sp)
        for _ in range(steps):
            found.add("before", alike(reference, model))
        for m in (reference, model):
            change(m)
        try:
            found.add("after", alike(reference, model))
            found.add("again", alike(reference, model, 4))
            found.add("accepted", same(not said[sp]))
        except RuntimeError as refused:
            found.add(f"said {refused}", same(bool(said[sp]) and said[sp] in str(refused)))
    return found.errors


@MODES
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.turns(12)
def test_changed(ranks: Ranks, name: str, sp: bool) -> None:
    assert not beyond(ranks.run(2, changed_job, sp, name), TIGHT)


class Width(nn.Module):
    """Normalises over a width that is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.eps = nn.Parameter(torch.ones(24)), 1e-3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.scale


class Beside(nn.Module):
    """Two regions of one input, whose results are added up, one of them normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide = nn.LayerNorm(WIDTH), Width()
        self.a, self.b = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.c, self.d = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = self.norm(x)
        return x + self.b(self.a(given).tanh()) + self.d(self.wide(self.c(given)))  # type: ignore[no-any-return]


RULES: dict[str, Any] = {
    "tpplan": 1,
    "rules": {
        "*.norm": "sequence_parallel",
        "*.{a,c}": "colwise",
        "*.wide": "colwise",
        "*.{b,d}": "rowwise",
    },
}


class Half(nn.Module):
    """Half of what a module gives."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x) * 0.5  # type: ignore[no-any-return]


def _halved(model: Any) -> None:
    model[1].b = Half(model[1].b)


def _serial(model: Any) -> None:
    layer = model[1]

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = x + layer.b(layer.a(layer.norm(x)).tanh())
        return x + layer.d(layer.wide(layer.c(layer.norm(x)))).tanh()  # type: ignore[no-any-return]

    layer.forward = forward


def _eps(model: Any) -> None:
    model[1].wide.eps = 0.5


def _normalised(model: Any) -> None:
    model[1].wide = Half(nn.Softmax(-1))


WIDTHS: dict[str, tuple[Callable[[Any], object], str]] = {
    "half": (_halved, ""),
    "one after the other": (_serial, ""),
    "an eps": (_eps, "1.wide: its attribute 'eps' was changed"),
    "another norm": (_normalised, "1.wide: this module was replaced"),
}


def added_up_job(mesh: DeviceMesh, sp: bool, name: str) -> Errors:
    """Layers whose results are reduced together, and a norm over a rank's columns."""
    change, said = WIDTHS[name]
    reference = nn.Sequential(Beside(), Beside()).double()
    randomize(reference, 2, std=0.3)
    x = torch.randn(2, 7, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    model = tpplan.parallelize(
        copy.deepcopy(reference), RULES, mesh, sequence_parallel=sp, inputs=x, prove=False
    )
    results = []
    try:
        for m in (reference, model):
            m(x).sum().backward()
            change(m)
            m.zero_grad()
            out = m(x)
            weighed(out).backward()
            results.append(full(out))
    except RuntimeError as refused:
        return {f"said {refused}": same(bool(said) and said in str(refused))}
    found = {"output": error(*results), **compare_gradients(reference, model)}
    return {**found, "accepted": same(not said)}


@SIZES
@MODES
@pytest.mark.parametrize("name", WIDTHS)
@pytest.mark.turns(12)
def test_added_up(ranks: Ranks, tp: int, name: str, sp: bool) -> None:
    assert not beyond(ranks.run(tp, added_up_job, sp, name), TIGHT)


class Serial(Beside):
    """Whose forward others replace."""


def _one_by_one(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = x + self.b(self.a(self.norm(x)).tanh())
    return x + self.d(F.silu(self.wide(self.c(self.norm(x)))))  # type: ignore[no-any-return]


def of_class_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """The code of all layers is replaced on their class."""
    reference = nn.Sequential(Serial(), Serial()).double()
    randomize(reference, 2, std=0.3)
    x = torch.randn(2, 7, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    model = tpplan.parallelize(
        copy.deepcopy(reference), RULES, mesh, sequence_parallel=sp, inputs=x, prove=False
    )
    model(x)
    before = Serial.forward
    Serial.forward = _one_by_one  # type: ignore[method-assign]
    try:
        results = []
        for m in (reference, model):
            out = m(x)
            weighed(out).backward()
            results.append(full(out))
    finally:
        Serial.forward = before  # type: ignore[method-assign]
    return {"output": error(*results), **compare_gradients(reference, model)}


@MODES
@pytest.mark.turns(12)
def test_code_of_a_class(ranks: Ranks, sp: bool) -> None:
    assert not beyond(ranks.run(2, of_class_job, sp), TIGHT)


def table_job(mesh: DeviceMesh, sp: bool, style: str, name: str, value: object) -> Errors:
    """How a table of embeddings is trained is changed after a step."""
    model = nn.Sequential(nn.Embedding(20, WIDTH), Beside(), Beside()).double()
    rules = {**RULES["rules"], "0": style}
    ids = torch.randint(20, (2, 7), generator=torch.Generator().manual_seed(4))
    tpplan.parallelize(
        model,
        {**RULES, "rules": rules},
        mesh,
        sequence_parallel=sp,
        inputs=ids,
        prove=False,
    )
    model(ids).sum().backward()
    setattr(model[0], name, value)
    with pytest.raises(RuntimeError, match=f"^0: its attribute '{name}' was changed"):
        model(ids)
    setattr(model[0], name, getattr(nn.Embedding(1, 1), name))
    wrapped = model[0].forward
    model[0].forward = lambda x: wrapped(x) * 2
    model(ids)
    return {}


@MODES
@pytest.mark.parametrize("style", ["vocab", "sequence_parallel"])
@pytest.mark.parametrize(("name", "value"), [("max_norm", 1.0), ("scale_grad_by_freq", True)])
@pytest.mark.turns(12)
def test_table(ranks: Ranks, style: str, sp: bool, name: str, value: object) -> None:
    ranks.run(2, table_job, sp, style, name, value)


def hooked_table_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """A hook on the gradients of a table and of a norm, put there and taken away, is no change."""
    table = nn.Embedding(20, WIDTH)
    module = nn.Sequential(table, nn.LayerNorm(WIDTH), Beside(), Beside()).double()
    rules = {**RULES["rules"], "0": "vocab", "1": "sequence_parallel"}
    ids = torch.randint(20, (2, 7), generator=torch.Generator().manual_seed(4))
    reference = copy.deepcopy(module)
    model = tpplan.parallelize(
        module, {**RULES, "rules": rules}, mesh, sequence_parallel=sp, inputs=ids, prove=False
    )
    found: Errors = {}
    seen: list[int] = []
    for step in ("without", "with", "without again"):
        hooks = [
            m.register_full_backward_hook(lambda *_: seen.append(1))
            for m in (model[0], model[1])
            if step == "with"
        ]
        expected, got = (m(ids) for m in (reference, model))
        for out in (expected, got):
            out.sin().sum().backward()
        for hook in hooks:
            hook.remove()
        found[step] = error(expected, got)
    return {**found, "hooks": same(len(seen) == 2), **compare_gradients(reference, model)}


@MODES
def test_hooks_on_a_table(ranks: Ranks, sp: bool) -> None:
    assert not beyond(ranks.run(2, hooked_table_job, sp), TIGHT)
