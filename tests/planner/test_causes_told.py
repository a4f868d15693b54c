"""What is said first where the cause lies in how the model is written."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.planner.helpers import WIDTH, Layer, Stack, refused, wrong


class Inline(Layer):
    """Mixes positions in the layer's own code, as an MLP-mixer does."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x + self.tokens(x.mT).mT)


class Tokens(nn.Module):
    """The same in a module."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x.mT).mT


GATHER = {"style": "replicate", "input": "gather"}


@pytest.mark.parametrize("rule", ["replicate", GATHER], ids=["replicate", "gather"])
def test_a_layer_that_mixes_positions_is_to_have_a_module_for_it(rule: Any) -> None:
    said = refused(Stack(lambda _: Inline()), {"layers.*.tokens": rule}, True)
    assert said.count("error:") == 1
    assert "put this code in a module of the layer" in said
    assert "{style: replicate, input: gather}" in said


class Closing(Stack):
    """Ends with a function that holds a part of the model, or all of it."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__(lambda _: Layer())
        self.norm = nn.LayerNorm(WIDTH)
        self.finish = make(self)

    def forward(self, x: torch.Tensor) -> Any:
        return self.finish(super().forward(x))


def _whole(model: Any) -> Any:
    return lambda x: model.norm(x)


def _part(model: Any) -> Any:
    norm = model.norm
    return lambda x: norm(x)


@pytest.mark.parametrize("sp", [False, True], ids=["TP", "TP+SP"])
@pytest.mark.parametrize("make", [_whole, _part])
def test_a_function_that_holds_the_model(make: Callable[[Any], Any], sp: bool) -> None:
    said = refused(Closing(make), {"norm": "sequence_parallel"}, sp)
    first = said.partition("error: ")[2]
    assert first.startswith("finish: this function closes over ")
    assert "make it a method of the module's class" in first.partition("error:")[0]


def _wrapped(model: Any, path: str) -> None:
    module = model.get_submodule(path)
    before = module.forward
    module.forward = lambda x: before(x) * 2


def _by_default(model: Any, path: str) -> None:
    module = model.get_submodule(path)
    module.forward = lambda x, before=module.forward: before(x) * 2


def _method(model: Any, path: str) -> None:
    module = model.get_submodule(path)
    before = functools.partial(module.forward)
    module.forward = types.MethodType(lambda self, x: before(x) * 2, module)


def _hooked(model: Any, path: str) -> None:
    model.get_submodule(path).register_forward_hook(lambda m, args, out: out + model.norm(args[0]))


class Normed(Stack):
    """Ends with a norm."""

    def __init__(self) -> None:
        super().__init__(lambda _: Layer())
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(super().forward(x))


@pytest.mark.parametrize("sp", [False, True], ids=["TP", "TP+SP"])
@pytest.mark.parametrize("change", [_wrapped, _by_default, _method, _hooked])
@pytest.mark.parametrize("path", ["", "layers.0"])
def test_a_function_around_a_forward(
    change: Callable[[Any, str], None], path: str, sp: bool
) -> None:
    # in float64 copies and the model's own modules would compute the same
    for dtype in (torch.float32, torch.float64):
        model = Normed().to(dtype)
        change(model, path)
        said = refused(model, {"norm": "sequence_parallel"}, sp)
        assert "this function closes over " in said.partition("error: ")[2].partition("error:")[0]


SHARED: list[Any] = []


class Global(Normed):
    """Comes to its layers by a global name."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(SHARED[0](Stack.forward(self, x)))


def test_a_module_that_code_comes_to_by_a_global_name() -> None:
    model = Global().double()
    SHARED[:] = [model.norm]
    try:
        said = refused(model, {"norm": "sequence_parallel"}, False)
    finally:
        SHARED.clear()
    assert "norm: a copy of the model still calls this module" in said


class Bound(Closing):
    """Keeps a method of its own."""

    def __init__(self) -> None:
        super().__init__(lambda model: model.end)

    def end(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


def test_a_bound_method_is_copied_with_its_module() -> None:
    assert not wrong(Bound(), {"norm": "sequence_parallel"}, False)


class Scaled(nn.Module):
    """LayerScale: a vector by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((WIDTH,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gamma


class LayerScaled(Layer):
    """Scales what it adds to the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.ls = Scaled()

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.ls(self.out(self.between(self.fc(x))))


@pytest.mark.parametrize("sp", [False, True], ids=["TP", "TP+SP"])
@pytest.mark.parametrize("tp", [2, 4])
def test_layer_scale(tp: int, sp: bool) -> None:
    assert not wrong(Stack(lambda _: LayerScaled()), {"layers.*.ls.gamma": "replicate"}, sp, tp)


class OfWeights(Layer):
    """Computes with a weight outside of its module."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) + self.fc.weight.mean()


@pytest.mark.parametrize("sp", [False, True], ids=["TP", "TP+SP"])
def test_code_that_computes_with_a_sharded_weight(sp: bool) -> None:
    said = refused(Stack(lambda _: OfWeights()), {}, sp)
    assert "self.fc.weight.mean()" in said
    assert "this code computes with a parameter of which each rank has a part" in said
