"""A plan proved numerically: every rank simulated, every gradient compared."""

from tpplan.proof.prove import prove, prove_once
from tpplan.proof.verify import Check, Verification, VerificationError, describe, verify

__all__ = [
    "Check",
    "Verification",
    "VerificationError",
    "describe",
    "prove",
    "prove_once",
    "verify",
]
