"""Out-of-place functional collectives on local tensors, each under the name of what asked for it.

Each is started by a function of its own, which gives a ``Handle``: what runs before its ``wait``
runs beside the sending. The raw ``torch.ops._c10d_functional`` ops are called directly: their
Python wrappers cost two to three times as much.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from tpplan.compat import (
    FakeTensor,
    Uncompiled,
    always,
    below_autograd,
    dispatch_is_observed,
    dispatch_modes,
    functions_are_observed,
    fused_all_gather_matmul,
    fused_matmul_reduce_scatter,
    is_wrapped,
)
from tpplan.kernels.transition import is_view, pack, unpack

_ops = torch.ops._c10d_functional
_wait = _ops.wait_tensor
_STEP, _PRIME = 1_000_003, 2**61 - 1  # of a polynomial hash
# others may be more than what they hold
_WRITTEN = (torch.Tensor, FakeTensor)

UNTRANSFORMED = (
    "torch.func's transforms (grad, vjp, vmap, jvp) do not go through the collectives of a sharded "
    "model; use torch.autograd.grad, with create_graph=True for gradients of gradients, and one "
    "call for each sample"
)


class Ledger:
    """What a rank does over a group, for comparing it with what the others do.

    Attributes:
        sent: a number for what it has sent, and in which order; but for what compiled graphs send.
        noting: takes down what the rank holds to be alike on all ranks; None where nothing does.
    """

    def __init__(self) -> None:
        self.sent = 0
        self.noting: Callable[[torch.Tensor, Site], None] | None = None

    def send(self, site: Site) -> None:
        """One more collective comes from ``site``."""
        self.sent = (self.sent * _STEP + site.number) % _PRIME

    def share(self, x: torch.Tensor, site: Site) -> None:
        """``x`` is about to be shared out at ``site``, as on the other ranks."""
        if self.noting is not None:
            self.noting(x, site)


@dataclass(frozen=True)
class Group:
    """The ranks of one tensor-parallel group, as the collectives need them.

    ``mesh``: of these ranks, for what is placed on them. ``fuse``: whether the copies before and
    after a collective are kernels' work. ``ledger``: of what all its ranks should do alike.
    """

    mesh: DeviceMesh = field(compare=False, repr=False)
    name: str
    size: int
    rank: int
    fuse: bool = False
    ledger: Ledger = field(default_factory=Ledger, compare=False, repr=False)

    @classmethod
    def of(cls, mesh: DeviceMesh, fuse: bool = False) -> Group:
        """The group of a 1-D mesh."""
        return cls(mesh, mesh.get_group().group_name, mesh.size(), mesh.get_local_rank(), fuse)


@dataclass(frozen=True)
class Site:
    """Where a collective comes from: the module it serves, why, and the rule that caused it.

    ``phase`` is set where it is not the phase the collective happens to be issued in; ``routed``
    where it hangs on numbers how much is sent to whom; ``fused`` where an op sends beside the
    products that it makes.
    """

    module: str
    reason: str
    rule: str | None = None
    phase: str | None = None
    routed: bool = False
    fused: bool = False

    @functools.cached_property
    def number(self) -> int:
        """The same in all processes, as ``hash`` is not."""
        return zlib.crc32(f"{self.module} {self.reason} {self.phase}".encode())


class Observer(TorchDispatchMode):
    """A mode that is told the site of each collective just before it sees the op.

    Modes go with autograd to the threads that run its backward on a GPU.
    """

    def at(self, site: Site) -> None:
        """The next collective comes from ``site``."""


class Handle:
    """A collective that was started; all ranks start theirs in the same order.

    ``wait``, once, gives the result; what the collective reads must not be changed before.

    Attributes:
        sent: the tensor that the collective writes, whose values are there after the wait.
    """

    __slots__ = ("_finish", "_site", "sent")

    def __init__(
        self, sent: torch.Tensor, site: Site, finish: Callable[[Any], Any] | None = None
    ) -> None:
        self.sent, self._site, self._finish = sent, site, finish

    def wait(self) -> torch.Tensor:
        """The result, once it has arrived; outside autograd.

        Raises:
            RuntimeError: where another rank does not come to it, or has died.
        """
        if torch.compiler.is_compiling():
            sent = _wait(self.sent)
        else:
            with below_autograd():
                try:
                    sent = _wait(self.sent)
                except RuntimeError as error:
                    site = self._site
                    raise RuntimeError(
                        f"{site.module or 'the model'}: waited in vain for the other ranks "
                        f"({site.reason}); one of them died, or does something else: {error}"
                    ) from error
        return sent if self._finish is None else self._finish(sent)  # type: ignore[no-any-return]


def _started(site: Site, group: Group, op: Any, x: torch.Tensor, *how: Any) -> torch.Tensor:
    """What the collective ``op`` writes, issued from ``site``."""
    if torch.compiler.is_compiling():
        return op(x, *how, group.name)  # type: ignore[no-any-return]
    untransformed(x, site.module)
    _tell(site, group, x)
    with below_autograd():
        return op(x, *how, group.name)  # type: ignore[no-any-return]


def untransformed(x: torch.Tensor | None, module: str) -> None:
    """Refuse what torch makes collectives of one by one, and stacks before they have arrived.

    Raises:
        RuntimeError: where ``x`` is what one of torch.func's transforms computes with.
    """
    if x is not None and is_wrapped(x):
        raise RuntimeError(f"{module or 'the model'}: {UNTRANSFORMED}")


def _tell(site: Site, group: Group, x: torch.Tensor) -> None:
    """Where the next collective comes from, to who observes, and to who compares the ranks."""
    if type(x) is not FakeTensor:  # of which one rank alone may make a run
        group.ledger.send(site)
    if dispatch_is_observed():
        for mode in dispatch_modes():
            if isinstance(mode, Observer):
                mode.at(site)


def chunk(length: int, size: int) -> int:
    """Rows a rank holds of ``length`` rows shared by ``size`` ranks, the last ones padded."""
    return -(-length // size)


def pad(x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """``x`` with zeros behind it along ``dim`` up to ``length``; ``x`` itself where it fits."""
    missing = length - x.size(dim)
    if always(missing == 0):
        return x
    return F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, missing])


def first_rows(x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """The first ``length`` of ``x`` along ``dim``; a view, where it is no graph's.

    A graph for all lengths may not ask whether the view is contiguous, as ops do: it is where
    nothing is cut off. There the rows are cut where they are the outermost.
    """
    if not torch.compiler.is_compiling() and type(length) is int:
        return x.narrow(dim, 0, length)
    return packed(packed(x.movedim(dim, 0)).narrow(0, 0, length).movedim(0, dim))


def packed(x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy, whose strides follow from its shape.

    Of one batch ``contiguous()`` keeps a part as it lies in the whole, with a stride that a view
    of it has not; ``torch.compile`` does not bear guards on two that differ so.
    """
    return x.clone(memory_format=torch.contiguous_format)


