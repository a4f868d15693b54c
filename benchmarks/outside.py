"""Models from outside the zoo, each with the plan of a user: what that costs and spares.

The models of tests/outside, which are written as their authors write them: small, with random
weights, whole against sharded on simulated ranks, outputs and every gradient.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

import tpplan
from benchmarks.common import markdown
from tests.outside.models import MODELS, Outside

MODES = {"TP": False, "TP+SP": True}
HEADS = (
    *("model", "plan", "rules", "on a rank"),
    *("TP: forward", "backward", "TP+SP: forward", "backward", "gradient error"),
)
# batch, length and seed of the call: the one that the plan is compiled with in the tests
CALL = (2, 8, 1)
_LONGEST_REASON = 150


@dataclass(frozen=True)
class Row:
    """What became of a model.

    Attributes:
        rules: those that its user writes; of a shipped plan all.
        checks: by mode; a mode that is missing failed for ``reason``.
    """

    name: str
    plan: str
    rules: int
    checks: Mapping[str, tpplan.Verification]
    reason: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        """As in ``HEADS``."""
        shares = [found.rank_share for found in self.checks.values()]
        share = f"{max(shares):.0%}" if shares else ""
        errors = [found.gradient_error for found in self.checks.values()]
        error = self.reason or f"{max(errors):.0e}"
        counts = [count for mode in MODES for count in self._counts(mode)]
        return (self.name, self.plan, str(self.rules), share, *counts, error)

    def _counts(self, mode: str) -> tuple[str, str]:
        """Collectives measured of the least possible, forward and backward."""
        if mode not in self.checks:
            return "", ""
        found = self.checks[mode]
        forward, backward = (
            "/".join(str(sum(c.get(phase, {}).values())) for c in (found.counts, found.floor))
            for phase in ("forward", "backward")
        )
        return forward, backward


def plan_of(outside: Outside) -> tuple[tpplan.Plan, str, int]:
    """The plan, where it is from, and how many rules its user writes."""
    plan = tpplan.load_plan(outside.plan, outside.make())
    if isinstance(outside.plan, str):
        return plan, plan.name, len(plan.rules)
    base = outside.plan.get("extends")
    return plan, f"extends {base}" if base else "own", len(outside.plan["rules"])


def examine(name: str, outside: Outside, tp: int) -> Row:
    """Shard one model in both modes."""
    plan, label, rules = plan_of(outside)
    checks: dict[str, tpplan.Verification] = {}
    reason = ""
    for mode, sp in MODES.items():
        call = dict(outside.call(*CALL))
        try:
            checks[mode] = tpplan.verify(outside.make, plan, tp, sequence_parallel=sp, inputs=call)
        except (tpplan.PlanError, tpplan.VerificationError) as error:
            line = str(error).strip().splitlines()[0].split("error: ", 1)[-1]
            reason = f"{mode}: {line}".replace("|", "/")[:_LONGEST_REASON]
    return Row(name, label, rules, checks, reason)


def document(rows: Sequence[Row], tp: int, command: str) -> str:
    """The whole page."""
    batch, length, _ = CALL
    parts = [
        "# Models from outside the zoo",
        f"`{command}`, tpplan {tpplan.__version__}, Python {sys.version.split()[0]}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}.",
        "Written as their authors write them (`tests/outside`), with the shortest plan that their "
        f"users get by with: two layers, random weights, whole against sharded at tp {tp}, in "
        f"float32, batch {batch}, length {length} (images of 16 × 16). Plan: a shipped one, one "
        "that extends it, or the user's own; rules: the lines of rules in it (a shipped one has "
        "nothing to write). On a rank: the largest share of the parameters' bytes. Forward and "
        "backward: collectives measured / the least that the plan's regions allow without a loss; "
        "under TP+SP one all-reduce more sums the gradients of what is replicated. The error is "
        "the worst of all gradients in both modes (`benchmarks/common.py` has the metric), or the "
        "first line of why there is none.",
        markdown(HEADS, (row.cells for row in rows)),
        "What is above the least: nanoGPT computes its loss, on sharded logits: three small "
        "all-reduces. What needs the whole sequence behind the stack (a pooled or picked token, "
        "a replicated head) gathers it once, and once more where it is given out as well; a "
        "replicated module in the stack gathers once in each layer. A head that is no module (the "
        "tied torchtune) is not counted in the least, and takes what any head takes.",
    ]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    """Examine, print, write; status 1 where a model fails in a mode."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="models with this in their name")
    parser.add_argument("--tp", type=int, default=2, metavar="N")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the page here")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)

    torch.manual_seed(0)
    rows = []
    for name, outside in MODELS.items():
        if options.only in name:
            rows.append(examine(name, outside, options.tp))
    print(markdown(HEADS, (row.cells for row in rows)))
    if options.out is not None:
        command = " ".join(["python -m benchmarks.outside", *sys.argv[1:]])
        options.out.write_text(document(rows, options.tp, command))
    return 1 if any(row.reason for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
