"""The buffers of one rank on all of them, as its parameters."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tpplan.rewrite.launch import everyones, has_others


@contextlib.contextmanager
def buffers_of(model: nn.Module, mesh: DeviceMesh | None, source: int | None) -> Iterator[None]:
    """Give ``model`` the buffers of rank ``source`` of each group, where it has others.

    And its parameters that are integers, which the proof does not draw anew. In place, as other
    attributes may be the same tensor; whatever is raised within it, the model has its own again.
    ``source`` None trusts each rank's own. So it is of what is on the meta device on some rank, or
    has no numbers of its own there (expanded, sparse, other classes).
    """
    if source is None or not has_others(mesh):
        yield
        return
    counts = (p for p in model.parameters() if not (p.is_floating_point() or p.is_complex()))
    buffers = [*model.buffers(), *counts]
    everyone = everyones([_checksum(b) if _is_plain(b) else None for b in buffers], mesh)
    sums = (set(those) for those in zip(*everyone, strict=True))
    apart = [b for b, of in zip(buffers, sums, strict=False) if len(of) > 1 and None not in of]
    before = [b.clone() for b in apart]
    try:
        for buffer in apart:
            _write(buffer, _from(source, buffer, mesh))
        yield
    except BaseException:
        for buffer, own in zip(apart, before, strict=True):
            _write(buffer, own)
        raise


def _is_plain(buffer: torch.Tensor) -> bool:
    """Whether it has numbers of its own, each in one place."""
    if type(buffer) not in (torch.Tensor, nn.Parameter) or buffer.layout is not torch.strided:
        return False
    spread = any(n > 1 and not step for n, step in zip(buffer.shape, buffer.stride(), strict=True))
    return not buffer.is_meta and not spread


def _bytes(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def _checksum(buffer: torch.Tensor) -> int:
    return zlib.crc32(_bytes(buffer).cpu().numpy().data)


def _from(source: int, buffer: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    sent = _bytes(buffer).to(mesh.device_type, copy=True)
    for dim in reversed(range(mesh.ndim)):
        dist.broadcast(sent, group=mesh.get_group(dim), group_src=source)
    return sent.to(buffer.device).view(buffer.dtype).view(buffer.shape)


def _write(buffer: torch.Tensor, value: torch.Tensor) -> None:
    with torch.inference_mode():  # which a buffer may have been made in
        buffer.copy_(value)
