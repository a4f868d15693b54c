"""tpplan: compile a YAML sharding plan onto a PyTorch model that was never written for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tpplan.version import __version__ as __version__

if TYPE_CHECKING:
    from tpplan.api import advise, check, dry_run, parallelize, suggest, verify
    from tpplan.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
    from tpplan.comm.meshes import by_mesh, clip_grad_norm_
    from tpplan.hf import from_hf
    from tpplan.language import Plan, PlanError
    from tpplan.pipelines import shard_stage
    from tpplan.pretrained import from_pretrained
    from tpplan.proof import Verification, VerificationError
    from tpplan.render import Advice, FusionReport, Report
    from tpplan.shipped import load_plan

__all__ = [
    "Advice",
    "CheckpointError",
    "FusionReport",
    "Plan",
    "PlanError",
    "Report",
    "Verification",
    "VerificationError",
    "advise",
    "by_mesh",
    "check",
    "clip_grad_norm_",
    "dry_run",
    "from_hf",
    "from_pretrained",
    "load_checkpoint",
    "load_plan",
    "parallelize",
    "save_checkpoint",
    "shard_stage",
    "suggest",
    "verify",
]

# imported when it is first asked for: the command line answers much without torch
_ROOMS: Mapping[str, Sequence[str]] = {
    "api": ("advise", "check", "dry_run", "parallelize", "suggest", "verify"),
    "checkpoint": ("CheckpointError", "load_checkpoint", "save_checkpoint"),
    "comm.meshes": ("by_mesh", "clip_grad_norm_"),
    "hf": ("from_hf",),
    "language": ("Plan", "PlanError"),
    "pipelines": ("shard_stage",),
    "pretrained": ("from_pretrained",),
    "proof": ("Verification", "VerificationError"),
    "render": ("Advice", "FusionReport", "Report"),
    "shipped": ("load_plan",),
}


def __getattr__(name: str) -> Any:
    for room, names in _ROOMS.items():
        if name in names:
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
