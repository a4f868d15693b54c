"""The events of a model's life, and which of them are refused, each for a reason."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.compare import Errors, same
from tests.life import between, copies, graphs, training
from tests.life.life import TOLERANCE, Life, sending, told
from tpplan.compiled import CompiledPlan

Event = Callable[[Life], None]

EVENTS: Mapping[str, Event] = {
    "steps of other lengths and batches": training.steps,
    "accumulation": training.accumulation,
    "two graphs in flight": training.in_flight,
    "evaluation and training": training.evaluation,
    "sampling after training": training.growing,
    "inference mode, then training": training.inference,
    "frozen and unfrozen": training.frozen,
    "anomaly mode": training.anomaly,
    "differentiated twice": training.differentiated_twice,
    "changed between forward and backward": training.changed_between,
    "changed in place": training.changed_in_place,
    "optimizer made before": training.optimizer_before,
    "autocast": training.autocast,
    "layers checkpointed": partial(graphs.checkpointed_layers, reentrant=False),
    "layers checkpointed, reentrant": partial(graphs.checkpointed_layers, reentrant=True),
    "checkpoint in a layer": partial(graphs.checkpointed_inside, reentrant=False),
    "checkpoint in a layer, reentrant": partial(graphs.checkpointed_inside, reentrant=True),
    "whole model checkpointed": graphs.checkpointed_whole,
    "exception in the middle": graphs.broken,
    "exception in backward": graphs.broken_backward,
    "modules on their own": graphs.alone,
    "column-parallel layers on their own": graphs.parts_alone,
    **{name: partial(graphs.hooked, install=hook) for name, hook in graphs.HOOKS.items()},
    "hooks on parameters": graphs.hooked_parameters,
    "deep copy": partial(copies.copied, used=False),
    "deep copy after a step": partial(copies.copied, used=True),
    "pickled": copies.pickled,
    "state dicts": copies.states,
    "parameters replaced": copies.replaced,
    "parameters replaced by plain ones": copies.replaced_by_plain,
    "functional_call": copies.called_with,
    "functional_call with plain tensors": copies.called_with_plain,
    "parametrized": copies.parametrized,
    "weight norm": copies.weight_normed,
    "torch.fx": copies.traced,
    "torch.func": copies.transformed,
    "compiled": copies.compiled_whole,
    "compiled layers": copies.compiled_layers,
    "two models in one process": copies.two_models,
    "two models in one loss": between.joint,
    "other forwards before backward": between.other_forwards,
    "forward in another thread": between.threads,
    "frozen before backward": between.frozen_before_backward,
    "several losses": between.several_losses,
    "optimizer in backward": between.stepping_in_backward,
    "autocast, recomputed": between.autocast_checkpointed,
}
# these take all four ranks, also at tp 2
WORLD_EVENTS: Mapping[str, Callable[[Life, DeviceMesh], None]] = {
    "two groups in one process": lambda life, _: copies.two_groups(life),
    "fully_shard after a step": copies.fsdp,
    "fully_shard, gradients accumulated": copies.fsdp_accumulated,
    "compiled layers, fully_shard": copies.fsdp_compiled,
}


# where one ends in the middle, what was sent for the rest of it is not waited for
_CUT_OFF = ("exception in backward",)


def lived(
    mesh: DeviceMesh, plan: CompiledPlan, role: str, event: str, way: str, sp: bool
) -> Errors | str:
    """What was found to differ beyond the tolerance, or what was raised."""
    told(plan, role)
    waiting = torch._C._distributed_c10d._get_work_registry_size
    before = waiting()
    try:
        with sending(way):
            life = Life(role, mesh["tp"] if mesh.ndim > 1 else mesh, sp)
            if event in WORLD_EVENTS:
                WORLD_EVENTS[event](life, mesh)
            else:
                EVENTS[event](life)
    except Exception:
        return traceback.format_exc()
    if event not in _CUT_OFF:  # torch holds on to what nobody waits for
        left = waiting() - before
        life.found.add(f"{left} more that nobody waits for", same(left == 0))
    return {n: e for n, e in life.found.errors.items() if not e <= TOLERANCE}
