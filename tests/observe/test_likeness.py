"""Modules are alike where they compute the same, and only there."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Hashable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tpplan
from benchmarks import zoo
from tpplan.observe.likeness import identity, shared_tensors
from tpplan.planner.match import match


class Layer(nn.Module):
    """Something of everything that tells layers apart."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.number = number
        self.heads = 4
        self.scale: Any = 0.5
        self.act: Any = F.silu
        self.steps: Any = [torch.relu, 3]
        self.config = SimpleNamespace(eps=1e-6, sizes={"width": [8, 16]})
        self.norm = nn.LayerNorm(8)
        self.fc, self.out = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("table", torch.arange(4.0))
        self.plain = torch.ones(3)

    def forward(self, x: torch.Tensor, cache: Any = None) -> torch.Tensor:
        if cache is not None:
            (x,) = cache.update(x, self.number)
        return x + self.out(self.act(self.fc(self.norm(x))))


def told(layer: nn.Module, number: int = 0) -> Hashable:
    return identity(layer, f"layers.{number}")


def test_layers_of_one_kind_are_alike() -> None:
    assert told(Layer(0), 0) == told(Layer(5), 5)
    assert hash(told(Layer(0), 0)) == hash(told(Layer(5), 5))
    layer = Layer(2)
    assert told(copy.deepcopy(layer), 2) == told(layer, 2)


def tied(layer: Layer) -> None:
    layer.norm.bias = layer.norm.weight


def hooked(layer: Layer) -> None:
    layer.fc.register_forward_pre_hook(lambda m, a: (a[0] / 2,))


def closed_over(layer: Layer, factor: int = 3) -> None:
    layer.act = lambda x: x * factor


