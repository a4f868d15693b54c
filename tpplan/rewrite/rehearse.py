"""The rewritten model run once on fake tensors, before the user's model is touched."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tpplan.comm import Observer, Site
from tpplan.compat import FakeTensorMode, NeedsValuesError, quiet, uncompiled
from tpplan.compiled import CompiledPlan
from tpplan.language import Diagnostic, PlanError
from tpplan.observe.calls import calls_for
from tpplan.observe.shadow import shadow_of
from tpplan.observe.trace import fake_inputs
from tpplan.observe.untouched import nothing_kept
from tpplan.planner.match import fold
from tpplan.planner.stops import Stop, kind_of, place_of, stopped_at
from tpplan.rewrite import apply
from tpplan.roles.lowered import passive
from tpplan.styles.attention import ATTENTION
from tpplan.styles.replicate import REPLICATE


class _Sending(Observer):
    """Takes down what is sent, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[str] = []

    def at(self, site: Site) -> None:
        self.sent.append(f"{site.module or 'the model'} ({site.reason})")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def rehearse(
    model: nn.Module, compiled: CompiledPlan, mesh: DeviceMesh, inputs: Any = None
) -> list[str]:
    """Rewrite a shadow of ``model`` and run its forward; nothing is computed and nothing sent.

    Returns:
        what would be sent, in order; up to where its code hangs on numbers, which the proof has.

    Raises:
        PlanError: naming the first module whose forward does not work on its shard.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    shadow = shadow_of(model, mode).eval()
    with nothing_kept(model), mode, quiet(), uncompiled():
        # where the shards will be
        calls = fake_inputs(mode, calls_for(model, inputs), device=mesh.device_type)
        apply(shadow, compiled, mesh, src_data_rank=None)
        running: list[str] = []
        for path, module in shadow.named_modules():
            module.register_forward_pre_hook(passive(lambda *_, path=path: running.append(path)))
            module.register_forward_hook(passive(lambda *_: running.pop() and None))
        sending = _Sending()
        try:
            with torch.no_grad(), sending:
                for args, kwargs in calls:
                    shadow(*args, **kwargs)
        except NeedsValuesError:
            return sending.sent
        except Exception as error:
            path = running[-1] if running else ""
            inside = (p for p in compiled.modules if p == path or p.startswith(f"{path}."))
            rules = (compiled.modules[p].rule for p in inside)
            rule = next((rule for rule in rules if rule is not None), compiled.plan.rules[0])
            message = f"{fold([path])}: fails on its shard at tp {compiled.tp}: {error}"
            place = stopped_at(place_of(error))
            raise PlanError([Diagnostic(message, rule.position, _cure(error), place)]) from error
    return sending.sent


def _cure(error: Exception) -> str:
    """What to do about a model that does not run with its shards."""
    stop = kind_of(error)
    if stop is Stop.SIZES:
        return (
            "make the number that counts all columns here a rank's own, in 'attributes' of the "
            f"{ATTENTION.name} style"
        )
    return f"let this code run with its shards too, or make the module {REPLICATE.name}"
