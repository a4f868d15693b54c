"""What was put into a sharded model later: used where that is right, refused where it is not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import activation

from tpplan.comm import Group
from tpplan.roles.linear import Colwise, Rowwise
from tpplan.roles.lowered import Lowered, State, is_own_code, numbers_of

# each row of what they give is of that row of what they are given
_BY_ROWS = {
    *(kind for kind in vars(activation).values() if isinstance(kind, type)),
    *(nn.Identity, nn.Linear, nn.Dropout, nn.Sequential, nn.LayerNorm, nn.RMSNorm),
} - {nn.MultiheadAttention}


def added_to(container: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters inside that are no plan's, with their names in ``container``."""
    found = []
    computed: set[nn.Module] = set()  # parametrizations of what is sharded meet whole weights
    for path, module in container.named_modules():
        own: tuple[str, ...] = ()
        if isinstance(module, Lowered):
            # which uses, or refuses, what is put in the place of its own
            own = module._tpplan.own.names
            tables = getattr(module, "parametrizations", {})
            computed.update(m for name in own if name in tables for m in tables[name].modules())
        if module in computed:
            continue
        for leaf, p in module.named_parameters(recurse=False):
            if leaf not in own:
                found.append((f"{path}.{leaf}" if path else leaf, p))
    return found


def require_none_added(container: nn.Module, group: Group) -> None:
    """That what is to be trained in the layers, where each rank has its rows, was in the plan.

    Raises:
        RuntimeError: where it was not, with the parameter's name.
    """
    for element in container.modules():
        if not isinstance(element, Lowered) or element._tpplan.plan.element is None:
            continue
        for name, p in added_to(element):
            if p.requires_grad and not is_over(p, group):
                raise RuntimeError(
                    f"{_path(element, name)}: this parameter was added after tpplan.parallelize, "
                    "and under sequence parallelism each rank would have a part of its gradient: "
                    "add it before"
                )


def require_none_replaced(container: Lowered) -> None:
    """That what a region consists of is still what gives a rank's columns, and knows its rows.

    Raises:
        RuntimeError: where it is not, with the module's path.
    """
    for module in container.modules():
        known = vars(module).get("_tpplan")
        if isinstance(known, State) and not hasattr(type(module), "_tpplan_origin"):
            raise RuntimeError(
                f"{known.plan.path}: its class was replaced after tpplan.parallelize, and with it "
                "what makes it a part of a sharded model: replace it before"
            )
        if isinstance(known, State):
            _require_own_code(module, known)
        if not isinstance(module, Lowered):
            continue
        stream, inside = module._tpplan.stream, module._tpplan.plan.path
        in_layer = module._tpplan.plan.element is not None
        if not in_layer and module is not container:
            continue
        for path, partners in stream.columns.items():
            now = _put_at(module, inside, path)
            still = [_at(module, inside, other) for other in partners if other != path]
            # what entered by itself may have been the whole of its region
            if now is not None and (not partners or any(isinstance(m, Lowered) for m in still)):
                raise RuntimeError(
                    f"{path}: this module was replaced after tpplan.parallelize, and what is "
                    "there now would give all columns where each rank computes with its own: "
                    "replace it before"
                )
        holders = stream.holders.values() if in_layer and stream.sequence_parallel else ()
        for path in dict.fromkeys(holders):
            now = _put_at(module, inside, path, alone=True)
            if now is not None and any(type(m) not in _BY_ROWS for m in now.modules()):
                raise RuntimeError(
                    f"{path}: this module was replaced after tpplan.parallelize, and under "
                    "sequence parallelism what is there now would be given a rank's rows of the "
                    "sequence: replace it before"
                )


def _require_own_code(module: nn.Module, state: State) -> None:
    """That a role that stands for the module's code computes what that would now."""
    if state.numbers is None:
        return
    now = numbers_of(module)
    other = next((name for name, value in state.numbers.items() if now.get(name) != value), None)
    replaced = not isinstance(module, nn.Embedding) and not is_own_code(module)
    if other is not None or replaced:
        what = "its forward" if other is None else f"its attribute '{other}'"
        raise RuntimeError(
            f"{state.plan.path}: {what} was changed after tpplan.parallelize, and is not what "
            "computes here any more: change it before"
        )


def _put_at(around: Lowered, inside: str, path: str, alone: bool = False) -> nn.Module | None:
    """What is now in the place of a sharded module, and holds none; None: nothing.

    ``alone``: also where no other is beside it.
    """
    now, holder = (_at(around, inside, p) for p in (path, path.rpartition(".")[0]))
    if now is None or holder is None or type(now) is nn.Identity:
        return None
    beside, held = (any(isinstance(m, Lowered) for m in each.modules()) for each in (holder, now))
    return now if (beside or alone) and not held else None


