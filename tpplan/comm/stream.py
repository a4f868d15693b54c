"""The sequence-sharded stream: the residual stream of a model under sequence parallelism.

Between the modules of a model, where code runs that nobody may edit, the stream is a DTensor with
the *global* shape, ``Shard(dim)``: that code sees the true sequence length, and what it computes
is right or fails loudly. Inside an element of the layer stack it is this rank's plain chunk,
⌈length/size⌉ rows, the last ones padded with zeros; nothing there costs a DTensor dispatch.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tpplan import compat
from tpplan.comm import traced
from tpplan.comm.collectives import Group, Site, chunk, pad
from tpplan.comm.conjugates import Transition, join, split
from tpplan.comm.pace import Pieces
from tpplan.comm.placements import is_cut
from tpplan.comm.randomness import Randomness
from tpplan.comm.sharded import Parted, Sharded, Window, rows_of, whole_of
from tpplan.comm.source import Source
from tpplan.comm.tangents import living

# runs that are remembered, for code of theirs that backward recomputes: of the last forwards
_REMEMBERED = 16384


class Run(NamedTuple):
    """One run of a module: the numbers of the autograd nodes that it recorded, and its length.

    Attributes:
        start, end: of its nodes' numbers, ``end`` left out.
        path: of the module.
        length: the global sequence length where the module is an element of the stack.
    """

    start: int
    end: int
    path: str
    length: int | None


@dataclass
class Parts:
    """What row-parallel layers of one running element keep back for the last of them to reduce.

    Attributes:
        grad: whether the element records gradients; code of it that does not is recomputed apart.
        kept: by the layers that are reduced together: the sum so far, and their biases.
    """

    grad: bool
    kept: dict[tuple[str, ...], tuple[torch.Tensor, tuple[torch.Tensor, ...]]] = field(
        default_factory=dict
    )


class Stream:
    """What the rewritten modules of one model share while they run.

    Attributes:
        mesh: the 1-D tensor-parallel mesh; group: its ranks.
        sequence_parallel: whether the stream is sharded at all.
        dim: the sequence dimension.
        fused: the kinds of kernels that run.
        length: the global sequence length while an element of the stack runs, else None; a module
            asks its own ``State``, which knows it in a recomputation as well.
        shared: what boundaries that share an input have made of it, while a rewritten module that
            runs others is called by the user; None where none is.
        started: the number of the autograd node with which the element, or head, last run began.
        entered: the length of the stream in its global form that last entered a region outside of
            the stack, which is what the region gives back.
        depth: how many modules that contain rewritten ones run their own forward.
        saves_rows: whether products keep a rank's rows of what was gathered for them.
        recomputed: forms of kernels whose results backward makes again, and products do not keep.
        pieces: into how many products and their collectives are cut; None where they are not.
        parts: of the element that runs, None where its layers are reduced one by one.
        running: the path of the element that runs, and the hooks on what is saved that it began
            with; None where none runs, or nothing is cut.
        whole_results: whether the user is given full tensors only, no sharded logits.
        shares_heads: whether ranks have the same key and value heads.
        hands_on: whether who calls the modules is to be given the stream in its global form.
        columns: the paths of modules of which each rank has its columns, or that normalise them;
            and of those that enter by themselves, who shares what enters.
        holders: of column-parallel layers, the path of the module that is given what enters them.
        randomness: the random sequences of this rank.
        source: of the stream in its global form; anchor: a tensor that has it.
        parted: of what else leaves the model, of which each rank has a part; with an anchor too.
    """

    _queue: int | None = None

    def __init__(
        self,
        mesh: DeviceMesh,
        sequence_parallel: bool,
        dim: int,
        fused: frozenset[str] = frozenset(),
        saves_rows: bool = False,
        recomputed: Iterable[type] = (),
        pieces: Pieces | None = None,
    ) -> None:
        self.mesh = mesh
        self.fused = fused
        self.group = Group.of(mesh, "sequence_transition" in fused)
        self.sequence_parallel = sequence_parallel
        self.dim = dim
        self.whole_results = True
        self.shares_heads = False
        self.columns: dict[str, tuple[str, ...]] = {}
        self.holders: dict[str, str] = {}
        self.saves_rows = saves_rows
        self.recomputed = frozenset(recomputed)
        self.pieces = pieces
        self.randomness = Randomness(self.group.rank, mesh.device_type)
        site = Site("", "the stream, gathered")
        self.source = Source(self.group, site, self.randomness, Sharded)
        living.add(self.source)
        self.anchor = traced.anchor(self.source)
        site = Site("", "what left the model in parts, gathered")
        self.parted = Source(self.group, site, self.randomness, Parted)
        self.parted_anchor = traced.anchor(self.parted)
        if sequence_parallel:
            compat.bind_all_to_sizes(Sharded)
        self._start()

    def _start(self) -> None:
        """Nothing runs, and nothing has run."""
        self.length: int | None = None
        self.shared: dict[Any, tuple[Any, ...]] | None = None
        self.parts: Parts | None = None
        self.running: tuple[str, object] | None = None
        self.started: int | None = None
        self.entered: int | None = None
        self.depth = 0
        self.hands_on = False
        self._runs: dict[int, deque[Run]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Stream:
        twin = copy.copy(self)
        twin._start()
        memo[id(self)] = twin
        return twin

    @property
    def nested(self) -> bool:
        """Whether a module that contains rewritten modules is running its forward."""
        return self.depth > 0

    def runs_alike(self, path: str) -> bool:
        """Whether what is at ``path`` runs in an element of which no part is recomputed by itself.

        Such a part would find nothing of what its modules shared with others.
        """
        if self.running is None or self.running[1] != compat.saved_tensors_hooks():
            return False
        return path == self.running[0] or _is_around(self.running[0], path)

    @contextlib.contextmanager
    def unsplit(self) -> Iterator[None]:
        """Within it, every rank has the whole stream, as without sequence parallelism."""
        self.sequence_parallel = False
        try:
            yield
        finally:
            self.sequence_parallel = True

    def begin(self) -> int | None:
        """A module runs that was called with none around it that runs; the next node's number."""
        start = self.now()
        # what its first element leaves to other nodes is left to the very first one, too
        self.started = None if start is None else max(start - 1, 0)
        self.shared, self.entered = {}, None
        return start

    def end(self, start: int | None, path: str) -> None:
        """The module at ``path`` that began so is over."""
        self.shared = None
        self.remember(start, path, None)

    def now(self) -> int | None:
        """The number of the next autograd node; None where none is recorded."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return None
        return compat.sequence_number()

    def remember(self, start: int | None, path: str, length: int | None) -> None:
        """Keep which autograd nodes a run that is over has recorded.

        Backward may recompute a part of it (activation checkpointing), when nothing runs that
        could tell that part how long the sequence is.
        """
        if start is None:
            return
        thread = threading.get_ident()
        runs = self._runs.get(thread)
        if runs is None:
            runs = self._runs[thread] = deque(maxlen=_REMEMBERED)
        runs.append(Run(start, compat.sequence_number(), path, length))

    def recalled(self, path: str) -> list[Run]:
        """The runs that the module at ``path`` was called in, where backward calls it again.

        They are those of modules around it that recorded the node whose backward needs it.
        """
        node = compat.running_node() if compat.in_backward() else None
        if node is None:
            return []
        found: list[Run] = []
        forgotten = False
        for runs in list(self._runs.values()):
            for run in reversed(runs):
                if run.end <= node:  # as those before it, which ended earlier
                    break
                if run.start <= node and _is_around(run.path, path):
                    found.append(run)
            else:
                forgotten = forgotten or len(runs) == _REMEMBERED
        if len({run.length for run in found if run.length is not None}) > 1 or (
            forgotten and not found
        ):
            raise RuntimeError(
                f"{path}: it cannot be told which forward activation checkpointing recomputes it "
                "for; checkpoint whole layers"
            )
        return found

    def is_sharded(self, x: object) -> bool:
        """Whether ``x`` is the stream in its global form."""
        return isinstance(x, DTensor) and not isinstance(x, Parted) and is_cut(x, self.dim)

    def to_local(self, x: DTensor) -> torch.Tensor:
        """The plain padded chunk of a DTensor stream; one of other placements is redistributed."""
        if isinstance(x, Window):
            return split(x.to_local(), self.dim, self.source.transition)
        if not self.is_sharded(x):
            x = x.redistribute(placements=[Shard(self.dim)])
        rows = chunk(x.size(self.dim), self.group.size)
        if torch.compiler.is_compiling():
            if isinstance(x, Sharded):
                return traced.rows_of(x, self.dim, rows)
            compat.bind_to_sizes(x)
        elif isinstance(x, Sharded):
            return rows_of(x, rows)
        elif compat.mesh_of(x) is self.mesh and type(compat.local_of(x)) is torch.Tensor:
            return rows_of(x, rows, self.source)
        return pad(x.to_local(), self.dim, rows)

    def part_of(self, x: Parted, dim: int) -> torch.Tensor:
        """This rank's part of what was cut evenly along ``dim``."""
        if torch.compiler.is_compiling():
            return traced.rows_of(x, dim, chunk(x.size(dim), self.group.size))
        return rows_of(x)

    def of_parts(self, part: torch.Tensor, dim: int) -> DTensor:
        """What leaves the model, of which this rank has a part along ``dim``."""
        length = part.size(dim) * self.group.size
        return _joined(part.contiguous(), (self.parted, self.parted_anchor), length, dim)

    def to_global(self, local: torch.Tensor, length: int, dim: int | None = None) -> DTensor:
        """The DTensor of global ``length`` along ``dim`` whose padded chunk is ``local``."""
        dim = self.dim if dim is None else dim
        return _joined(local, (self.source, self.anchor), length, dim)

    def whole(self, x: DTensor, transition: Transition) -> torch.Tensor:
        """The full tensor of a DTensor stream, for code that is the same on every rank."""
        length = x.size(self.dim)
        return join(self.to_local(x), self.dim, length, transition)

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


