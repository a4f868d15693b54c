"""What is said where the plan's layer stack is not one that the model calls."""

from __future__ import annotations

from collections.abc import Iterable, Set

from torch import nn

from tpplan.language import Plan, nearest
from tpplan.observe.trace import Trace
from tpplan.planner.complaints import Complaints
from tpplan.planner.elements import stream_of
from tpplan.planner.match import folded

_OFF = "turn sequence_parallel off"


def say_unused(plan: Plan, model: nn.Module, trace: Trace, complaints: Complaints) -> None:
    """The plan's ``layers:`` are not called, or not given the stream."""
    assert plan.layers is not None
    text, called = plan.layers.text, dict.fromkeys(call.path for call in trace.calls)
    held = [path for path, _ in model.named_modules() if plan.layers.matches(path)]
    inside = [p for p in called if any(p.startswith(f"{path}.") for path in held)]
    outermost = [p for p in inside if not any(p.startswith(f"{other}.") for other in inside)]
    hint: str | None = "name modules that take the stream and give it on in the same shape"
    if any(path in called for path in held):
        said = "names no module that gives on what it is given"
    elif outermost:
        said = "names modules that are only held, not called"
        hint = f"name those inside of them: {_patterns(outermost)}"
    else:
        said = "names no module that was called"
        guess = nearest(plan.layers, called)
        hint = f"did you mean '{guess}'?" if guess else hint
    complaints.say(f"layers: '{text}' {said}", plan.layers_position, hint)


def say_none_found(
    rows: Iterable[str], norms: Set[str], trace: Trace, complaints: Complaints
) -> None:
    """No repeated layers around the row-parallel layers ``rows``.

    Args:
        norms: what is to run on a rank's rows.
    """
    called = {call.path: call for call in reversed(trace.calls)}
    layers = [path for path in (_numbered_around(row) for row in rows) if path in called]
    inside = [p for p in reversed(called) if p in norms and _numbered_around(p) in layers]
    hint = f"name it with 'layers:', or {_OFF}"
    if inside and not any(stream_of(trace, called[path]) for path in layers):
        hint = "its layers are not given the stream, or do not give it on: "
        hint += f"{_naming(inside)}, or {_OFF}"
    elif layers:
        stack = dict.fromkeys(f"{path.rpartition('.')[0]}.*".lstrip(".") for path in layers)
        hint = f"name it, 'layers: {next(iter(stack))}', or {_OFF}"
    message = "no layer stack was found for the sequence-sharded stream"
    complaints.about(None, [""], message, hint)


def hint_instead(layers: Iterable[str], norms: Iterable[str]) -> str:
    """What may be written where layers of the stack give on other things than the stream alone."""
    around = tuple(f"{path}." for path in layers)
    inside = [path for path in norms if path.startswith(around)]
    return f"{_naming(inside)}, or {_OFF}" if inside else _OFF


def _naming(norms: Iterable[str]) -> str:
    return f"name what runs on rows inside of its layers in one 'layers:', {_patterns(norms)}"


def _numbered_around(path: str) -> str:
    """The innermost numbered module around one."""
    parts = path.split(".")[:-1]
    while parts and not parts[-1].isdigit():
        parts.pop()
    return ".".join(parts)


def _patterns(paths: Iterable[str]) -> str:
    return ", ".join(f"'{pattern}'" for pattern in dict.fromkeys(folded(path) for path in paths))