def _at(around: Lowered, inside: str, path: str) -> nn.Module | None:
    """What is now where ``path`` was, seen from what was at the path ``inside``, if anything is."""
    prefix = f"{inside}." if inside else ""
    if path != inside and not path.startswith(prefix):
        return None
    try:
        return around.get_submodule(path[len(prefix) :])
    except AttributeError:
        return None


def require_at_home(container: Lowered) -> None:
    """That every rewritten module is where what it needs to know of a forward is told to it.

    Raises:
        RuntimeError: where one is not, with its path.
    """
    for name, module, around in _lowered_in(container, "", ()):
        state = module._tpplan
        if state.stream is not around[-1]._tpplan.stream and not _stands_alone(module, around):
            raise RuntimeError(
                f"{_path(container, name)}: this module was taken out of a sharded model, or "
                "copied by itself, after tpplan.parallelize, and knows nothing of the forward that "
                "it runs in: copy a whole layer, or the unsharded model before"
            )
        holder = state.stream.holders.get(state.plan.path, state.plan.path)
        inside = f"{container._tpplan.plan.path}.".startswith(f"{holder}.")
        if holder != state.plan.path and not inside and not any(map(_is_entered, around)):
            raise RuntimeError(
                f"{_path(container, name)}: what enters this column-parallel layer does not come "
                f"through {holder} any more, as when the plan was compiled, so that the gradient "
                "of its input would be a part on each rank: replace modules around it before "
                "tpplan.parallelize"
            )


def _lowered_in(
    module: nn.Module, name: str, around: tuple[Lowered, ...]
) -> Iterator[tuple[str, Lowered, tuple[Lowered, ...]]]:
    """The rewritten modules inside, by their names, with those around them; as often as held."""
    inner = (*around, module) if isinstance(module, Lowered) else around
    for leaf, child in module._modules.items():
        if child is not None and child not in inner:
            path = f"{name}.{leaf}".lstrip(".")
            if isinstance(child, Lowered):
                yield path, child, inner
            yield from _lowered_in(child, path, inner)


def _stands_alone(module: Lowered, around: Sequence[Lowered]) -> bool:
    """Whether it is right by itself, with no word of what runs around it."""
    plan, outer = module._tpplan.plan, around[-1]._tpplan.stream
    if isinstance(module, Colwise | Rowwise):
        return False
    mates = [m for m in around if m._tpplan.stream is outer]
    in_region = any(map(_is_entered, mates))
    in_layer = in_region or any(m._tpplan.plan.element is not None for m in mates)
    if outer.sequence_parallel or True in module._tpplan.own.summed:
        return not in_layer
    return plan.container or plan.element is not None or _is_entered(module) or not in_region


def _is_entered(module: Lowered) -> bool:
    """Whether it is given what its column-parallel layers multiply."""
    plan = module._tpplan.plan
    return bool(plan.boundaries) and not plan.projection


class Forward:
    """What was put in the place of the forward of a module that is given what enters a region."""

    def __init__(self, module: Lowered, forward: Any) -> None:
        self.module, self.forward = module, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What it gives.

        Raises:
            RuntimeError: where the region ran, and nothing entered it.
        """
        state = self.module._tpplan
        if torch.compiler.is_compiling():
            return self.forward(*args, **kwargs)
        ledger = state.stream.group.ledger
        before, state.entered = ledger.sent, False
        out = self.forward(*args, **kwargs)
        if not state.entered and ledger.sent != before:
            raise RuntimeError(
                f"{state.plan.path}: its forward was replaced on the instance by one that does not "
                "call tpplan's, so that what enters its sharded layers is not gathered, and each "
                "rank has a part of its gradient: replace it on the class, before "
                "tpplan.parallelize"
            )
        return out


def watch_forwards(container: nn.Module) -> None:
    """Have replaced forwards of modules inside say it where they leave out what tpplan does."""
    for module in container.modules():
        if isinstance(module, Lowered) and _is_entered(module):
            forward = vars(module).get("forward")
            if forward is not None and not isinstance(forward, Forward):
                object.__setattr__(module, "forward", Forward(module, forward))


def is_over(parameter: torch.Tensor, group: Group) -> bool:
    """Whether the ranks share it; FSDP2 has others share it too."""
    if not isinstance(parameter, DTensor):
        return False
    mesh = parameter.device_mesh
    return any(mesh.get_group(i).group_name == group.name for i in range(mesh.ndim))


def _path(around: Lowered, name: str) -> str:
    return ".".join(filter(None, (around._tpplan.plan.path, name)))
