"""The run of a long model from those of short ones: equal layers, one period after another.

A short model's run has one period of each stack's repeating elements; the long one's has it as
many times as the stack is longer. What lies outside (one sum over all layers' gradients, the
optimizer's step) grows by the same amount with each period, which a second run with one period
more shows. That run also proves the repetition: it must be the first one with a period repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tpplan.simulate.folding import Fold, Rename
from tpplan.simulate.steps import Collective, Member, Step, ring_bytes, worst_bytes


class NotRepeatingError(Exception):
    """What was taken for repeating does not do the same each time."""


def unfold(
    short: Sequence[Step], longer: Mapping[Fold, Sequence[Step]], times: Mapping[Fold, int]
) -> tuple[Step, ...]:
    """The steps of the model that ``short`` stands for.

    Args:
        short: with the shortest stacks; longer: with one period more of one stack.
        times: how many periods each stack lacks.

    Raises:
        NotRepeatingError: where a longer run is not the short one with a period repeated.
    """
    growth = [tuple(_growths(short, fold, run)) for fold, run in longer.items()]
    many = list(times.values())
    result = []
    for index, renames in _order(short, times):
        step = short[index]
        for n, grown in zip(many, growth, strict=True):
            step = _grow(step, grown[index], n)
        result.append(_renamed(step, renames))
    return tuple(result)


def _order(steps: Sequence[Step], times: Mapping[Fold, int]) -> list[tuple[int, list[Rename]]]:
    """The long run as indices into the short one, with what is renamed in each step."""
    order: list[tuple[int, list[Rename]]] = [(i, []) for i in range(len(steps))]
    for fold, n in times.items():
        order = _repeated(order, steps, fold, n)
    return order


def _repeated(
    order: list[tuple[int, list[Rename]]], steps: Sequence[Step], fold: Fold, n: int
) -> list[tuple[int, list[Rename]]]:
    result: list[tuple[int, list[Rename]]] = []
    block: list[int] = []
    before: int | None = None

    def close() -> None:
        if not block:
            return
        if before is None or fold.repeats(before):
            raise NotRepeatingError
        # backward meets the last elements first
        shifts = range(n + 1) if before < fold.start else range(n, -1, -1)
        for shift in shifts:
            result.extend((i, _shifted(steps[i], fold, shift)) for i in block)
        block.clear()

    for index, renames in order:
        element = steps[index].element
        if element is not None and element.stack != fold.stack:
            element = None
        if element is not None and fold.repeats(element.index):
            block.append(index)
            continue
        close()
        if element is not None:
            before = element.index
            if element.index >= fold.start + fold.period:
                renames = [*renames, *_shifted(steps[index], fold, n)]
        result.append((index, renames))
    close()
    return result


def _shifted(step: Step, fold: Fold, periods: int) -> list[Rename]:
    assert step.element is not None
    index = step.element.index
    return [Rename(fold.stack, index, index + periods * fold.period)]


def _renamed(step: Step, renames: Sequence[Rename]) -> Step:
    for rename in renames:
        element, collective = step.element, step.collective
        if element is not None:
            element = Member(element.stack, rename.target)
        if collective is not None:
            module, reason = rename.text(collective.module), rename.text(collective.reason)
            collective = replace(collective, module=module, reason=reason)
        module = rename.text(step.module)
        step = replace(step, module=module, element=element, collective=collective)
    return step


_GROWING = ("moved", "ops", "net", "peak", "gradients")
_Growth = dict[str, tuple[int, ...]]


def _growths(short: Sequence[Step], fold: Fold, longer: Sequence[Step]) -> list[_Growth]:
    """What each step of the short run has more of in the longer one."""
    order = _order(short, {fold: 1})
    if len(order) != len(longer):
        raise NotRepeatingError
    found: list[_Growth] = [{} for _ in short]
    for (index, renames), real in zip(order, longer, strict=True):
        expected = _renamed(short[index], renames)
        found[index], element = _growth(expected, real), expected.element
        within = range(fold.start, fold.start + 2 * fold.period)
        own = element is not None and element.stack == fold.stack and element.index in within
        if found[index] and own:
            raise NotRepeatingError
    return found


def _growth(expected: Step, real: Step) -> _Growth:
    growth: _Growth = {
        name: (getattr(real, name) - getattr(expected, name),)
        for name in _GROWING
        if getattr(real, name) != getattr(expected, name)
    }
    ours, theirs = expected.collective, real.collective
    if ours is not None and theirs is not None and ours != theirs:
        if len(ours.shape) != len(theirs.shape):
            raise NotRepeatingError
        growth["shape"] = tuple(b - a for a, b in zip(ours.shape, theirs.shape, strict=True))
    if _grow(expected, growth, 1) != real:
        raise NotRepeatingError
    return growth


def _grow(step: Step, growth: _Growth, times: int) -> Step:
    changes = {
        name: getattr(step, name) + growth[name][0] * times for name in _GROWING if name in growth
    }
    if "peak" in changes:  # the largest of several sums, which need not all grow alike
        changes["peak"] = max(changes["peak"], changes.get("net", step.net), 0)
    collective: Collective | None = step.collective
    if collective is not None and "shape" in growth:
        pairs = zip(collective.shape, growth["shape"], strict=True)
        shape = tuple(a + b * times for a, b in pairs)
        sent = ring_bytes(collective.kind, collective.ranks, shape, collective.dtype)
        worst = collective.worst_bytes
        if worst is not None:
            worst = worst_bytes(collective.ranks, shape, collective.dtype)
        collective = replace(collective, shape=shape, bytes=sent, worst_bytes=worst)
    return replace(step, collective=collective, **changes) if growth else step
