"""What torch's own compiler makes of a graph, as it stands when its passes are through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves


def options_fusing(read: Callable[[fx.Graph, bool], None]) -> dict[str, Any]:
    """For ``torch.compile``: products are fused with what is sent, and each graph is read.

    Args:
        read: is given the graph, and whether it is of backward.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Reading(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            read(graph, any("tangents" in node.name for node in graph.find_nodes(op="placeholder")))

        def uuid(self) -> None:
            """None: a graph from inductor's cache would pass unread."""

    return {"_micro_pipeline_tp": True, "post_grad_custom_post_pass": Reading()}


def module_of(node: fx.Node) -> str:
    """The path of the module whose code a node was traced from; "" of the compiled one's own."""
    for key in ("nn_module_stack", "fwd_nn_module_stack"):
        if stack := node.meta.get(key):
            path, _ = list(stack.values())[-1]
            return str(path).removeprefix("L['self']").removeprefix(".")
    return ""


def values_of(node: fx.Node) -> list[torch.Tensor]:
    """Abstract tensors as a node gives; of one that a late pass put in, what it was given."""
    while "val" not in node.meta:
        node = node.all_input_nodes[0]
    return [value for value in tree_leaves(node.meta["val"]) if isinstance(value, torch.Tensor)]


def as_traced(size: int | torch.SymInt) -> int:
    """A size, or what its symbol stood for when the graph was made."""
    return size if isinstance(size, int) else int(size.node.hint)
