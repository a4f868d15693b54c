"""How long a run takes, by a roofline: what each step computes, moves and sends, at its ceilings.

A matmul takes the longer of its FLOPs over the FLOP/s and its bytes over the memory's bandwidth
(Williams, Waterman and Patterson 2009, "Roofline: an insightful visual performance model for
multicore architectures", CACM 52(4)); everything else its bytes over the bandwidth; collectives
what ``costs`` says. All ceilings are those that are reached, not the peaks.

Collectives are sent one after the other, and waited for where the run waits for them: what is
computed in between hides them. What could overlap besides is said apart: a collective with the
matmuls that need its result or make its input, cut into pieces (Wang et al. 2023, "Overlap
communication with dependent computation via decomposition in large deep learning models", ASPLOS;
PyTorch's async tensor parallelism).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from tpplan.cost.costs import Cost, collective_cost
from tpplan.cost.hardware import Hardware
from tpplan.language import FrozenMap
from tpplan.simulate.steps import PHASES, Collective, Matmul, Member, Step, data_bytes

NOTE = (
    "a roofline model at the bandwidths and FLOP/s that are reached, without kernel launches "
    "or the host's time"
)
# to which side the matmuls lie that a collective can run beside; no other phase has any
_BESIDE: Mapping[str, int] = {"all_gather": 1, "all_reduce": -1, "reduce_scatter": -1}
_OVERLAPPING = ("forward", "backward")


@dataclass(frozen=True)
class Span:
    """Something that takes time on the first rank.

    Attributes:
        start, seconds: when it begins and how long it takes.
        lane: what is busy; bound: what it waits for.
        phase: forward, backward, gradient_sync or optimizer.
        module: path of the module it belongs to; element: of the stack's.
        what: "2 matmuls", "other ops", or a collective and its algorithm.
        overlappable: seconds of a collective that could run beside matmuls, but do not.
        hidden: seconds of a collective that the run does not wait for.
    """

    start: float
    seconds: float
    lane: Literal["compute", "communication"]
    phase: str
    module: str
    what: str
    bound: Literal["flops", "memory", "link"]
    element: Member | None = None
    overlappable: float = 0.0
    hidden: float = 0.0


@dataclass(frozen=True)
class Share:
    """Seconds of a part of a run; ``overlappable`` and ``hidden`` are some of ``communication``."""

    compute: float = 0.0
    communication: float = 0.0
    overlappable: float = 0.0
    hidden: float = 0.0

    @property
    def exposed(self) -> float:
        """Seconds that are waited."""
        return self.communication - self.hidden

    @property
    def seconds(self) -> float:
        """How long it takes: what is computed, and what is waited."""
        return self.compute + self.exposed

    @property
    def ratio(self) -> float:
        """Communication to computation; 0 where there is neither."""
        return self.communication / self.compute if self.compute else 0.0

    def to_dict(self) -> dict[str, float]:
        """Plain data for JSON."""
        own = {**asdict(self), "exposed": self.exposed, "ratio": self.ratio}
        return {"seconds": self.seconds, **own}


@dataclass(frozen=True)
class Layer:
    """The typical element of a stack: that of median time.

    Attributes:
        index: which one it is, of ``count``.
        total: its time in all phases; phases: and in each.
    """

    index: int
    count: int
    total: Share
    phases: Mapping[str, Share]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "index": self.index,
            "count": self.count,
            **self.total.to_dict(),
            "phases": {phase: share.to_dict() for phase, share in self.phases.items()},
        }


@dataclass(frozen=True)
class TimeSummary:
    """The modelled time of a run of one rank.

    Attributes:
        hardware: its name.
        total: of the whole run; phases: of each phase that takes any time.
        flops: of all matmuls, recomputed ones too; by a rank.
        utilisation: of the peak FLOP/s, without what is recomputed: model FLOPs utilisation
            (Chowdhery et al. 2022, "PaLM", section 4.1).
        layers: the typical element of each stack of modules, by the stack's path.
    """

    hardware: str
    total: Share
    phases: Mapping[str, Share]
    flops: int
    utilisation: float
    layers: Mapping[str, Layer]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "modelled": True,
            "note": NOTE,
            "hardware": self.hardware,
            **self.total.to_dict(),
            "phases": {phase: share.to_dict() for phase, share in self.phases.items()},
            "flops": self.flops,
            "utilisation": self.utilisation,
            "layers": {stack: layer.to_dict() for stack, layer in self.layers.items()},
        }


def timeline(steps: Sequence[Step], hardware: Hardware) -> tuple[Span, ...]:
    """What the first rank does when: one thing after the other on each lane.

    The order within a step is not known: matmuls come first, then everything else it moves, then
    its collective.
    """
    found = _overlappable(steps, hardware)
    spans: list[Span] = []
    sent: list[int] = []  # the spans of the collectives
    now = free = 0.0
    for index, step in enumerate(steps):
        for span in _computed(step, hardware, now):
            spans.append(span)
            now = span.start + span.seconds
        if step.collective is not None:
            span = _sent(step, step.collective, hardware, max(now, free))
            free = span.start + span.seconds
            sent.append(len(spans))
            could = found.get(index, 0.0)
            hidden = span.seconds if step.later else min(0.0, now - span.start)
            if step.collective.fused:  # but for the first piece, or the last
                hidden = could * (1 - 1 / step.collective.ranks)
                free, could = free - hidden, could - hidden
            spans.append(replace(span, overlappable=could, hidden=hidden))
            now = now if step.later else free
        if step.awaited is not None:
            at = sent[-1 - step.awaited]
            span = spans[at]
            waited = max(0.0, span.start + span.seconds - now)
            # what is waited is not hidden, and of that some could be
            could = min(span.overlappable, waited)
            spans[at] = replace(span, hidden=span.seconds - waited, overlappable=could)
            now += waited
    return tuple(spans)


def summarize(
    steps: Sequence[Step], hardware: Hardware, model_flops: int | None = None
) -> TimeSummary:
    """Where the time of a run goes.

    Args:
        model_flops: those that utilisation counts, where ``steps`` recompute some: FLOPs of the
            run that does not.
    """
    spans = timeline(steps, hardware)
    total = _share(spans)
    flops = sum(step.flops for step in steps)
    at_peak = sum(
        matmul.flops * count / hardware.peak(matmul.dtype)
        for step in steps
        for matmul, count in step.matmuls
    )
    if model_flops is not None and flops:
        at_peak *= model_flops / flops
    return TimeSummary(
        hardware=hardware.name,
        total=total,
        phases=_by_phase(spans, PHASES),
        flops=flops,
        utilisation=at_peak / total.seconds if total.seconds else 0.0,
        layers=FrozenMap(_layers(spans)),
    )


def flops_by_module(steps: Iterable[Step]) -> Mapping[str, int]:
    """FLOPs of each module's own matmuls in all phases, by path; without those of its children."""
    found: Counter[str] = Counter()
    for step in steps:
        if step.flops:
            found[step.module] += step.flops
    return FrozenMap(found)


