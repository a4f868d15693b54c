"""What is said where the proof of a sharded region fails."""

from __future__ import annotations

from collections.abc import Mapping

from tpplan.language import Rule
from tpplan.observe.trace import Trace
from tpplan.planner import infer
from tpplan.planner.complaints import Complaints
from tpplan.planner.match import fold
from tpplan.planner.replay import Failure
from tpplan.styles import named
from tpplan.styles.attention import ATTENTION

_PACKED = "a layer that is several projections in one needs 'packed'"


def say_unproved(
    failure: Failure, columns: set[str], trace: Trace, tp: int, complaints: Complaints
) -> None:
    """Blame the layers whose columns were at work where a rank's run departs.

    Args:
        columns: the column-parallel projections.
    """
    path, message = failure.path, failure.message
    rules = complaints.matches.modules
    own = rules.get(path)
    order = dict.fromkeys(call.path for call in trace.calls)
    made = [other for other in order if other in columns and _inside(other, path)]
    call = next((c for c in trace.calls if c.path == path), None)
    if call is not None and not made:
        styles = {known: named(rule.style) for known, rule in rules.items()}
        made = infer.sources(trace, call, styles)
    rule = rules[made[0]] if made else _rule_near(rules, path)
    paths = [path]
    hint = (
        "a size written in its code may have to become a per-rank value, see 'attributes' of the "
        f"{ATTENTION.name} style; {_PACKED}"
    )
    at = f"on rank {failure.rank} of {tp}"
    if message.startswith("fails: ") and made:
        message = f"fails with its part of {fold(made)}: {message.removeprefix('fails: ')}"
    if message.startswith("its input"):
        departs = f"{at}, {message.replace('its input', f'the input of {path}', 1)}"
        paths = made or paths
        message = f"the columns of one rank are not enough for its work: {departs}"
        hint = (
            f"{_PACKED}; a size in the model's code may have to become a per-rank value, see "
            f"'attributes' of the {ATTENTION.name} style"
        )
    elif own is not None and named(own.style).heads:
        rule, message = own, f"{at} it {message}"
    else:
        message = f"{at} it {message}"
    complaints.about(rule, paths, message, hint)


def _rule_near(rules: Mapping[str, Rule], path: str) -> Rule | None:
    """The rule of a module, or of the first one inside it."""
    near = (rule for known, rule in rules.items() if known == path or _inside(known, path))
    return next(near, None)


def _inside(path: str, outer: str) -> bool:
    return not outer or path.startswith(f"{outer}.")
