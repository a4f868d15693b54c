"""tpplan: compile a YAML sharding plan onto a PyTorch model that was never written for it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tpplan.version import __version__ as __version__

if TYPE_CHECKING:
    from tpplan.api import advise, check, dry_run, parallelize, verify
    from tpplan.hf import from_hf
    from tpplan.language import Plan, PlanError
    from tpplan.proof import Verification, VerificationError
    from tpplan.render import Advice, Report
    from tpplan.shipped import load_plan

__all__ = [
    "Advice",
    "Plan",
    "PlanError",
    "Report",
    "Verification",
    "VerificationError",
    "advise",
    "check",
    "dry_run",
    "from_hf",
    "load_plan",
    "parallelize",
    "verify",
]

# imported when it is first asked for: the command line answers much without torch
_ROOMS: Mapping[str, str] = {
    "Advice": "render",
    "Plan": "language",
    "PlanError": "language",
    "Report": "render",
    "Verification": "proof",
    "VerificationError": "proof",
    "advise": "api",
    "check": "api",
    "dry_run": "api",
    "from_hf": "hf",
    "load_plan": "shipped",
    "parallelize": "api",
    "verify": "api",
}


def __getattr__(name: str) -> Any:
    room = _ROOMS.get(name)
    if room is not None:
        value = globals()[name] = getattr(import_module(f"tpplan.{room}"), name)
        return value
    if not name.startswith("_"):
        # a room itself, as in tpplan.kernels
        try:
            return import_module(f"tpplan.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"tpplan.{name}":
                raise
    raise AttributeError(f"module 'tpplan' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