# --- spans


def _matmul_seconds(matmul: Matmul, real: Hardware) -> tuple[float, Literal["flops", "memory"]]:
    """How long a matmul takes, and what it waits for."""
    computing = matmul.flops / real.peak(matmul.dtype)
    moving = matmul.bytes / real.memory_bandwidth
    return max(computing, moving), "flops" if computing >= moving else "memory"


def _collective_cost(c: Collective, hardware: Hardware) -> Cost:
    return collective_cost(c.kind, data_bytes(c.shape, c.dtype), c.ranks, hardware, c.stride)


def _computed(step: Step, hardware: Hardware, now: float) -> Iterable[Span]:
    real, where = hardware.reached, (step.phase, step.module)
    for matmul, count in step.matmuls:
        each, bound = _matmul_seconds(matmul, real)
        what = "matmul" if count == 1 else f"{count} matmuls"
        yield Span(now, each * count, "compute", *where, what, bound, step.element)
        now += each * count
    if step.moved:
        seconds = step.moved / real.memory_bandwidth
        yield Span(now, seconds, "compute", *where, "other ops", "memory", step.element)


def _sent(step: Step, c: Collective, hardware: Hardware, start: float) -> Span:
    cost = _collective_cost(c, hardware)
    where, what = (c.phase, c.module), f"{c.kind} ({cost.algorithm})"
    return Span(start, cost.seconds, "communication", *where, what, "link", step.element)