CHANGES: dict[str, Callable[[Layer], Any]] = {
    "float": lambda layer: setattr(layer, "scale", 0.25),
    "type of a number": lambda layer: setattr(layer, "scale", 1),
    "function": lambda layer: setattr(layer, "act", F.gelu),
    "class of a submodule": lambda layer: setattr(layer, "norm", nn.Identity()),
    "function in a list": lambda layer: layer.steps.__setitem__(0, torch.tanh),
    "configuration": lambda layer: layer.config.sizes["width"].append(1),
    "partial": lambda layer: setattr(layer, "act", functools.partial(F.gelu, approximate="tanh")),
    "closure": closed_over,
    "forward on the instance": lambda layer: setattr(layer.fc, "forward", lambda x: x),
    "hook": hooked,
    "backward hook": lambda layer: layer.fc.register_full_backward_hook(lambda *a: None),
    "hook on a parameter": lambda layer: layer.fc.weight.register_hook(lambda g: g / 2),
    "requires_grad": lambda layer: layer.fc.weight.requires_grad_(False),
    "shape": lambda layer: setattr(layer, "fc", nn.Linear(8, 16, bias=False)),
    "dtype": lambda layer: layer.fc.double(),
    "number in a buffer": lambda layer: layer.table.add_(1e-7),
    "number in a tensor": lambda layer: layer.plain.add_(1),
    "tie": tied,
    "training": lambda layer: layer.out.eval(),
    "eps of a norm": lambda layer: setattr(layer.norm, "eps", 1e-3),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_tells_layers_apart(what: str) -> None:
    layer = Layer()
    CHANGES[what](layer)
    assert told(layer) != told(Layer())
    again = Layer()
    CHANGES[what](again)
    # what is made anew each time, by the same code, is the same
    assert told(again) == told(layer)


def test_closures_are_alike_by_what_they_closed_over() -> None:
    one, same, other = Layer(), Layer(), Layer()
    closed_over(one)
    closed_over(same)
    closed_over(other, 4)
    assert told(one) == told(same)
    assert told(one) != told(other)


def test_an_opaque_callable_is_equal_to_itself_alone() -> None:
    class Opaque:
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x

        def __reduce_ex__(self, protocol: Any) -> Any:
            raise TypeError("no")

    one, other = Layer(), Layer()
    one.act, other.act = Opaque(), Opaque()
    assert told(one) != told(other)
    other.act = one.act
    assert told(one) == told(other)


def test_parts_shared_with_other_modules() -> None:
    model = nn.Sequential(*(Layer(i) for i in range(4)))
    model[3].fc.weight = model[1].fc.weight
    shared = shared_tensors(model)
    ids = [identity(layer, str(i), shared=shared) for i, layer in enumerate(model)]
    assert ids[0] == ids[2] != ids[1] == ids[3]


class Other(Layer):
    """Reads its number in one way more."""

    def __init__(self, number: int = 0) -> None:
        super().__init__(number)
        self.table_of_all = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def _compares(self: Any, x: Any, cache: Any = None) -> Any:
    return x if self.number == 3 else -x


def _computes(self: Any, x: Any, cache: Any = None) -> Any:
    return x * (self.number + 1)


def _asks(self: Any, x: Any, cache: Any = None) -> Any:
    return x if self.number else -x


def _keeps(self: Any, x: Any, cache: Any = None) -> Any:
    number = self.number
    return x if number > 3 else -x


def _looks_up(self: Any, x: Any, cache: Any = None) -> Any:
    return x * self.table_of_all[self.number]


def _looks_up_locally(self: Any, x: Any, cache: Any = None) -> Any:
    config = self
    return x * config.table_of_all[self.number]


def _indexes(self: Any, x: Any, cache: Any = None) -> Any:
    return x[self.number]


def _narrows(self: Any, x: Any, cache: Any = None) -> Any:
    return x.narrow(1, self.number, 1)


def _calls(self: Any, x: Any, cache: Any = None) -> Any:
    return torch.pow(x, self.number)


def _asks_by_name(self: Any, x: Any, cache: Any = None) -> Any:
    return x * getattr(self, "number")  # noqa: B009


def _in_a_lambda(self: Any, x: Any, cache: Any = None) -> Any:
    return [y for y in x if y > self.number]


def _helper(module: Any, x: Any) -> Any:
    return x * module.number


def _through_a_function(self: Any, x: Any, cache: Any = None) -> Any:
    return _helper(self, x)


def _sometimes_own(self: Any, x: Any, cache: Any = None) -> Any:
    if x.sum() > 0:
        cache = self
    return x * cache.table_of_all[self.number]


DECIDING = (
    _compares,
    _computes,
    _asks,
    _keeps,
    _looks_up,
    _looks_up_locally,
    _indexes,
    _narrows,
    _calls,
    _asks_by_name,
    _in_a_lambda,
    _through_a_function,
    _sometimes_own,
)


@pytest.mark.parametrize("forward", DECIDING, ids=lambda f: str(f.__name__))
def test_a_number_that_is_read_tells_layers_apart(forward: Any) -> None:
    kind = type("Kind", (Other,), {"forward": forward})
    assert told(kind(1), 1) == told(kind(1), 1)
    assert told(kind(1), 1) != told(kind(3), 3)


def _updates(self: Any, x: Any, cache: Any = None) -> Any:
    known = cache.seen.get(self.number) if cache is not None else False
    if known:  # noqa: SIM108
        inner = cache.cross
    else:
        inner = cache
    (x, _) = inner.update(x, x, self.number, {"known": known})
    cache.seen[self.number] = True
    return x + inner.layers[self.number].keys


def _mentions_nothing(self: Any, x: Any, cache: Any = None) -> Any:
    return x


@pytest.mark.parametrize("forward", [_updates, _mentions_nothing])
def test_bookkeeping_does_not(forward: Any) -> None:
    kind = type("Kind", (Other,), {"forward": forward})
    assert told(kind(1), 1) == told(kind(3), 3)
    # another number than its own is not looked away from
    assert told(kind(1), 1) != told(kind(2), 3)


def test_rules_tell_layers_apart() -> None:
    rules = {"*.fc": "colwise", "*.out": "rowwise", "2.norm": "sequence_parallel"}
    model = nn.Sequential(*(Layer(i) for i in range(4)))
    found = match(tpplan.load_plan({"tpplan": 1, "rules": rules}), model)[0]
    every = {**found.modules, **found.parameters}
    ids = [identity(layer, str(i), every) for i, layer in enumerate(model)]
    assert ids[0] == ids[1] == ids[3] != ids[2]


STACKS = {"llama": "model.layers", "gpt2": "transformer.h", "gemma": "model.layers"}


@pytest.mark.parametrize("kind", STACKS)
def test_layers_of_known_models_are_alike(kind: str) -> None:
    depth = {"n_layer" if kind == "gpt2" else "num_hidden_layers": 4}
    stack = STACKS[kind]
    layers = zoo.tiny(kind, **depth).get_submodule(stack)
    assert len({identity(layer, f"{stack}.{i}") for i, layer in layers.named_children()}) == 1


def test_layers_of_an_encoder_and_a_decoder() -> None:
    model = zoo.other("t5", num_layers=4, num_decoder_layers=4)
    for stack in ("encoder.block", "decoder.block"):
        blocks = model.get_submodule(stack).named_children()
        ids = [identity(block, f"{stack}.{i}") for i, block in blocks]
        assert ids[0] != ids[1] == ids[2] == ids[3]  # the first one has the table of positions
