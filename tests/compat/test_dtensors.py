"""DTensors are made quickly, and as torch makes them where it exports."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tpplan.compat import simulate, spec_of, tensors


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
    assert not torch._C._dynamo.eval_frame._debug_get_cache_entry_list(DTensor.__init__.__code__)
