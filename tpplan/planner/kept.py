"""What modules keep as attributes in their forward, which a training loop may read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set

from tpplan.compiled import Boundary
from tpplan.observe.trace import Trace
from tpplan.places import Kept, Place
from tpplan.planner.flow import Flow


def kept_in(trace: Trace, path: str) -> Iterator[tuple[int, Place]]:
    """Each tensor that a module, or one inside of it, keeps by itself, and its place."""
    inside = f"{path}." if path else ""
    for owner, place, number in trace.kept:
        if len(place) == 1 and (owner == path or owner.startswith(inside)):
            yield number, (Kept(owner.removeprefix(path).removeprefix("."), str(place[0])),)


def kept_parts(
    flows: Iterable[tuple[Trace, Flow]],
    boundaries: Mapping[str, Iterable[Boundary]],
    within: Set[str],
    escaping: Mapping[str, Iterable[Place]],
) -> dict[str, tuple[tuple[str, bool], ...]]:
    """The attributes that hold a rank's part, or the gradient of which is one: by their module.

    With each, whether it is whole, and only the gradient a part.

    Args:
        within: modules all of whose tensors are a rank's.
        escaping: the places that are put right, by module.
    """
    right = {
        (".".join(filter(None, (path, place[0].path))), place[0].name)
        for path, places in escaping.items()
        for place in places
        if place and isinstance(place[0], Kept)
    }
    entered = {path: {b.arguments[0].name for b in found} for path, found in boundaries.items()}
    found: dict[str, dict[str, bool]] = {}
    for trace, flow in flows:
        for owner, name, whole in _parts(trace, flow, entered, within):
            if (owner, name) not in right:
                names = found.setdefault(owner, {})
                names[name] = names.get(name, True) and whole
    return {path: tuple(names.items()) for path, names in found.items()}


def _parts(
    trace: Trace, flow: Flow, entered: Mapping[str, Set[str]], within: Set[str]
) -> Iterator[tuple[str, str, bool]]:
    maker = {number: op.call for op in trace.ops for number in op.outputs}
    given: dict[int, list[str]] = {}
    for call in trace.calls:
        names = entered.get(call.path, frozenset())
        for number, arguments in call.arguments.items():
            if call.path in within or any(a.name in names for a in arguments):
                given.setdefault(number, []).append(call.path)
    for owner, place, number in trace.kept:
        if number not in trace.floating or number not in maker:
            continue
        part = any(owner == path or owner.startswith(f"{path}.") for path in given.get(number, ()))
        if number in flow.region and not part:
            yield owner, str(place[0]), number in flow.whole_in_region and len(place) == 1
        elif part or any(c.path in within for c in trace.ancestors(maker[number])):
            yield owner, str(place[0]), False
