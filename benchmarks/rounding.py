"""How much of a gradient's error is float32's: an unsharded model, summed in another order.

Matrix products of the unsharded model add their terms in a random order, forward and backward,
which changes nothing but rounding. Beside it stands the sharded model, TP and TP+SP at tp 2 and 4.
Where a reordered model is above the tolerance that plans are held to, no sharding can stay below
it: its sums are in another order too.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import statistics
from functools import partial

import tpplan
from benchmarks import zoo
from benchmarks.common import TOLERANCE, finish, option_parser, parse, table
from tpplan.compat import simulate
from tpplan.planner import compile_plan
from tpplan.proof.ranks import Reference, gradient_errors, run_rank
from tpplan.proof.rounding import reordered
from tpplan.proof.verify import references_of


def worst(reference: Reference, other: Reference) -> float:
    """The worst gradient error of the unsharded model against itself."""
    return max(gradient_errors(reference.gradients, other.gradients).values())


def sharded(reference: Reference) -> float:
    """The worst gradient error of the model's shipped plan, of all tp and modes."""
    plan = tpplan.load_plan("auto", reference.model)
    worst = 0.0
    for tp in (2, 4):
        for sp in (False, True)[: 1 + plan.sequence_parallel]:
            compiled = compile_plan(reference.model, plan, tp, sp, inputs=reference.call[1])
            outcomes = simulate(tp, partial(run_rank, reference=reference, compiled=compiled))
            worst = max(worst, *(e for o in outcomes for e in o.gradient_errors.values()))
    return worst


def main() -> int:
    """Measure and print."""
    parser = option_parser(__doc__)
    parser.add_argument("names", nargs="*", default=["apertus", "llama"], help="of benchmarks.zoo")
    parser.add_argument("--seeds", type=int, default=12, help="random weights of each model")
    options = parse(parser)
    figures: dict[str, dict[str, list[float]]] = {}
    rows, missed = [], []
    for name in options.names:
        found: dict[str, list[float]] = {"reordered": []}
        for seed in range(options.seeds):
            model = zoo.tiny(name, seed)
            (reference,) = references_of(model, zoo.example(model), seed)
            others = (reordered(reference, order) for order in range(3))
            found["reordered"].append(max(worst(reference, other) for other in others))
            if not options.without_tpplan:
                found.setdefault("sharded", []).append(sharded(reference))
        figures[name] = found
        for what, errors in found.items():
            above = sum(e > TOLERANCE for e in errors)
            cells = (f"{statistics.median(errors):.1e}", f"{max(errors):.1e}")
            rows.append((name, what, *cells, f"{above} of {len(errors)}"))
        ours, theirs = (statistics.median(found.get(k, [0.0])) for k in ("sharded", "reordered"))
        if ours > 2 * theirs:
            missed.append(f"{name}: sharded {ours:.1e}, more than twice the reordered {theirs:.1e}")
    print(table(("model", "gradients", "median", "worst", f"above {TOLERANCE:.0e}"), rows))
    return finish(options, {"models": figures}, missed)


if __name__ == "__main__":
    raise SystemExit(main())
