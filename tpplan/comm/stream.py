"""The sequence-sharded stream: the residual stream of a model under sequence parallelism.

Between the modules of a model, where code runs that nobody may edit, the stream is a DTensor with
the *global* shape, ``Shard(dim)``: that code sees the true sequence length, and what it computes
is right or fails loudly. Inside an element of the layer stack it is this rank's plain chunk,
⌈length/size⌉ rows, the last ones padded with zeros; nothing there costs a DTensor dispatch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tpplan import compat
from tpplan.comm.collectives import Group, chunk, pad
from tpplan.comm.conjugates import Transition, join
from tpplan.comm.randomness import Randomness


class Stream:
    """What the rewritten modules of one model share while they run.

    Attributes:
        mesh: the 1-D tensor-parallel mesh; group: its ranks.
        sequence_parallel: whether the stream is sharded at all.
        dim: the sequence dimension.
        fused: the kinds of kernels that run.
        length: the global sequence length while an element of the stack runs, else None.
        shared: what boundaries that share an input have made of it, while a forward runs.
        whole_results: whether the user is given full tensors only, no sharded logits.
        randomness: the random sequences of this rank.
    """

    _queue: int | None = None

    def __init__(
        self,
        mesh: DeviceMesh,
        sequence_parallel: bool,
        dim: int,
        fused: frozenset[str] = frozenset(),
    ) -> None:
        self.mesh = mesh
        self.fused = fused
        self.group = Group.of(mesh, "sequence_transition" in fused)
        self.sequence_parallel = sequence_parallel
        self.dim = dim
        self.length: int | None = None
        self.shared: dict[Any, tuple[Any, ...]] = {}
        self.whole_results = True
        self.randomness = Randomness(self.group.rank, mesh.device_type)
        self._depth = 0
        self._specs: dict[tuple[Any, ...], compat.DTensorSpec] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Stream:
        return self

    @property
    def nested(self) -> bool:
        """Whether a module that contains rewritten modules is running its forward."""
        return self._depth > 0

    @property
    def inside(self) -> bool:
        """Whether the caller is the model's own code rather than the user's."""
        return self.nested or compat.in_backward()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """While a module that contains rewritten modules runs its own forward."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self.shared.clear()

    def is_sharded(self, x: object) -> bool:
        """Whether ``x`` is the stream in its global form."""
        return isinstance(x, DTensor) and x.placements[0] == Shard(self.dim)

    def to_local(self, x: DTensor) -> torch.Tensor:
        """The plain padded chunk of a DTensor stream; one of other placements is redistributed."""
        kept = chunk_of(x)
        if kept is not None:
            return kept
        if not self.is_sharded(x):
            x = x.redistribute(placements=[Shard(self.dim)])
        if torch.compiler.is_compiling():
            return pad(x.to_local(), self.dim, chunk(x.size(self.dim), self.group.size))
        return _ToLocal.apply(x, self)  # type: ignore[no-any-return, no-untyped-call]

    def to_global(self, local: torch.Tensor, length: int, dim: int | None = None) -> DTensor:
        """The DTensor of global ``length`` along ``dim`` whose padded chunk is ``local``."""
        dim = self.dim if dim is None else dim
        if torch.compiler.is_compiling():
            spec = self._spec(local, length, dim)
            return DTensor.from_local(
                self._unpadded(local, length, dim),
                self.mesh,
                [Shard(dim)],
                run_check=False,
                shape=spec.tensor_meta.shape,  # type: ignore[union-attr]
                stride=spec.tensor_meta.stride,  # type: ignore[union-attr]
            )
        x: DTensor = _ToGlobal.apply(local, self, length, dim)  # type: ignore[no-untyped-call]
        if dim == self.dim and local.size(dim) * self.group.size == length:
            # the next element of the stack takes the chunk from here and skips both conversions;
            # a padded one would not see what is written into the local tensor of x
            x._tpplan_chunk = (local, version_of(x))  # type: ignore[attr-defined]
        return x

    def whole(self, x: DTensor, transition: Transition) -> torch.Tensor:
        """The full tensor of a DTensor stream, for code that is the same on every rank."""
        length = x.size(self.dim)
        return join(self.to_local(x), self.dim, length, transition)

    def _unpadded(self, local: torch.Tensor, length: int, dim: int) -> torch.Tensor:
        rows = local.size(dim)
        if rows * self.group.size == length:
            return local
        mine = max(0, min(rows, length - rows * self.group.rank))
        return local.narrow(dim, 0, mine).contiguous()

    def moved(self) -> bool:
        """Whether a forward begins on another queue of the device (a CUDA stream) than the last.

        Autograd runs a node on the queue on which it was recorded. One that is kept from an earlier
        forward would draw this backward over to that queue; to capture it in a CUDA graph is then
        an error.
        """
        if torch.compiler.is_compiling():
            return False
        before, self._queue = self._queue, compat.queue_of(self.mesh.device_type)
        return before != self._queue

    def _spec(self, local: torch.Tensor, length: int, dim: int) -> compat.DTensorSpec:
        shape = list(local.shape)
        shape[dim] = length
        key = (*shape, dim, local.dtype)
        spec = self._specs.get(key)
        if spec is None:
            if len(self._specs) > 64:  # lengths change at every step of a decoding loop
                self._specs.clear()
            spec = compat.dtensor_spec(self.mesh, (Shard(dim),), shape, local.dtype)
            self._specs[key] = spec
        return spec


def chunk_of(x: DTensor) -> torch.Tensor | None:
    """The chunk ``x`` was made from, where taking it instead of ``x`` makes no difference.

    It does where ``x`` was changed in place since, where somebody waits for its gradient (hooks,
    FSDP2 among them), and where it entered the graph by itself (reentrant checkpointing).
    """
    kept = getattr(x, "_tpplan_chunk", None)
    if kept is None or kept[1] != version_of(x) or kept[0].requires_grad is not x.requires_grad:
        return None
    if x._backward_hooks or x.retains_grad:
        return None
    return kept[0]  # type: ignore[no-any-return]


def version_of(x: torch.Tensor) -> int:
    """How often ``x`` was changed in place; inference tensors do not say."""
    return 0 if x.is_inference() else x._version


class _ToGlobal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, stream: Stream, length: int, dim: int) -> DTensor:
        ctx.stream, ctx.dim, ctx.rows = stream, dim, local.size(dim)
        return compat.dtensor(
            stream._unpadded(local, length, dim), stream._spec(local, length, dim)
        )

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        if grad.placements[0] != Shard(ctx.dim):
            grad = grad.redistribute(placements=[Shard(ctx.dim)])
        local = grad.to_local() if compat.differentiates_backward() else compat.local_of(grad)
        return pad(local, ctx.dim, ctx.rows), None, None, None


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, stream: Stream) -> torch.Tensor:
        ctx.stream, ctx.length = stream, x.size(stream.dim)
        local = compat.local_of(x)
        rows = chunk(ctx.length, stream.group.size)
        if rows == local.size(stream.dim):
            return local.view_as(local)
        return pad(local, stream.dim, rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[DTensor | None, ...]:  # type: ignore[override]
        stream, dim = ctx.stream, ctx.stream.dim
        mine = stream._unpadded(grad, ctx.length, dim)
        return compat.dtensor(mine, stream._spec(grad, ctx.length, dim)), None
