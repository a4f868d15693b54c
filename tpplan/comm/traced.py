"""The two conversions of a sharded tensor as ops, for torch.compile.

It cannot trace the constructor of a DTensor's subclass, but an op that such a tensor handles.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Shard

from tpplan import compat
from tpplan.comm.conjugates import split
from tpplan.comm.sharded import Sharded
from tpplan.comm.source import Source, wrapped

_library = torch.library.Library("tpplan", "FRAGMENT")
_library.define("whole_of(Tensor rows, Tensor like, int dim, SymInt length) -> Tensor")
_library.define("rows_of(Tensor x, int dim, SymInt count) -> Tensor")


def anchor(source: Source) -> Sharded:
    """A tensor that says of others which source they have."""
    mesh = source.mesh
    spec = compat.dtensor_spec(mesh, (Shard(0),), [source.group.size], torch.float32)
    return wrapped(torch.zeros(1, device=mesh.device_type), source, spec)  # type: ignore[return-value]


def whole_of(rows: torch.Tensor, like: Sharded, length: int, dim: int) -> Sharded:
    """See ``comm.sharded``."""
    return torch.ops.tpplan.whole_of(rows, like, dim, length)  # type: ignore[no-any-return]


def rows_of(x: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    """See ``comm.sharded``."""
    return torch.ops.tpplan.rows_of(x, dim, count)  # type: ignore[no-any-return]


def _keep_whole(ctx: Any, inputs: Any, output: Any) -> None:
    rows, like, dim, _ = inputs
    ctx.dim, ctx.count, ctx.source = dim, rows.size(dim), like._tpplan_source


def _rows_of_gradient(ctx: Any, grad: torch.Tensor) -> Any:
    if isinstance(grad, Sharded):
        return rows_of(grad, ctx.dim, ctx.count), None, None, None
    return split(grad, ctx.dim, ctx.source.transition), None, None, None


torch.library.register_autograd(
    "tpplan::whole_of", _rows_of_gradient, setup_context=_keep_whole, lib=_library
)


def _keep_rows(ctx: Any, inputs: Any, output: Any) -> None:
    x, dim, _ = inputs
    ctx.save_for_backward(x)
    ctx.dim, ctx.length = dim, x.size(dim)


def _whole_of_gradient(ctx: Any, grad: torch.Tensor) -> Any:
    (x,) = ctx.saved_tensors
    return whole_of(grad, x, ctx.length, ctx.dim), None, None


torch.library.register_autograd(
    "tpplan::rows_of", _whole_of_gradient, setup_context=_keep_rows, lib=_library
)
