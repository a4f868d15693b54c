"""DTensors are made quickly, as torch makes them where it exports; copies of parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch._library.simple_registry import find_torch_dispatch_rule
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode

from tpplan.compat import as_parameter, simulate, spec_of, tensors

DETACH = torch.ops.aten.detach.default


def job(mesh: DeviceMesh) -> tuple[int, int]:
    """How often torch's own constructor ran: in eager code, and while a model is exported."""
    x = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
    ran: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "_exported", lambda *args, **kwargs: ran.append(args))
        x.detach()
        made = DTensor(x._local_tensor, spec_of(x), requires_grad=False)
        eager = len(ran)
        patch.setattr(torch.compiler, "is_exporting", lambda: True)
        DTensor(x._local_tensor, spec_of(x), requires_grad=False)
    assert torch.equal(made._local_tensor, x._local_tensor) and made.shape == x.shape
    return eager, len(ran)


def test_the_constructor() -> None:
    assert simulate(1, job) == [(0, 1)]


def test_no_graph_is_made_of_the_constructor() -> None:
    """Where compiled code is left for a while, frames that torch's own code makes are looked at."""
    frames: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        frames.append("graph")
        return graph.forward

    def job(mesh: DeviceMesh) -> tuple[float, list[str]]:
        def run(x: torch.Tensor) -> torch.Tensor:
            y = x + 1
            torch._dynamo.graph_break()
            made = DTensor.from_local(y, mesh, [Shard(0)]).detach().to_local()
            torch._dynamo.graph_break()
            return made + 1

        frames.clear()
        return torch.compile(run, backend=backend)(torch.ones(2)).sum().item(), list(frames)

    total, seen = simulate(1, job)[0]
    assert total == 6 and set(seen) <= {"graph"}
    for made in (DTensor.__init__, find_torch_dispatch_rule(DETACH, DTensor)):
        assert not torch._C._dynamo.eval_frame._debug_get_cache_entry_list(made.__code__)


def detached_job(mesh: DeviceMesh) -> None:
    """What is detached is as torch makes it: of the same memory, version and sharding."""
    x = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)]).requires_grad_()
    y = x.detach()
    assert type(y) is DTensor and not y.requires_grad and spec_of(y) == spec_of(x)
    assert y._local_tensor is not x._local_tensor
    assert y._local_tensor.data_ptr() == x._local_tensor.data_ptr()
    with torch.no_grad():
        y.add_(1)
    assert x._version == y._version == 1
    given: list[torch.Tensor] = []
    x.register_hook(given.append)
    for accumulated in (3.0, 6.0):
        (x * 3).to_local().sum().backward()
        assert type(x.grad) is DTensor and x.grad is not given[-1]
        assert torch.equal(x.grad._local_tensor, torch.full((2, 3), accumulated))
    with CommDebugMode() as counted:
        assert type(x.detach()) is DTensor
    assert counted.get_total_counts() == 0
    # another class is its own
    assert type(OwnTensor.of(x).detach()) is not DTensor


class OwnTensor(DTensor):
    """A user's."""

    @classmethod
    def of(cls, x: DTensor) -> OwnTensor:
        return torch.Tensor._dtensor__new__(cls, x._local_tensor, spec_of(x), requires_grad=False)  # type: ignore[attr-defined, no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is DETACH
        return cls.of(args[0])


def test_detach() -> None:
    simulate(1, detached_job)


def copied_job(mesh: DeviceMesh) -> None:
    """A copy is as that of a plain parameter is: without the gradient, and once for all holders."""

    def made() -> nn.Parameter:
        p = nn.Parameter(DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)]))
        (p * 3).sum().backward()  # type: ignore[no-untyped-call]
        return p

    p, others = made(), made()
    as_parameter(p)  # type: ignore[arg-type]
    p.remark = [1]  # type: ignore[attr-defined]
    twins = copy.deepcopy({"a": p, "b": p, "as a key": {p: 1}, "gradient": p.grad})
    twin: Any = twins["a"]
    assert type(twin) is DTensor and twin._is_param and twin.requires_grad
    assert twin.grad is None and p.grad is not None
    assert twins["b"] is twin and next(iter(twins["as a key"])) is twin  # type: ignore[arg-type]
    assert torch.equal(twins["gradient"]._local_tensor, torch.full((2, 3), 3.0))  # type: ignore[union-attr]
    assert twin.remark == [1] and twin.remark is not p.remark  # type: ignore[attr-defined]
    with torch.no_grad():
        twin.zero_()
    assert torch.equal(p.full_tensor(), torch.ones(2, 3))  # type: ignore[attr-defined]
    (twin * 2).sum().backward()
    assert copy.deepcopy(twin).grad is None  # a copy's copy
    assert not copy.deepcopy(p.requires_grad_(False)).requires_grad
    assert copy.deepcopy(others).grad is not None  # not tpplan's: as torch has it


def test_copies_of_parameters() -> None:
    simulate(1, copied_job)
