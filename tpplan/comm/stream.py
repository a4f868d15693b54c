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
from tpplan.comm import traced
from tpplan.comm.collectives import Group, Site, chunk, pad
from tpplan.comm.conjugates import Transition, join, split
from tpplan.comm.randomness import Randomness
from tpplan.comm.sharded import Sharded, Source, Window, rows_of, whole_of


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
        source: of the stream in its global form; anchor: a tensor that has it.
    """

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
        site = Site("", "the stream, gathered")
        self.source = Source(mesh, self.group, site, self.randomness)
        self.anchor = traced.anchor(self.source)

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
        if isinstance(x, Window):
            return split(x.to_local(), self.dim, self.source.transition)
        if not self.is_sharded(x):
            x = x.redistribute(placements=[Shard(self.dim)])
        rows = chunk(x.size(self.dim), self.group.size)
        if torch.compiler.is_compiling():
            return traced.rows_of(x, self.dim, rows)
        if not isinstance(x, Sharded):
            return pad(x.to_local(), self.dim, rows)
        return rows_of(x, rows)

    def to_global(self, local: torch.Tensor, length: int, dim: int | None = None) -> DTensor:
        """The DTensor of global ``length`` along ``dim`` whose padded chunk is ``local``."""
        dim = self.dim if dim is None else dim
        if torch.compiler.is_compiling():
            self.source.spec(local, length, dim)  # looked up, sizes are numbers: a graph for each
            return traced.whole_of(local, self.anchor, length, dim)
        x = whole_of(local, self.source, length, dim)
        if dim == self.dim and local.size(dim) * self.group.size == length:
            # the next element of the stack takes the chunk from here and skips both conversions;
            # a padded one would not see what is written into the local tensor of x
            x._tpplan_chunk = (local, version_of(x))  # type: ignore[attr-defined]
        return x

    def whole(self, x: DTensor, transition: Transition) -> torch.Tensor:
        """The full tensor of a DTensor stream, for code that is the same on every rank."""
        length = x.size(self.dim)
        return join(self.to_local(x), self.dim, length, transition)


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
