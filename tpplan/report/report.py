"""What a dry run found, as data: placements, collectives, bytes, memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from tpplan.layout import Rows
from tpplan.planner import CompiledPlan, ParameterPlan
from tpplan.report.recorder import PHASES, Collective, counts

JSON_VERSION = 1


@dataclass(frozen=True)
class Report:
    """A dry run. ``print(report)`` shows it, ``to_dict()`` is its stable, versioned form.

    Attributes:
        model: the model's class; compiled: its plan; batch, seq: the shape it was run with.
        collectives: of the first rank, in order.
    """

    model: str
    compiled: CompiledPlan
    batch: int
    seq: int
    collectives: tuple[Collective, ...]

    def counts(self, phase: str) -> dict[str, int]:
        """Collectives of each kind in ``phase``: forward, backward, gradient_sync or optimizer."""
        if phase not in PHASES:
            raise ValueError(f"no phase '{phase}'; there are {', '.join(PHASES)}")
        return counts(list(self.collectives), phase)

    def bytes_sent(self, phase: str) -> int:
        """Bytes a rank sends in ``phase`` (ring algorithms)."""
        return sum(c.bytes for c in self.collectives if c.phase == phase)

    @cached_property
    def memory(self) -> Mapping[str, int]:
        """Bytes of parameters: of the whole model, and of the first rank, which has the most."""
        entries = self.compiled.parameters.values()
        return {
            "parameters_total": sum(_bytes(e, e.shape) for e in entries),
            "parameters_per_rank": sum(_bytes(e, e.local_shape) for e in entries),
        }

    @cached_property
    def parameter_counts(self) -> Mapping[str, int]:
        """Parameters of the whole model, and of the first rank."""
        entries = self.compiled.parameters.values()
        return {
            "total": sum(math.prod(e.shape) for e in entries),
            "per_rank": sum(math.prod(e.local_shape) for e in entries),
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain data, the ``--json`` of the command line; its shape is fixed by ``version``.

        The run is a forward and a backward: the phase ``optimizer`` is there, and empty.
        """
        compiled = self.compiled
        return {
            "version": JSON_VERSION,
            "model": self.model,
            "plan": compiled.plan.name,
            "tp": compiled.tp,
            "sequence_parallel": compiled.sequence_parallel,
            "batch": self.batch,
            "seq": self.seq,
            "counts": {phase: self.counts(phase) for phase in PHASES},
            "bytes": {phase: self.bytes_sent(phase) for phase in PHASES},
            "collectives": [c.to_dict() for c in self.collectives],
            "parameters": [_parameter(e) for e in compiled.parameters.values()],
            "parameter_counts": dict(self.parameter_counts),
            "memory": dict(self.memory),
        }

    def __str__(self) -> str:
        from tpplan.report.text import render

        return render(self)


def _bytes(entry: ParameterPlan, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * torch.empty((), dtype=entry.dtype, device="meta").element_size()


def _parameter(entry: ParameterPlan) -> dict[str, Any]:
    return {
        "name": entry.name,
        "shape": list(entry.shape),
        "dtype": str(entry.dtype).removeprefix("torch."),
        "placement": str(rows) if isinstance(rows := entry.placement, Rows) else repr(rows),
        "local_shape": list(entry.local_shape),
        "gradient_summed": entry.summed,
        "aliases": list(entry.aliases),
        "rule": None if entry.rule is None else entry.rule.pattern.text,
    }
