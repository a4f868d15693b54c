"""tpplan: compile a YAML sharding plan onto a PyTorch model that was never written for it."""

from tpplan.api import advise, check, dry_run, load_plan, parallelize, verify
from tpplan.hf import from_hf
from tpplan.language import Plan, PlanError
from tpplan.proof import Verification, VerificationError
from tpplan.report import Advice, Report

__version__ = "0.1.0"
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
