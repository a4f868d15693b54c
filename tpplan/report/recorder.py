"""Every collective that is issued, with where it comes from and what it sends.

The same recorder serves an abstract execution and a real one: a dry run and a run are compared
collective by collective.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tpplan.comm import Site, observe

PHASES = ("forward", "backward", "gradient_sync", "optimizer")

_KINDS: Mapping[str, str] = {
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_reduce_": "all_reduce",
    "_c10d_functional::all_reduce_coalesced": "all_reduce",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::all_gather_into_tensor_out": "all_gather",
    "_c10d_functional::all_gather_into_tensor_coalesced": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional::reduce_scatter_tensor_coalesced": "reduce_scatter",
    "_c10d_functional::all_to_all_single": "all_to_all",
    "_c10d_functional::broadcast": "broadcast",
    "_dtensor::shard_dim_alltoall": "all_to_all",
    "c10d::allreduce_": "all_reduce",
    "c10d::allreduce_coalesced_": "all_reduce",
    "c10d::allgather_": "all_gather",
    "c10d::_allgather_base_": "all_gather",
    "c10d::reduce_scatter_": "reduce_scatter",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::alltoall_": "all_to_all",
    "c10d::alltoall_base_": "all_to_all",
    "c10d::broadcast_": "broadcast",
}


@dataclass(frozen=True)
class Collective:
    """One collective of one rank.

    Attributes:
        phase: forward, backward, gradient_sync, optimizer or startup.
        module: path of the module it serves; reason: what for; rule: the plan's pattern.
        shape, dtype: of the whole tensor: what an all-reduce sums, what an all-gather yields,
            what a reduce-scatter takes.
        bytes: sent by a rank with a ring algorithm over N ranks of D bytes: 2(N-1)/N D for an
            all-reduce, (N-1)/N D for the others (Thakur, Rabenseifner and Gropp 2005, section 4).
    """

    phase: str
    module: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    reason: str
    rule: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


class Recorder(TorchDispatchMode):
    """Records the collectives issued while it is active.

    ``phase`` names the phase that is running; see ``during``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[Collective] = []
        self.phase = "forward"
        self._site: Site | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Recorder:
        self._stack.enter_context(observe(self._at))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Attribute what is issued to ``phase``."""
        outer, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = outer

    def _at(self, site: Site) -> None:
        self._site = site

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        kind = _KINDS.get(func._schema.name)
        if kind is not None:
            self._record(kind, func, args, kwargs or {}, out)
        return out

    def _record(self, kind: str, func: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> None:
        site = self._site or Site("", "issued outside the rewritten modules")
        self._site = None
        given = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
        made = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)] or given
        tensor = max((*given, *made), key=lambda t: t.numel())
        size = _group_size(func, args, kwargs)
        rounds = 2 if kind == "all_reduce" else 1
        data = tensor.numel() * tensor.element_size()
        self.collectives.append(
            Collective(
                phase=site.phase or self.phase,
                module=site.module,
                kind=kind,
                shape=tuple(int(n) for n in tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                bytes=rounds * (size - 1) * data // size,
                reason=site.reason,
                rule=site.rule,
            )
        )


def _group_size(func: Any, args: Any, kwargs: Mapping[str, Any]) -> int:
    names = [a.name for a in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if "group_size" in given:
        return int(given["group_size"])
    if "group_name" in given:
        group = torch._C._distributed_c10d._resolve_process_group(given["group_name"])
        return group.size()
    if "process_group" in given:
        return dist.ProcessGroup.unbox(given["process_group"]).size()
    return dist.get_world_size()


def counts(collectives: list[Collective], phase: str) -> dict[str, int]:
    """How many collectives of each kind a phase issues; the three usual kinds always appear."""
    result = {"all_reduce": 0, "all_gather": 0, "reduce_scatter": 0}
    for collective in collectives:
        if collective.phase == phase:
            result[collective.kind] = result.get(collective.kind, 0) + 1
    return result
