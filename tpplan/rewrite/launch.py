"""Whether the ranks are about to do the same thing, before any of them does it."""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tpplan.comm.agreement import ONE_ORDER
from tpplan.compiled import CompiledPlan
from tpplan.observe.examples import does_not_run

_SHOWN = 4


def agreed(
    model: nn.Module,
    mesh: DeviceMesh | None,
    compile_plan: Callable[[], CompiledPlan],
    options: Mapping[str, object],
) -> CompiledPlan:
    """What ``compile_plan`` gives, where it gives every rank of ``mesh`` the same.

    One small exchange; the ranks would else wait for each other in collectives that some of them
    do not come to, or compute with parts that do not belong together.

    Args:
        options: further words of the call that ranks must agree on.

    Raises:
        ValueError: on all, where some of them fail, or they differ, with what differs.
    """
    if not has_others(mesh):
        return compile_plan()
    failed: Exception | None = None
    facts: dict[str, str] = {}
    try:
        compiled = compile_plan()
        facts = _facts(model, mesh, compiled, options)
    except Exception as error:
        failed = error
    told = f"{type(failed).__name__}: {failed}" if failed is not None else None
    digest = _digest(facts)
    other_inputs = failed is not None and does_not_run(failed)
    everyone = everyones((told, digest, other_inputs), mesh)
    failures = [said for said, _, _ in everyone]
    # where not all would be tried on other inputs none may be: it would wait for the rest
    if failed is not None and None not in failures and len({again for *_, again in everyone}) == 1:
        raise failed
    for rank, said in enumerate(failures):
        if said is not None:
            raise ValueError(f"{named(rank, mesh)} stopped with {said}") from failed
    if any(other != digest for _, other, _ in everyone):
        _raise_difference(everyones(facts, mesh), mesh)
    return compiled


def require_same_order(sent: list[str], mesh: DeviceMesh | None) -> None:
    """Have all ranks of ``mesh`` send the same in the same order; one small exchange.

    Raises:
        ValueError: on all, where they do not.
    """
    if has_others(mesh) and len(set(everyones(_digest(sent), mesh))) > 1:
        _raise_order("sends", everyones(sent, mesh), mesh)


def has_others(mesh: DeviceMesh | None) -> TypeGuard[DeviceMesh]:
    """Whether there are other ranks, which could differ."""
    return mesh is not None and mesh.size() > 1 and dist.get_backend(mesh.get_group(0)) != "fake"


def _digest(value: Any) -> str:
    """Of something in its order."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _facts(
    model: nn.Module, mesh: DeviceMesh, compiled: CompiledPlan, options: Mapping[str, object]
) -> dict[str, str]:
    """In words, all that decides what a rank sends and when."""
    facts = {name: str(value) for name, value in options.items()}
    facts["ranks"] = str(mesh.mesh.tolist())
    facts["ep"] = str(compiled.ep)
    facts["sequence_parallel"] = str(compiled.sequence_parallel)
    facts["kernels"] = str(sorted(compiled.kernels.items()))
    facts["save"] = compiled.plan.save
    facts["overlap"] = compiled.plan.overlap
    facts["recompute"] = ", ".join(sorted(compiled.plan.recompute))
    facts["torch"] = torch.__version__
    transformers = sys.modules.get("transformers")
    if transformers is not None:
        facts["transformers"] = str(getattr(transformers, "__version__", ""))
    for path, module in compiled.modules.items():
        facts[f"module {path}"] = f"{module.style} {sorted(map(str, module.options.items()))}"
    for name, parameter in model.named_parameters():
        kind = "trained" if parameter.requires_grad else "frozen"
        facts[f"parameter {name}"] = f"{tuple(parameter.shape)} {parameter.dtype} {kind}"
    for name, buffer in model.named_buffers():
        facts[f"buffer {name}"] = f"{tuple(buffer.shape)} {buffer.dtype}"
    for name, entry in compiled.parameters.items():
        facts[f"placement of {name}"] = str(entry.placement)
    return facts


def everyones(value: Any, mesh: DeviceMesh) -> list[Any]:
    """What each rank tells, in the order of the mesh; one exchange along each dimension."""
    everyone = [value]
    for dim in reversed(range(mesh.ndim)):
        told: list[Any] = [None] * mesh.size(dim)
        dist.all_gather_object(told, everyone, group=mesh.get_group(dim))
        everyone = [one for some in told for one in some]
    return everyone


def named(rank: int, mesh: DeviceMesh) -> str:
    """A rank of the mesh, for messages."""
    if mesh.ndim == 1:
        kind = "expert" if mesh.mesh_dim_names == ("ep",) else "tensor"
        return f"rank {rank} of the {kind}-parallel group"
    return f"rank {rank} of the {mesh.size(0)} × {mesh.size(1)} of ep and tp"


def _raise_order(does: str, everyone: list[list[str]], mesh: DeviceMesh) -> None:
    for rank, own in enumerate(everyone):
        pairs = itertools.zip_longest(own, everyone[0], fillvalue="nothing")
        mine, first = next(((a, b) for a, b in pairs if a != b), ("", ""))
        if mine != first:
            raise ValueError(
                f"{named(rank, mesh)} {does} {mine} where rank 0 {does} {first}: {ONE_ORDER}"
            )


def _raise_difference(everyone: list[dict[str, str]], mesh: DeviceMesh) -> None:
    first = everyone[0]
    for rank, other in enumerate(everyone):
        names = [*first, *(name for name in other if name not in first)]
        odd = [name for name in names if first.get(name) != other.get(name)]
        if odd:
            shown = "; ".join(
                f"{name} is {other.get(name, 'absent')}, on rank 0 {first.get(name, 'absent')}"
                for name in odd[:_SHOWN]
            )
            more = f"; and {len(odd) - _SHOWN} more" * (len(odd) > _SHOWN)
            raise ValueError(
                f"{named(rank, mesh)} is about to do something else than rank "
                f"0: {shown}{more}. Give all ranks the same model, plan, options and versions"
            )
    _raise_order("has the", [list(facts) for facts in everyone], mesh)
