"""A plan proved numerically: every rank simulated, every gradient compared."""

from tpplan.verify.verify import Check, Verification, VerificationError, verify

__all__ = ["Check", "Verification", "VerificationError", "verify"]
