"""What was put into a sharded model later: used where that is right, refused where it is not."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tpplan.comm import Group
from tpplan.roles.lowered import Lowered


def require_none_added(container: nn.Module, group: Group) -> None:
    """That what is to be trained in the layers, where each rank has its rows, was in the plan.

    Raises:
        RuntimeError: where it was not, with the parameter's name.
    """
    for element in container.modules():
        if not isinstance(element, Lowered) or element._tpplan.plan.element is None:
            continue
        computed: set[nn.Module] = set()  # parametrizations of what is sharded meet whole weights
        for path, module in element.named_modules():
            own: tuple[str, ...] = ()
            if isinstance(module, Lowered):
                # which uses, or refuses, what is put in the place of its own
                own = module._tpplan.own.names
                tables = getattr(module, "parametrizations", {})
                computed.update(m for name in own if name in tables for m in tables[name].modules())
            if module in computed:
                continue
            for leaf, p in module.named_parameters(recurse=False):
                if p.requires_grad and leaf not in own and not _is_over(p, group):
                    name = ".".join(filter(None, (element._tpplan.plan.path, path, leaf)))
                    raise RuntimeError(
                        f"{name}: this parameter was added after tpplan.parallelize, and under "
                        "sequence parallelism each rank would have a part of its gradient: add it "
                        "before"
                    )


def require_none_replaced(container: Lowered, group: Group) -> None:
    """That what a region consists of is still what gives a rank's columns, and sums gradients.

    Raises:
        RuntimeError: where it is not, with the module's path.
    """
    inside = [m for m in container.modules() if isinstance(m, Lowered)]
    entered = (b for m in inside for b in m._tpplan.plan.boundaries)
    for path in dict.fromkeys(path for boundary in entered for path in boundary.consumers):
        if _put_at(container, path) is not None:
            raise RuntimeError(
                f"{path}: this module was replaced after tpplan.parallelize, and what is there "
                "now would give all columns where each rank computes with its own: replace it "
                "before"
            )
    for path in container._tpplan.stream.summed if torch.is_grad_enabled() else ():
        now = _put_at(container, path)
        if now and any(p.requires_grad and not _is_over(p, group) for p in now.parameters()):
            raise RuntimeError(
                f"{path}: this module was replaced after tpplan.parallelize, in a region where "
                "each rank would have a part of its gradient: replace it before"
            )


def _put_at(container: Lowered, path: str) -> nn.Module | None:
    """What is now, among sharded modules, in the place of one, and holds none; None: nothing."""
    before = container._tpplan.plan.path
    parent, _, leaf = path.removeprefix(f"{before}." if before else "").rpartition(".")
    try:
        around = container.get_submodule(parent)
        now = around.get_submodule(leaf)
    except AttributeError:
        return None
    held = [any(isinstance(m, Lowered) for m in each.modules()) for each in (around, now)]
    return now if held == [True, False] else None


def _is_over(parameter: torch.Tensor, group: Group) -> bool:
    """Whether the ranks share it; FSDP2 has others share it too."""
    if not isinstance(parameter, DTensor):
        return False
    mesh = parameter.device_mesh
    return any(mesh.get_group(i).group_name == group.name for i in range(mesh.ndim))
