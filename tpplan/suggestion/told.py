"""What a search tried, and why the plan that it gives back was taken."""

from __future__ import annotations

from tpplan.observe.calls import said_of
from tpplan.suggestion.find import Suggestion
from tpplan.suggestion.weigh import Candidate


def explained(found: Suggestion) -> str:
    """A few lines for the terminal: layouts that were refused, plans that held and their costs."""
    task = found.task
    lines = [f"{found.tried} plans were compiled"]
    for name, refused in found.refused.items():
        lines.append(f"{name}: refused before what is written")
        lines += [f"  {why}" for why in dict.fromkeys(refused)]
    lines.append(
        f"a training step at tp {task.tp}, {said_of(task.batch, task.seq)}, "
        f"{task.hardware.name}, as modelled:"
    )
    width = max(len(candidate.name) for candidate in found.candidates)
    for i, candidate in enumerate(found.candidates):
        lines.append(f"{'*' if i == 0 else ' '} {candidate.name:<{width}}  {_cost(candidate)}")
    return "\n".join(lines)


def _cost(candidate: Candidate) -> str:
    if candidate.seconds is None:
        return candidate.why
    cost = f"{1e3 * candidate.seconds:.4g} ms, {candidate.bytes / 2**30:.3g} GiB on a rank"
    return f"{cost}: {candidate.why}" if candidate.why else cost