def _joined(local: torch.Tensor, source: tuple[Source, Sharded], length: int, dim: int) -> DTensor:
    """The tensor of which a rank has ``local``, of a source, which graphs know by its anchor."""
    if torch.compiler.is_compiling():
        return traced.whole_of(local, source[1], length, dim)
    return whole_of(local, source[0], length, dim)


def _is_around(outer: str, path: str) -> bool:
    return outer != path and (not outer or path.startswith(f"{outer}."))


def chunk_of(x: DTensor) -> torch.Tensor | None:
    """The chunk ``x`` was made from, where taking it instead of ``x`` makes no difference.

    It does where ``x`` was changed in place since, where somebody waits for its gradient (hooks,
    FSDP2 among them), and where it entered the graph by itself (reentrant checkpointing).
    """
    kept = getattr(x, "_tpplan_chunk", None)
    if kept is None or kept[1] != version_of(x) or kept[0].requires_grad is not x.requires_grad:
        return None
    return None if is_awaited(x) else kept[0]  # type: ignore[no-any-return]


def is_awaited(x: torch.Tensor) -> bool:
    """Whether somebody waits for the gradient of ``x`` itself."""
    return bool(x._backward_hooks) or x.retains_grad


def version_of(x: torch.Tensor) -> int:
    """How often ``x`` was changed in place; inference tensors do not say."""
    return 0 if x.is_inference() else x._version
