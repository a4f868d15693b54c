"""What a dry run found, as data: placements, collectives, memory, time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tpplan.compiled import CompiledPlan
from tpplan.cost.hardware import DEFAULT, Hardware, load_hardware
from tpplan.cost.memory import Memory, memory_of
from tpplan.cost.timing import Span, TimeSummary, summarize, timeline
from tpplan.language import FrozenMap
from tpplan.observe.calls import said_of
from tpplan.simulate.execute import Execution, Training
from tpplan.simulate.steps import PHASES, Collective, Step, counts


@dataclass(frozen=True)
class DryRun:
    """A dry run.

    Attributes:
        model: the model's class; compiled: its plan; batch, seq: the shape it was run with;
            seq is None of inputs without positions, as images.
        buffers: bytes of the model's buffers.
        training: how it was trained; run: one training step of the first rank.
        other: the same with activation checkpointing where ``run`` is without, and without where
            it is with; None where that could not be run.
        executed: of each stack of equal layers, how many were executed and how many there are.
        hardware: what it is timed on.
        companions: the same step at other tps and in the other mode, to compare it with.
        refused: those that could not be compiled, and why.
    """

    model: str
    compiled: CompiledPlan
    batch: int
    seq: int | None
    buffers: int
    training: Training
    run: Execution
    other: Execution | None = None
    executed: Mapping[str, tuple[int, int]] = FrozenMap()
    hardware: Hardware = field(default_factory=lambda: load_hardware(DEFAULT))
    companions: tuple[DryRun, ...] = ()
    refused: Mapping[str, str] = FrozenMap()

    @property
    def size(self) -> str:
        """Of what it was called with, in words."""
        return said_of(self.batch, self.seq)

    @property
    def steps(self) -> Sequence[Step]:
        """What the first rank does, in order."""
        return self.run.steps

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """What the first rank sends, in order."""
        return tuple(step.collective for step in self.steps if step.collective is not None)

    def counts(self, phase: str) -> dict[str, int]:
        """Collectives of each kind in ``phase``: forward, backward, gradient_sync or optimizer."""
        if phase not in PHASES:
            raise ValueError(f"no phase '{phase}'; there are {', '.join(PHASES)}")
        return counts(self.collectives, phase)

    def bytes_sent(self, phase: str) -> int:
        """Bytes a rank sends in ``phase`` (ring algorithms)."""
        return sum(c.bytes for c in self.collectives if c.phase == phase)

    def worst_bytes_sent(self, phase: str) -> int:
        """The same where all tokens choose the experts of one rank: of that rank's exchanges.

        As much as ``bytes_sent`` where nothing hangs on what tokens choose.
        """
        return sum(c.at_worst for c in self.collectives if c.phase == phase)

    @cached_property
    def memory(self) -> Memory:
        """Bytes on the first rank, which has the most."""
        return memory_of(self.compiled, self.run.steps, self.run.optimizer, self.buffers)

    @cached_property
    def other_memory(self) -> Memory | None:
        """The same with activation checkpointing, or without where the run is with."""
        if self.other is None:
            return None
        return memory_of(self.compiled, self.other.steps, self.other.optimizer, self.buffers)

    @cached_property
    def time(self) -> TimeSummary:
        """How long the first rank takes, as modelled."""
        whole = self.other if self.training.checkpointing else None
        flops = None if whole is None else sum(step.flops for step in whole.steps)
        return summarize(self.steps, self.hardware, flops)

    @cached_property
    def timeline(self) -> tuple[Span, ...]:
        """What it does when, as modelled."""
        return timeline(self.steps, self.hardware)

    @cached_property
    def parameter_counts(self) -> Mapping[str, int]:
        """Parameters of the whole model, and of the first rank."""
        entries = self.compiled.parameters.values()
        return {
            "total": sum(math.prod(e.shape) for e in entries),
            "per_rank": sum(math.prod(e.local_shape) for e in entries),
        }
