"""Numbers that tell tensors of two processes apart, small enough to be sent."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from tpplan import compat
from tpplan.comm.collectives import Group

APART = 1e-2
"""Of a tensor's size: what rounding does not make on ranks that compute the same."""
_SUMS = 4
_PIECE = 2**16
"""Elements that are looked at together, at the least; of large tensors a 64th."""
_LARGE = 1e18
"""What is larger, or no number, stands for something masked."""
_WIDTH = 2**12
_MOST = 2**22
"""Elements that are brought to another precision together."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
# odd, below 2^63: of splitmix64 (Steele, Lea and Flood 2014)
FIRST, _SECOND = 0x1E3779B97F4A7C15, 0x14D049BB133111EB


def can_read(tensors: list[torch.Tensor], device_type: str) -> bool:
    """Whether there are numbers to compare; a CUDA graph that is recorded reads nothing back."""
    if compat.fakes_are_made() or any(t.is_meta for t in tensors):
        return False
    return not (device_type == "cuda" and torch.cuda.is_current_stream_capturing())


def fingerprint(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """A number for the values of ``tensor``, their places, its shape and its dtype."""
    if tensor.is_nested:  # its sizes have names of the process
        return torch.zeros((), dtype=torch.long, device=tensor.device)
    said = f"{tensor.dtype} {tuple(tensor.shape)}"
    if isinstance(tensor, DTensor):
        said = f"{said} {tensor.placements}"
        tensor = _replica(tensor, group)
    total = torch.full((), zlib.crc32(said.encode()), dtype=torch.long, device=tensor.device)
    if tensor.layout is not torch.strided:
        return total
    at = 0
    for piece in _pieces(tensor.detach().resolve_conj().resolve_neg(), _piece(tensor)):
        words = piece.view(_WORDS[piece.element_size()]).to(torch.long, copy=True)
        total += words.mul_(_weights(at, words).bitwise_or_(1)).sum()
        at += words.numel()
    return total


def projections(tensor: torch.Tensor) -> torch.Tensor:
    """(5,) in float64: the size of ``tensor``, and sums of its elements with signs that are random.

    The signs, of its rows times those of its columns, are the same on all ranks: the sums of two
    tensors differ by about the size of their difference. What is not finite, or as large as what
    masks scores, is left out; of a sparse or nested tensor all.
    """
    if tensor.layout is not torch.strided or tensor.is_nested or not tensor.numel():
        return torch.zeros(1 + _SUMS, dtype=torch.float64, device=tensor.device)
    x = _matrix(tensor.detach().resolve_conj().resolve_neg())
    exact = x.dtype in (torch.float64, torch.int32, torch.int64)
    dtype = torch.float64 if exact else torch.float32
    rows, columns = (_signs(n, x.device).to(dtype) for n in x.shape)
    each = max(1, _MOST // x.size(1))
    found = torch.zeros(1 + _SUMS, dtype=torch.float64, device=x.device)
    with torch.autocast(x.device.type, enabled=False):
        for some, signs in zip(x.split(each), rows.split(each, 1), strict=True):
            some = some.to(dtype)
            some = some.masked_fill(~(some.abs() < _LARGE), 0.0)
            found[0] += torch.linalg.vector_norm(some, dtype=torch.float64).square()
            found[1:] += ((signs @ some) * columns).sum(1)
    found[0].sqrt_()
    return found


def _matrix(x: torch.Tensor) -> torch.Tensor:
    """The elements of ``x`` in rows and columns; of a long or thin one with zeros behind them."""
    x = torch.view_as_real(x).reshape(*x.shape[:-1], -1) if x.is_complex() else x
    if x.dim() and max(x.size(-1), x.numel() // x.size(-1)) <= _PIECE:
        return x.reshape(-1, x.size(-1))
    width = min(x.numel(), _WIDTH)
    return F.pad(x.reshape(-1), (0, -x.numel() % width)).view(-1, width)


def are_apart(found: torch.Tensor, tolerance: float = APART) -> torch.Tensor:
    """Whether what a rank has is another tensor than that of the first, by their ``projections``.

    Args:
        found: (ranks, ..., 5). tolerance: of the size of the tensors.

    Returns:
        (ranks, ...), of bool.
    """
    return ((found - found[0]).abs() > tolerance * found[..., :1].amax(0)).any(-1)


def _signs(count: int, device: torch.device) -> torch.Tensor:
    """(4, count), each 1 or -1."""
    places = _mixed(torch.arange(count, device=device))
    return 2 * ((places >> torch.arange(_SUMS, device=device)[:, None]) & 1) - 1


def _weights(first: int, like: torch.Tensor) -> torch.Tensor:
    """A number for each element of ``like``, which is flat, by its place from ``first`` on."""
    return _mixed(torch.arange(first, first + like.numel(), device=like.device))


def _mixed(places: torch.Tensor) -> torch.Tensor:
    """A number for each place, in its memory."""
    places.mul_(FIRST).bitwise_xor_(places >> 29).mul_(_SECOND)
    return places.bitwise_xor_(places >> 32)


def _replica(tensor: DTensor, group: Group) -> torch.Tensor:
    """What all ranks of the group must hold alike of ``tensor``."""
    mesh, local = tensor.device_mesh, compat.local_of(tensor)
    for i, placement in enumerate(tensor.placements):
        if mesh.get_group(i).group_name == group.name and placement.is_replicate():
            return local
    return local.new_empty(0)


def _piece(tensor: torch.Tensor) -> int:
    return max(_PIECE, tensor.numel() // 64)


def _pieces(tensor: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    """All elements in order, in flat pieces of at most ``limit``; little is copied at a time."""
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous() or tensor.numel() <= limit:
        yield from tensor.contiguous().view(-1).split(limit)
        return
    each = math.prod(tensor.shape[1:])
    for part in tensor.split(max(1, limit // each)):
        yield from _pieces(part if len(part) > 1 else part[0], limit)
