"""CUDA where there is none: fake tensors on devices that a CPU build of torch cannot reach.

Fake CUDA tensors with autograd abort the process on such a build: everything here runs without.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves, tree_map

from tests.comm.test_randomness import Philox
from tpplan.compat import FakeTensorMode
from tpplan.kernels import launch


class _Reachable(TorchFunctionMode):
    """Says "cuda:0" for "cuda", and ops in place of methods that first switch to a tensor's device.

    Neither the current device nor the switch is there in such a build.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.device:
            args, kwargs = tree_map(_indexed, (args, kwargs))
        return _METHODS.get(func, func)(*args, **(kwargs or {}))


_CURRENT, _FIRST = torch.device("cuda"), torch.device("cuda", 0)


def _indexed(value: Any) -> Any:
    named = isinstance(value, str) and value == "cuda"
    return _FIRST if named or (isinstance(value, torch.device) and value == _CURRENT) else value


def _contiguous(x: torch.Tensor) -> torch.Tensor:
    return x if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)


def _item(x: torch.Tensor, at: Any) -> torch.Tensor:
    """``x[at]``, without its arithmetic of an ellipsis between other indices."""
    places = at if isinstance(at, tuple) else (at,)
    if places[:1] == (...,):
        skipped = x.dim() - sum(place is not None for place in places[1:])
        places = (*[slice(None)] * skipped, *places[1:])
    dim, tensors = 0, list[Any]()
    for place in places:
        if place is None:
            x = x.unsqueeze(dim)
        elif isinstance(place, slice):
            size = x.size(dim)
            start, stop, step = place.indices(size)
            if (start, stop, step) != (0, size, 1):
                x = torch.ops.aten.slice(x, dim, start, stop, step)
        elif isinstance(place, torch.Tensor):
            tensors += [None] * (dim - len(tensors)) + [place]
        elif place is not Ellipsis:
            x = x.select(dim, int(place))
            continue
        dim += 1
    return torch.ops.aten.index(x, tensors) if tensors else x


_METHODS: dict[Any, Any] = {
    torch.Tensor.contiguous: _contiguous,
    torch.Tensor.__getitem__: _item,
    torch.Tensor.__setitem__: lambda x, at, value: torch.ops.aten.copy_(_item(x, at), value),
    torch.Tensor.__invert__: torch.bitwise_not,
    torch.Tensor.copy_: torch.ops.aten.copy_,
    torch.Tensor.addmm_: torch.ops.aten.addmm_,
    torch.Tensor.add_: torch.ops.aten.add_,
}


class Cuda:
    """What of ``torch.cuda`` the package asks: a current device, its queue and its generator."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.device, self.queue, self.generator = 0, 0, Philox()
        for name, answer in {
            "current_device": lambda: self.device,
            "current_stream": lambda: SimpleNamespace(stream_id=self.queue),
            "device": self._on,
            "get_device_properties": lambda _: SimpleNamespace(multi_processor_count=132),
            "default_generators": [self.generator],
            "is_current_stream_capturing": lambda: False,
        }.items():
            patch.setattr(torch.cuda, name, answer)
        patch.setattr(launch, "available", lambda: True)

    @contextlib.contextmanager
    def _on(self, device: int) -> Iterator[None]:
        outer, self.device = self.device, device
        try:
            yield
        finally:
            self.device = outer


@contextlib.contextmanager
def cuda_mesh(size: int, rank: int = 0) -> Iterator[DeviceMesh]:
    """A mesh of GPUs on which nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with _Reachable():
            yield DeviceMesh("cuda", torch.arange(size), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def fakes() -> Iterator[FakeTensorMode]:
    """Fake tensors, without autograd."""
    with _Reachable(), FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        yield mode


def devices(*values: Any) -> set[str]:
    """Where the tensors in ``values`` lie."""
    return {str(t.device) for t in tree_leaves(values) if isinstance(t, torch.Tensor)}


class Context(SimpleNamespace):
    """What an autograd function keeps from its forward, where autograd does not call it."""

    needs_input_grad = (True,) * 8

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def mark_dirty(self, *_: Any) -> None:
        """Nothing is recorded that would have to know."""

    def set_materialize_grads(self, _: bool) -> None:
        """Nothing is made where there is no gradient."""

    def mark_non_differentiable(self, *_: Any) -> None:
        """Nothing is differentiated."""
