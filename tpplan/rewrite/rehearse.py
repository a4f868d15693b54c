"""The rewritten model run once on fake tensors, before the user's model is touched."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tpplan.compat import NEEDS_NUMBERS, FakeTensorMode, quiet
from tpplan.compiled import CompiledPlan
from tpplan.language import Diagnostic, PlanError
from tpplan.observe.caches import no_fakes_kept
from tpplan.observe.shadow import call_for, shadow_of
from tpplan.observe.trace import fake_inputs
from tpplan.planner.match import fold
from tpplan.rewrite import apply
from tpplan.roles.lowered import passive
from tpplan.styles.attention import ATTENTION


def rehearse(
    model: nn.Module, compiled: CompiledPlan, mesh: DeviceMesh, inputs: Any = None
) -> None:
    """Rewrite a shadow of ``model`` and run its forward; nothing is computed and nothing sent.

    Raises:
        PlanError: naming the first module whose forward does not work on its shard.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    shadow = shadow_of(model, mode).eval()
    with no_fakes_kept(), mode, quiet():
        # where the shards will be
        args, kwargs = fake_inputs(mode, call_for(model, inputs), device=mesh.device_type)
        apply(shadow, compiled, mesh, src_data_rank=None)
        running: list[str] = []
        for path, module in shadow.named_modules():
            module.register_forward_pre_hook(passive(lambda *_, path=path: running.append(path)))
            module.register_forward_hook(passive(lambda *_: running.pop() and None))
        try:
            with torch.no_grad():
                shadow(*args, **kwargs)
        except NEEDS_NUMBERS:
            return  # that the proof runs on numbers
        except Exception as error:
            path = running[-1] if running else ""
            inside = (p for p in compiled.modules if p == path or p.startswith(f"{path}."))
            rules = (compiled.modules[p].rule for p in inside)
            rule = next((rule for rule in rules if rule is not None), compiled.plan.rules[0])
            message = f"{fold([path])}: fails on its shard at tp {compiled.tp}: {error}"
            hint = (
                "a size written in its code may have to become a per-rank value: "
                f"see 'attributes' of the {ATTENTION.name} style"
            )
            raise PlanError([Diagnostic(message, rule.position, hint)]) from error
