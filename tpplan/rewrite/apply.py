"""A ``CompiledPlan`` onto the user's model: all of it, or none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from tpplan.comm import Stream
from tpplan.comm.meshes import tp_of
from tpplan.comm.pace import Pace, Pieces
from tpplan.compat import enable_symmetric_memory
from tpplan.compiled import CompiledPlan
from tpplan.kernels.forms import GatedForm, GeluForm, NormForm
from tpplan.kernels.launch import chosen
from tpplan.language.styles import ACTIVATIONS, AUTO, NORMS, SHARD, SYMMETRIC, WAITING
from tpplan.rewrite.holders import Undo, replace, require_whole
from tpplan.rewrite.planned import PlannedStyle, swap_kernels
from tpplan.roles.entry import Entry
from tpplan.roles.members import OwnMembers
from tpplan.styles import named

_MARK = "_tpplan_plan"
_REMADE = {NORMS: (NormForm,), ACTIVATIONS: (GeluForm, GatedForm)}


def apply(
    model: nn.Module,
    compiled: CompiledPlan,
    mesh: DeviceMesh | None,
    src_data_rank: int | None = 0,
    outside: bool = True,
    pace: Pace | None = None,
) -> nn.Module:
    """Rewrite ``model`` in place; whatever is raised half-way, it is left as it was.

    Args:
        mesh: of ``compiled.tp`` ranks, ``compiled.ep`` ranks, or (ep, tp) of both; not needed
            where both are 1.
        src_data_rank: the rank of the group whose values count; None trusts each rank's own.
        outside: whether what else may hold its parameters is looked for; not for a copy.
        pace: what decides into how many pieces products are cut; two each where it is None.
    """
    sharded = compiled.tp * compiled.ep > 1 and mesh is not None
    held = require_whole(model, outside) if sharded else frozenset()
    undo: list[Undo] = []
    before = [
        (module, type(module), dict(vars(module)), dict(module._parameters), dict(module._buffers))
        for module in model.modules()
    ]
    try:
        if mesh is not None and sharded:
            old = {name: id(p) for name, p in model.named_parameters() if id(p) in held}
            _shard(model, compiled, mesh, src_data_rank, pace)
            if old:
                new = {key: model.get_parameter(name) for name, key in old.items()}
                replace(model, new, undo)
        if compiled.tp == 1 or mesh is None:
            swap_kernels(model, compiled, device_type(model))
        object.__setattr__(model, _MARK, compiled)
    except BaseException:
        for put_back in reversed(undo):
            put_back()
        for module, original, attributes, parameters, buffers in before:
            module.__class__ = original
            module.__dict__.clear()
            module.__dict__.update(attributes)
            module._parameters.update(parameters)
            module._buffers.update(buffers)
        raise
    return model


def _shard(
    model: nn.Module,
    compiled: CompiledPlan,
    mesh: DeviceMesh,
    src_data_rank: int | None,
    pace: Pace | None,
) -> None:
    """What each module becomes; at tp 1 all but the experts that ranks of ep share stay whole."""
    tp = tp_of(mesh, compiled.ep)
    own = mesh if tp is None else tp
    fused = (k for k, how in compiled.kernels.items() if chosen(how, mesh.device_type))
    plan = compiled.plan
    remade = [form for word in plan.recompute for form in _REMADE[word]]
    least = 1 if plan.overlap == AUTO and pace is not None else 2
    pieces = None if plan.overlap == WAITING else Pieces(least, pace, plan.overlap == SYMMETRIC)
    kept = plan.save == SHARD, remade, pieces
    if plan.overlap == SYMMETRIC:
        enable_symmetric_memory(own.get_group())
    stream = Stream(own, compiled.sequence_parallel, plan.sequence_dim, frozenset(fused), *kept)
    stream.randomness.drawn = frozenset(compiled.draws)
    stream.shares_heads = any(each.shares_rows for each in compiled.parameters.values())
    stream.whole_results = all(
        plan.options.get("output") != "shard"
        for plan in compiled.modules.values()
        if named(plan.style).vocabulary
    )
    for path, each in compiled.modules.items():
        if each.norm is not None:
            stream.columns[path] = ()
        for boundary in each.boundaries:
            for column in boundary.consumers:
                stream.holders[column] = path
                stream.columns[column] = boundary.shared if column == path else ()
    installed: dict[str, nn.Parameter] = {}
    entries: dict[tuple[int | str, ...], Entry] = {}
    styles: dict[str, Any] = {
        path: PlannedStyle(plan, model, compiled, stream, installed, entries, src_data_rank, mesh)
        for path, plan in compiled.modules.items()
        if tp is not None or plan.dispatched
    }
    parallelize_module(model, own, styles, src_data_rank=src_data_rank)
    for module in model.modules():
        if isinstance(module, OwnMembers):
            module._tpplan_join()
    _move_buffers(model, mesh.device_type)


def _move_buffers(model: nn.Module, device_type: str) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type not in (device_type, "meta"):
                module._buffers[name] = buffer.to(device_type)


def device_type(model: nn.Module) -> str:
    """The kind of device that the model is on."""
    return next((p.device.type for p in model.parameters()), "cpu")


def idle(compiled: CompiledPlan, device: str | None) -> Iterator[str]:
    """What the plan asks to keep less of, or to send meanwhile, and does not come to.

    ``device``: the kind that the model runs on; None where any is meant.
    """
    plan = compiled.plan
    if plan.save == SHARD and not compiled.sequence_parallel:
        yield "save: shard keeps no less here: only under sequence parallelism are inputs gathered"
    fused = [p.kernel for p in compiled.modules.values() if p.kernel is not None]
    forms = {type(k.form) for k in fused if _may_run(k.implementation, device)}
    for word in plan.recompute:
        if compiled.tp == 1 or forms.isdisjoint(_REMADE[word]):
            yield (
                f"recompute: {word}: nothing is made again here, as no fused kernel of that kind "
                "runs in a sharded region"
            )
    if plan.overlap != WAITING and compiled.tp == 1:
        yield f"overlap: {plan.overlap} hides nothing here: at tp 1 no product waits for others"


def _may_run(implementation: str, device: str | None) -> bool:
    return implementation != "torch" if device is None else chosen(implementation, device)


def plan_of(model: nn.Module) -> CompiledPlan | None:
    """The plan a model was rewritten by, or None."""
    return vars(model).get(_MARK)
