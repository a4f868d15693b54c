"""A plan proved numerically: every rank simulated, every gradient compared."""

from tpplan.proof.prove import prove as prove
from tpplan.proof.prove import prove_once as prove_once
from tpplan.proof.verify import Check as Check
from tpplan.proof.verify import Verification as Verification
from tpplan.proof.verify import VerificationError as VerificationError
from tpplan.proof.verify import describe as describe
from tpplan.proof.verify import verify as verify
