"""A model as one rank has it: its own attributes, and its part of what rules cut."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from tpplan.compiled import ModulePlan
from tpplan.layout import Rows, own_part
from tpplan.planner.attributes import assign
from tpplan.roles.heads import keep_own


@contextlib.contextmanager
def as_rank(
    model: nn.Module,
    plans: Mapping[str, ModulePlan],
    inner: Mapping[str, Rows | None],
    bare: Mapping[str, Placement],
    lists: Iterable[str],
    place: tuple[int, int],
) -> Iterator[None]:
    """Within it, ``model`` is what the first of ``place`` has, of as many ranks as the second.

    Args:
        inner: modules on sharded columns or heads, which run on the rank's part, with the rows that
            a rank has where these are not simply cut evenly.
        bare: parameters that are cut by a rule of their own, and how.
        lists: those with a module for each head.
    """
    rank, tp = place
    before = []
    # a module may stand in several places, with a name of its parameter for each
    tables: dict[tuple[int, str], tuple[dict[str, nn.Parameter | None], str, Placement]] = {}
    for path, rows in inner.items():
        module = model.get_submodule(path)
        cut = rows or Shard(1 if isinstance(module, nn.Embedding) else 0)
        for leaf in plans[path].parameters:
            tables[id(module), leaf] = module._parameters, leaf, cut
    for name, placed in bare.items():
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        tables[id(module), leaf] = module._parameters, leaf, placed
    for table, leaf, placed in tables.values():
        before.append(_cut(table, leaf, placed, rank, tp))
    for path in lists:
        before.append(_shortened(model.get_submodule(path), rank, tp))
    for path, plan in plans.items():
        for name, (_, local) in plan.attributes.items():
            before.append(assign(model.get_submodule(path), name, local))
        if not plan.cut and not plan.buffers:
            continue  # of a list that was shortened it may not be there
        module = model.get_submodule(path)
        for name, (dim, heads) in plan.cut.items():
            before.append(keep_own(module, name, dim, heads, rank, tp))
        for name, rows in plan.buffers.items():
            own = rows.take(module.get_buffer(name), rank)
            before.append(_replaced(module._buffers, name, own))
    try:
        yield
    finally:
        for restore in reversed(before):
            restore()


def _replaced(
    table: dict[str, torch.Tensor | None], name: str, own: torch.Tensor
) -> Callable[[], None]:
    whole = table[name]
    table[name] = own
    return lambda: table.__setitem__(name, whole)


def _cut(
    table: dict[str, nn.Parameter | None], leaf: str, placed: Placement, rank: int, tp: int
) -> Callable[[], None]:
    whole = table[leaf]
    assert whole is not None
    own = own_part(whole, placed, rank, tp)
    table[leaf] = nn.Parameter(own, requires_grad=False)
    return lambda: table.__setitem__(leaf, whole)


def _shortened(module: nn.Module, rank: int, tp: int) -> Callable[[], None]:
    whole = module._modules
    members = list(whole.values())
    each = len(members) // tp
    own = members[rank * each : (rank + 1) * each]
    module._modules = {str(i): member for i, member in enumerate(own)}
    return lambda: setattr(module, "_modules", whole)
