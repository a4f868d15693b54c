"""Which modules fused kernels stand for: by what they compute, and by what was asked for."""

from __future__ import annotations

from collections.abc import Mapping

from tpplan.compiled import KernelChoice
from tpplan.kernels.forms import Form
from tpplan.kernels.launch import importable
from tpplan.language import Diagnostic, PlanError
from tpplan.language.diagnostics import did_you_mean
from tpplan.language.styles import KERNEL_CHOICES, KERNEL_KINDS
from tpplan.observe.fused import FINDERS

_REASONS: Mapping[str, str] = {
    "auto": "by a fused kernel on a GPU, elsewhere by its own forward: equal on random numbers",
    "triton": "by a fused kernel, on random numbers equal to its own forward",
    "torch": "by its own forward, as was asked for",
}


def implementations(
    stated: Mapping[str, str], given: str | Mapping[str, str] | None
) -> Mapping[str, str]:
    """The implementation of each kind of kernel: what the caller gave, else what the plan states.

    Raises:
        PlanError: where the caller gave a kind or an implementation that there is not, or Triton
            is asked for where it cannot be imported: nothing would run what was proved.
    """
    kinds = tuple(dict.fromkeys((*KERNEL_KINDS, *FINDERS)))
    over = dict.fromkeys(kinds, given) if isinstance(given, str) else dict(given or {})
    for kind, implementation in over.items():
        if kind not in kinds:
            hint = did_you_mean(kind, kinds, f"the kinds are {', '.join(kinds)}")
            raise PlanError([Diagnostic(f"kernels: there is no kind '{kind}'", hint=hint)])
        if implementation not in KERNEL_CHOICES:
            message = f"kernels: {kind}: there is no implementation '{implementation}'"
            hint = f"it is one of {', '.join(KERNEL_CHOICES)}"
            raise PlanError([Diagnostic(message, hint=hint)])
    wanted = dict.fromkeys(kinds, "auto") | dict(stated) | over
    if "triton" in wanted.values() and not importable():
        message = "kernels: 'triton' is asked for, and there is no triton here to import"
        hint = "pip install triton, or ask for 'auto' or 'torch'"
        raise PlanError([Diagnostic(message, hint=hint)])
    return wanted


def choose(
    kind: str, form: Form | None, wanted: Mapping[str, str], obstacle: str | None = None
) -> KernelChoice:
    """What runs a module that computes what kernels of ``kind`` do.

    Args:
        form: how it computes that; None where no kernel gives the same numbers.
        obstacle: why a kernel cannot stand for it where it is, if so.
    """
    implementation = wanted[kind]
    if implementation != "torch" and (form is None or obstacle is not None):
        reason = obstacle or "the kernel's numbers are not the module's"
        return KernelChoice(kind, "torch", f"by its own forward: {reason}")
    form = None if implementation == "torch" else form
    return KernelChoice(kind, implementation, _REASONS[implementation], form)
