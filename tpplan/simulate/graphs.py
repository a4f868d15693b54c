"""The collectives of a graph that inductor compiled, and which it fused with products."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from tpplan.compat import as_traced, module_of, options_fusing, values_of
from tpplan.simulate.recorder import KINDS, dimension_of, group_of
from tpplan.simulate.steps import Collective, ring_bytes


def options_reading(keep: Callable[[list[Collective]], None]) -> dict[str, Any]:
    """For ``torch.compile``: products are fused, and ``keep`` is given each graph's collectives."""
    return options_fusing(lambda graph, backward: keep(_found(graph, backward)))


def _found(graph: fx.Graph, backward: bool) -> list[Collective]:
    phase = "backward" if backward else "forward"
    return [_collective(node, phase) for node in graph.nodes if _kind(node) is not None]


def _kind(node: fx.Node) -> str | None:
    """Of a collective; a graph has those of the functional ops only."""
    func: Any = node.target
    is_op = isinstance(func, torch._ops.OpOverload) and func.namespace != "c10d"
    return KINDS.get(func._schema.name) if is_op else None


def _collective(node: fx.Node, phase: str) -> Collective:
    func: Any = node.target
    kind, fused = KINDS[func._schema.name], func.namespace == "symm_mem"
    group = group_of(func, node.args, node.kwargs)
    ranks = dist.get_process_group_ranks(group)
    module, reason = _served(node.all_input_nodes[1:]) if fused else (module_of(node), "")
    shape = _fused(node, kind, len(ranks)) if fused else _largest(node)
    dtype = str(values_of(node.all_input_nodes[0])[0].dtype).removeprefix("torch.")
    return Collective(
        phase=phase,
        module=module,
        kind=kind,
        shape=shape,
        dtype=dtype,
        bytes=ring_bytes(kind, len(ranks), shape, dtype),
        reason=reason,
        dimension=dimension_of(group),
        ranks=len(ranks),
        stride=ranks[1] - ranks[0] if len(ranks) > 1 else 1,
        fused=fused,
    )


def _served(matrices: list[fx.Node]) -> tuple[str, str]:
    """The module whose products they are the factors of, and the products in it."""
    paths = [module_of(matrix).split(".") for matrix in matrices]
    deepest = min(len(path) for path in paths) - 1
    shared = next(n for n in range(deepest, -1, -1) if len({(*path[:n],) for path in paths}) == 1)
    return ".".join(paths[0][:shared]), ", ".join(".".join(path[shared:]) for path in paths)


def _largest(node: fx.Node) -> tuple[int, ...]:
    """What is sent or what comes of it, whichever is the whole."""
    return max((s for n in (node, *node.all_input_nodes) for s in _shapes(n)), key=math.prod)


def _fused(node: fx.Node, kind: str, ranks: int) -> tuple[int, ...]:
    """Of a gather what it yields, of a scattered product the product."""
    (rows,), (matrix,), *_ = map(_shapes, node.all_input_nodes)
    if kind == "reduce_scatter":
        return *rows[:-1], matrix[-1]
    return tuple(n * ranks if dim == node.args[2] else n for dim, n in enumerate(rows))


def _shapes(node: fx.Node) -> list[tuple[int, ...]]:
    return [tuple(map(as_traced, value.shape)) for value in values_of(node)]
