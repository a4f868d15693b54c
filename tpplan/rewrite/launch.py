"""Whether the ranks are about to do the same thing, before any of them does it."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tpplan.compiled import CompiledPlan

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
        ValueError: on the ranks that did not fail, where another one did; on all, where they
            differ, with what differs.
    """
    if mesh is None or mesh.size() == 1 or dist.get_backend(mesh.get_group()) == "fake":
        return compile_plan()
    failed: Exception | None = None
    facts: dict[str, str] = {}
    try:
        compiled = compile_plan()
        facts = _facts(model, mesh, compiled, options)
    except Exception as error:
        failed = error
    told = f"{type(failed).__name__}: {failed}" if failed is not None else None
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    everyone = _everyones((told, digest), mesh)
    if failed is not None:
        raise failed
    for rank, (told, _) in enumerate(everyone):
        if told is not None:
            raise ValueError(f"rank {rank} of the tensor-parallel group stopped with {told}")
    if any(other != digest for _, other in everyone):
        _raise_difference(_everyones(facts, mesh))
    return compiled


def _facts(
    model: nn.Module, mesh: DeviceMesh, compiled: CompiledPlan, options: Mapping[str, object]
) -> dict[str, str]:
    """In words, all that decides what a rank sends and when."""
    facts = {name: str(value) for name, value in options.items()}
    facts["ranks"] = str(mesh.mesh.tolist())
    facts["sequence_parallel"] = str(compiled.sequence_parallel)
    facts["kernels"] = str(sorted(compiled.kernels.items()))
    facts["torch"] = torch.__version__
    transformers = sys.modules.get("transformers")
    if transformers is not None:
        facts["transformers"] = str(getattr(transformers, "__version__", ""))
    for path, module in compiled.modules.items():
        facts[f"module {path}"] = f"{module.style} {sorted(map(str, module.options.items()))}"
    for name, parameter in model.named_parameters():
        kind = "trained" if parameter.requires_grad else "frozen"
        facts[f"parameter {name}"] = f"{tuple(parameter.shape)} {parameter.dtype} {kind}"
    for name, entry in compiled.parameters.items():
        facts[f"placement of {name}"] = str(entry.placement)
    return facts


def _everyones(value: Any, mesh: DeviceMesh) -> list[Any]:
    told: list[Any] = [None] * mesh.size()
    dist.all_gather_object(told, value, group=mesh.get_group())
    return told


def _raise_difference(everyone: list[dict[str, str]]) -> None:
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
                f"rank {rank} of the tensor-parallel group is about to do something else than rank "
                f"0: {shown}{more}. Give all ranks the same model, plan, options and "
                "versions"
            )