# --- overlap


def _overlappable(steps: Sequence[Step], hardware: Hardware) -> dict[int, float]:
    """Seconds of each collective, by its step's index, that matmuls next to it could hide.

    No matmul hides more than it takes, in all.
    """
    real = hardware.reached
    # what ends with a wait runs beside a collective already
    free = [
        sum(_matmul_seconds(m, real)[0] * n for m, n in step.matmuls if step.awaited is None)
        for step in steps
    ]
    found: dict[int, float] = {}
    for index, step in enumerate(steps):
        c = step.collective
        if c is None or c.phase not in _OVERLAPPING or c.kind not in _BESIDE:
            continue
        left = seconds = _collective_cost(c, hardware).seconds
        for neighbour in _beside(steps, index, c):
            taken = min(left, free[neighbour])
            free[neighbour] -= taken
            left -= taken
        found[index] = seconds - left
    return found


def _beside(steps: Sequence[Step], index: int, collective: Collective) -> Iterable[int]:
    """The steps whose matmuls come directly after an all-gather, or before a reduction.

    Those are the nearest step that computes anything, and further ones as long as they do matmuls
    and nothing else. Only views lie between, so that the matmuls take what was gathered or make
    what is reduced (or are the weight gradients of those that do).
    """
    direction = _BESIDE[collective.kind]
    nearest = True
    at = index if direction < 0 else index + 1
    while 0 <= at < len(steps) and steps[at].phase == collective.phase:
        step = steps[at]
        if direction < 0 and at != index and step.collective is not None:
            return
        if step.matmuls and (nearest or not step.moved):
            yield at
        if step.moved or (direction > 0 and step.collective is not None):
            return
        nearest = nearest and not step.matmuls
        at += direction


# --- sums


def _share(spans: Iterable[Span]) -> Share:
    compute = communication = overlappable = hidden = 0.0
    for span in spans:
        if span.lane == "compute":
            compute += span.seconds
        else:
            communication += span.seconds
            overlappable += span.overlappable
            hidden += span.hidden
    return Share(compute, communication, overlappable, hidden)


def _by_phase(spans: Sequence[Span], phases: Iterable[str]) -> FrozenMap[Share]:
    """Those of the phases that take any time."""
    shares = {phase: _share(s for s in spans if s.phase == phase) for phase in phases}
    return FrozenMap({phase: share for phase, share in shares.items() if share.seconds})


def _layers(spans: Iterable[Span]) -> dict[str, Layer]:
    stacks: dict[str, dict[int, list[Span]]] = {}
    for span in spans:
        if span.element is not None and span.phase in _OVERLAPPING:
            elements = stacks.setdefault(span.element.stack, {})
            elements.setdefault(span.element.index, []).append(span)
    return {stack: _typical(elements) for stack, elements in stacks.items()}


def _typical(elements: Mapping[int, Sequence[Span]]) -> Layer:
    order = sorted(elements, key=lambda index: (_share(elements[index]).seconds, index))
    index = order[(len(order) - 1) // 2]
    mine = elements[index]
    return Layer(index, len(order), _share(mine), _by_phase(mine, _OVERLAPPING))