def unviewed(x: torch.Tensor) -> torch.Tensor:
    """``x``, in the same memory: what an autograd function gives may be changed in place then."""
    return alias_of(x) if x._is_view() else x


def alias_of(x: torch.Tensor) -> torch.Tensor:
    """Another tensor in the memory of ``x``, which autograd does not take for a view of it."""
    if torch.compiler.is_compiling():
        return torch.ops.aten._unsafe_view(x, x.shape)  # type: ignore[no-any-return]
    return x.data


def local_slice(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """This rank's padded chunk of a whole tensor; nothing is sent."""
    rows = chunk(x.size(dim), group.size)
    if torch.compiler.is_compiling():  # whose graph for all lengths has no shorter chunk
        return pad(x, dim, rows * group.size).narrow(dim, rows * group.rank, rows).clone()
    start = min(rows * group.rank, x.size(dim))
    stop = min(start + rows, x.size(dim))
    return packed(pad(x.narrow(dim, start, stop - start), dim, rows))


def start_all_reduce(x: torch.Tensor, group: Group, site: Site, op: str = "sum") -> Handle:
    """Begin ``all_reduce``."""
    return Handle(_started(site, group, _ops.all_reduce, x, op), site)


def all_reduce(x: torch.Tensor, group: Group, site: Site, op: str = "sum") -> torch.Tensor:
    """Sum, or what ``op`` says ("max"), over the ranks."""
    return start_all_reduce(x, group, site, op).wait()


def start_all_reduce_(x: torch.Tensor, group: Group, site: Site) -> Handle:
    """Begin to sum over the ranks into ``x`` itself, contiguous and nobody else's."""
    return Handle(_started(site, group, _ops.all_reduce_, x, "sum"), site)


def may_hold_sum(x: torch.Tensor) -> bool:
    """Whether its sum over the ranks may be written into ``x``, which is nobody else's.

    Compilers make that of it by themselves. Modes that users enter look for the op that they know,
    or keep what was given before it (selective checkpointing).
    """
    if torch.compiler.is_compiling() or functions_are_observed() or type(x) not in _WRITTEN:
        return False
    if dispatch_is_observed():
        known = (Observer, Uncompiled)
        if not all(isinstance(mode, known) for mode in dispatch_modes()):
            return False
    return x.is_contiguous() and not x._is_view()


def start_stacked(x: torch.Tensor, group: Group, site: Site) -> Handle:
    """Begin to gather (ranks, *shape) of what each rank has, of the shape of ``x``."""
    whole = _started(site, group, _ops.all_gather_into_tensor, x.contiguous(), group.size)
    return Handle(whole, site, lambda sent: sent.view(group.size, *x.shape))


def start_reduce_scatter_stacked(x: torch.Tensor, group: Group, site: Site) -> Handle:
    """Begin to sum (ranks, ...) over the ranks, each of which gets its part of the first."""
    flat = x.flatten(0, 1).contiguous()
    part = _started(site, group, _ops.reduce_scatter_tensor, flat, "sum", group.size)
    return Handle(part, site, lambda sent: sent.view(x.shape[1:]))


def start_all_gather(x: torch.Tensor, dim: int, length: int, group: Group, site: Site) -> Handle:
    """Begin ``all_gather``."""
    op = _ops.all_gather_into_tensor
    whole = _started(site, group, op, x.contiguous(), group.size)
    return Handle(whole, site, functools.partial(_unpacked, list(x.shape), dim, length, group))


def all_gather(x: torch.Tensor, dim: int, length: int, group: Group, site: Site) -> torch.Tensor:
    """The whole tensor, ``length`` along ``dim``, from every rank's padded chunk of it."""
    return start_all_gather(x, dim, length, group, site).wait()


def _unpacked(
    shape: list[int], dim: int, length: int, group: Group, chunks: torch.Tensor
) -> torch.Tensor:
    """The whole tensor of all ranks' ``chunks`` of ``shape``, which lie one after the other."""
    rows = shape[dim] * group.size
    if torch.compiler.is_compiling():  # the forms that inductor fuses with products
        whole = torch.cat(chunks.split(shape[0]), dim) if dim else chunks
        return whole if always(rows == length) else first_rows(whole, dim, length)
    if group.fuse:
        return unpack(chunks.view(group.size, *shape), dim, length)
    if shape[:dim].count(1) != dim:
        chunks = chunks.view(group.size, *shape).movedim(0, dim)
    whole = chunks.reshape([*shape[:dim], rows, *shape[dim + 1 :]])
    return whole if always(rows == length) else first_rows(whole, dim, length)


def all_gather_products(
    x: torch.Tensor, matrices: list[torch.Tensor], dim: int, group: Group, site: Site
) -> list[torch.Tensor]:
    """The whole of every rank's ``x`` along ``dim``, and its products, by torch's fused op."""
    _tell(dataclasses.replace(site, fused=True), group, x)
    whole, made = fused_all_gather_matmul(x, matrices, dim, group.name)
    return [whole, *(y.contiguous() for y in made)]


def product_reduce_scatter(
    x: torch.Tensor, matrix: torch.Tensor, dim: int, group: Group, site: Site
) -> torch.Tensor:
    """This rank's rows along ``dim`` of the product, summed over the ranks, by torch's op."""
    _tell(dataclasses.replace(site, fused=True), group, x)
    return fused_matmul_reduce_scatter(x, matrix, dim, group.name).contiguous()


def all_to_all(
    x: torch.Tensor, sent: list[int], received: list[int], group: Group, site: Site
) -> torch.Tensor:
    """The rows that the ranks have for this one, in their order.

    Args:
        x: (rows, ...), first those for rank 0.
        sent, received: how many rows go to each rank, and come from it.
    """
    op = _ops.all_to_all_single
    return Handle(_started(site, group, op, x.contiguous(), received, sent), site).wait()


def start_reduce_scatter(
    x: torch.Tensor,
    dim: int,
    group: Group,
    site: Site,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Handle:
    """Begin ``reduce_scatter``."""
    shape = list(x.shape)
    rows = chunk(shape[dim], group.size)
    if torch.compiler.is_compiling():
        x = pad(x if dtype is None else x.to(dtype), dim, rows * group.size)
        x = torch.cat(x.split(rows, dim)) if dim else x
    elif group.fuse:
        copied = dim == x.dim() - 2 and not is_view(shape, dim, group.size)
        early = bias if copied else None
        bias = bias if early is None else None
        x = pack(x, dim, group.size, bias=early, dtype=dtype).flatten(0, 1)
    else:
        x = pad(x if dtype is None else x.to(dtype), dim, rows * group.size)
        # ranks times what a chunk begins with: the result is a chunk, and a view of nothing
        if shape[:dim].count(1) < dim:
            split = [*shape[:dim], group.size, rows, *shape[dim + 1 :]]
            x = x.reshape(split).movedim(dim, 0).contiguous().flatten(0, 1)
        elif dim > 0:
            x = x.reshape(group.size, *shape[1:dim], rows, *shape[dim + 1 :])
    op = _ops.reduce_scatter_tensor
    part = _started(site, group, op, x.contiguous(), "sum", group.size)
    return Handle(part, site, None if bias is None else functools.partial(_shifted, bias))


def reduce_scatter(
    x: torch.Tensor,
    dim: int,
    group: Group,
    site: Site,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """This rank's padded chunk of the sum over the ranks of a whole tensor.

    Args:
        bias: of the last dimension, added to the sum.
        dtype: that is summed and returned, if not that of ``x``.
    """
    return start_reduce_scatter(x, dim, group, site, bias, dtype).wait()


def _shifted(bias: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    return part + bias.to(part.dtype)  # autocast casts a Linear's bias, too
